"""POST /v1/rerank, /v1/score: routes of models that pool, which are not built."""

from fastapi import APIRouter
from starlette.responses import Response

from nv_api.server.errors import unsupported
from nv_api.server.routes.described import errors

router = APIRouter()


@router.post("/v1/rerank", responses=errors(400, 401), response_class=Response)
@router.post("/v1/score", responses=errors(400, 401), response_class=Response)
async def pool() -> Response:
    """Refuse: this server generates text only."""
    raise unsupported(
        "routes of models that pool are not built: call embed, classify or score of nv_api.LLM; "
        "this server has /v1/chat/completions and /v1/completions"
    )
