"""POST /v1/rerank, /v2/rerank, /rerank."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import pooled
from nv_api.server.jobs.rerank import RerankJob
from nv_api.server.protocol.rerank import RerankRequest, RerankResponse
from nv_api.server.routes.described import body_of, errors, json_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)
RESPONSES = {**json_of("The documents, the best first.", RerankResponse), **errors()}
BODY = body_of(RerankRequest)


@router.post("/v1/rerank", responses=RESPONSES, openapi_extra=BODY)
@router.post("/v2/rerank", responses=RESPONSES, openapi_extra=BODY)
@router.post("/rerank", responses=RESPONSES, openapi_extra=BODY)
async def rerank_documents(request: Request) -> Response:
    """Sort texts by how well they answer a query."""
    return await pooled(request, RerankRequest, RerankJob)
