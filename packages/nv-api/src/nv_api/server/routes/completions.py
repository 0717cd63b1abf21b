"""POST /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import generated
from nv_api.server.jobs.completion import CompletionJob
from nv_api.server.protocol.completions import (
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
)
from nv_api.server.protocol.errors import ErrorEnvelope
from nv_api.server.routes.described import DONE_DATA, body_of, data_of, errors, stream_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/completions",
    responses={
        **stream_of(
            "The completions.",
            CompletionResponse,
            data_of(CompletionChunk, ErrorEnvelope),
            DONE_DATA,
        ),
        **errors(),
    },
    openapi_extra=body_of(CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Continue texts."""
    return await generated(request, CompletionRequest, CompletionJob)
