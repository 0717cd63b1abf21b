"""POST /v1/messages, /v1/messages/count_tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import generated
from nv_api.server.body import read_body
from nv_api.server.jobs.messages import MessagesJob, count_tokens
from nv_api.server.protocol.messages import (
    AnthropicErrorEnvelope,
    CountTokensRequest,
    MessageEvent,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from nv_api.server.routes.described import body_of, data_of, errors, stream_of
from nv_api.server.service import service_of

router = APIRouter()


@router.post(
    "/v1/messages",
    responses={
        **stream_of("The answer.", MessageObject, data_of(MessageEvent)),
        **errors(envelope=AnthropicErrorEnvelope),
    },
    openapi_extra=body_of(MessagesRequest),
)
async def create_message(request: Request) -> Response:
    """Continue a conversation."""
    return await generated(request, MessagesRequest, MessagesJob)


@router.post(
    "/v1/messages/count_tokens",
    responses=errors(envelope=AnthropicErrorEnvelope),
    openapi_extra=body_of(CountTokensRequest),
)
async def count_message_tokens(request: Request) -> TokenCount:
    """Count the tokens of a conversation, as /v1/messages would render it."""
    service = service_of(request)
    service.lifecycle.check_open()
    asked = await read_body(request, CountTokensRequest, service.options.max_body_bytes)
    return TokenCount(input_tokens=await count_tokens(asked, service, request.state.request_id))
