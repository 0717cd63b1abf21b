"""POST /classify."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import pooled
from nv_api.server.jobs.classify import ClassifyJob
from nv_api.server.protocol.classify import ClassifyRequest, ClassifyResponse
from nv_api.server.routes.described import body_of, errors, json_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/classify",
    responses={**json_of("The class values.", ClassifyResponse), **errors()},
    openapi_extra=body_of(ClassifyRequest),
)
async def classify_texts(request: Request) -> Response:
    """Classify texts."""
    return await pooled(request, ClassifyRequest, ClassifyJob)
