"""GET /, /page/defaults."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from nv_api.server.page.document import Document
from nv_api.server.protocol.page import ChatDefaults, PageDefaults
from nv_api.server.routes.described import OF_READS, errors
from nv_api.server.service import service_of

router = APIRouter()
PAGE = Document.page()
BODY, HEADERS = PAGE.html.encode(), PAGE.headers
"""Made once: the policy has the file's hashes."""


@router.head("/", include_in_schema=False)
@router.get("/", response_class=HTMLResponse)
async def show_page() -> HTMLResponse:
    """Chat in a browser. The page needs no key; the routes that it calls do."""
    return HTMLResponse(BODY, headers=HEADERS)


@router.get("/page/defaults", responses=errors(*OF_READS))
async def show_defaults(request: Request) -> PageDefaults:
    """The model's names, bounds and tasks, and the values of fields that a chat leaves out."""
    service = service_of(request)
    if (problem := service.lifecycle.problem()) is not None:
        raise problem
    params = service.default_params
    stop = params.stop or []
    return PageDefaults(
        models=[*service.names],
        max_model_len=service.llm.facts.max_model_len,
        max_logprobs=service.options.max_logprobs,
        tasks=[*service.abilities.tasks],
        routes=[*service.abilities.routes],
        defaults=ChatDefaults(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=params.seed,
            stop=[stop] if isinstance(stop, str) else stop,
        ),
    )
