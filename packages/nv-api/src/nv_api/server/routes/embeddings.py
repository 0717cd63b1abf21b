"""POST /v1/embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import pooled
from nv_api.server.jobs.embeddings import EmbeddingsJob
from nv_api.server.protocol.embeddings import EmbeddingsRequest, EmbeddingsResponse
from nv_api.server.routes.described import body_of, errors, json_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/embeddings",
    responses={**json_of("The embeddings.", EmbeddingsResponse), **errors()},
    openapi_extra=body_of(EmbeddingsRequest),
)
async def create_embeddings(request: Request) -> Response:
    """Embed texts."""
    return await pooled(request, EmbeddingsRequest, EmbeddingsJob)
