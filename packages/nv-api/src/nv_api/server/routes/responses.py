"""POST /v1/responses."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import generated
from nv_api.server.jobs.responses import ResponsesJob
from nv_api.server.protocol.responses import (
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from nv_api.server.routes.described import body_of, data_of, errors, stream_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)


@router.post(
    "/v1/responses",
    responses={**stream_of("The answer.", ResponseObject, data_of(ResponseEvent)), **errors()},
    openapi_extra=body_of(ResponsesRequest),
)
async def create_response(request: Request) -> Response:
    """Continue a conversation; nothing is stored."""
    return await generated(request, ResponsesRequest, ResponsesJob)
