"""POST /v1/score, /score."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.answer import pooled
from nv_api.server.jobs.score import ScoreJob
from nv_api.server.protocol.score import ScoreRequest, ScoreResponse
from nv_api.server.routes.described import body_of, errors, json_of
from nv_api.server.routes.direct import DirectRoute

router = APIRouter(route_class=DirectRoute)
RESPONSES = {**json_of("The scores.", ScoreResponse), **errors()}
BODY = body_of(ScoreRequest)


@router.post("/v1/score", responses=RESPONSES, openapi_extra=BODY)
@router.post("/score", responses=RESPONSES, openapi_extra=BODY)
async def score_pairs(request: Request) -> Response:
    """Score pairs of texts."""
    return await pooled(request, ScoreRequest, ScoreJob)
