"""POST /v1/responses."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import Answer
from nv_api.server.body import read_body
from nv_api.server.jobs.responses import ResponsesJob
from nv_api.server.protocol.responses import (
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from nv_api.server.routes.described import body_of, data_of, errors, stream_of
from nv_api.server.service import service_of

router = APIRouter()


@router.post(
    "/v1/responses",
    responses={**stream_of("The answer.", ResponseObject, data_of(ResponseEvent)), **errors()},
    openapi_extra=body_of(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """Continue a conversation; nothing is stored."""
    service = service_of(request)
    service.lifecycle.check_open()
    asked = await read_body(request, ResponsesRequest, service.options.max_body_bytes)
    return Answer(request, ResponsesJob(asked, service, request.state.request_id))
