"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import Answer
from nv_api.server.body import read_body
from nv_api.server.jobs.chat import ChatJob
from nv_api.server.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from nv_api.server.protocol.errors import ErrorEnvelope
from nv_api.server.routes.described import DONE_DATA, body_of, data_of, errors, stream_of
from nv_api.server.service import service_of

router = APIRouter()


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
    service = service_of(request)
    service.lifecycle.check_open()
    asked = await read_body(request, ChatRequest, service.options.max_body_bytes)
    return Answer(request, ChatJob(asked, service, request.state.request_id))
