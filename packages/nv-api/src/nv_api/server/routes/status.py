"""GET /health, /ready, /version, /load, /metrics."""

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from nv_api.server.errors import ApiError
from nv_api.server.routes.described import OF_READS, errors
from nv_api.server.service import service_of

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=errors(503), response_class=Response)
async def health(request: Request) -> Response:
    """200: the engine works. A server that drains is healthy."""
    lifecycle = service_of(request).lifecycle
    return _verdict(lifecycle.problem() or lifecycle.stall_problem())


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=errors(503), response_class=Response)
async def ready(request: Request) -> Response:
    """200: send requests here."""
    lifecycle = service_of(request).lifecycle
    return _verdict(lifecycle.problem() or lifecycle.drain_problem() or lifecycle.stall_problem())


@router.get("/version", responses=errors(*OF_READS))
async def show_version() -> dict[str, str]:
    """Of this package."""
    return {"version": version("nv-api")}


@router.get("/load", responses=errors(*OF_READS))
async def load(request: Request) -> dict[str, Any]:
    """Requests in flight; vLLM's."""
    service = service_of(request)
    return {"server_load": len(service.lifecycle.guards)}


@router.get("/metrics", responses=errors(*OF_READS), response_class=Response)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _verdict(problem: ApiError | None) -> Response:
    if problem is not None:
        raise problem
    return Response(status_code=200)
