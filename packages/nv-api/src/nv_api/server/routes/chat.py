"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import generated
from nv_api.server.jobs.chat import ChatJob
from nv_api.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from nv_api.server.protocol.errors import ErrorEnvelope
from nv_api.server.routes.described import DONE_DATA, body_of, data_of, errors, stream_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/chat/completions",
    responses={
        **stream_of("The answer.", ChatResponse, data_of(ChatChunk, ErrorEnvelope), DONE_DATA),
        **errors(),
    },
    openapi_extra=body_of(ChatRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation."""
    return await generated(request, ChatRequest, ChatJob)
