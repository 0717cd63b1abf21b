"""POST /pooling."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import pooled
from nv_api.server.jobs.pooling import PoolingJob
from nv_api.server.protocol.pooling import PoolingRequest, PoolingResponse
from nv_api.server.routes.described import body_of, errors, json_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/pooling",
    responses={**json_of("The results.", PoolingResponse), **errors()},
    openapi_extra=body_of(PoolingRequest),
)
async def pool_texts(request: Request) -> Response:
    """Pool texts: any task of the model."""
    return await pooled(request, PoolingRequest, PoolingJob)
