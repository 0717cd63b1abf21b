"""The app: routes, middleware and errors around one model.

Owns their order. Never opens a socket and never starts or closes the model: its caller does.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from nv_api.server.envelopes import error_response
from nv_api.server.errors import INVALID, SERVER, ApiError, invalid
from nv_api.server.llm import ServedLLM
from nv_api.server.middleware.counting import Counting
from nv_api.server.middleware.departures import Departures
from nv_api.server.middleware.keys import Keys
from nv_api.server.middleware.request_ids import RequestIds, id_headers
from nv_api.server.options import ServeOptions
from nv_api.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from nv_api.server.protocol.chat import ChatChunk, ChatRequest
from nv_api.server.protocol.classify import ClassifyRequest
from nv_api.server.protocol.completions import CompletionChunk, CompletionRequest
from nv_api.server.protocol.embeddings import EmbeddingsRequest
from nv_api.server.protocol.messages import CountTokensRequest, MessageEvent, MessagesRequest
from nv_api.server.protocol.pooling import PoolingRequest
from nv_api.server.protocol.rerank import RerankRequest
from nv_api.server.protocol.responses import ResponseEvent, ResponsesRequest
from nv_api.server.protocol.score import ScoreRequest
from nv_api.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from nv_api.server.routes import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    messages,
    models,
    page,
    pooling,
    rerank,
    responses,
    score,
    status,
    tokenize,
)
from nv_api.server.service import LOGGER, Service

BODIES: Sequence[type[BaseModel]] = (
    ChatRequest,
    ChatChunk,
    CompletionRequest,
    CompletionChunk,
    ResponsesRequest,
    ResponseEvent,
    MessagesRequest,
    MessageEvent,
    CountTokensRequest,
    EmbeddingsRequest,
    ClassifyRequest,
    PoolingRequest,
    ScoreRequest,
    RerankRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
"""Models that /openapi.json has beside those of responses."""
PARTS = (
    *(chat, completions, responses, messages),
    *(embeddings, score, rerank, classify, pooling),
    *(models, adapters, tokenize, status, page),
)
"""Of the app; each has the routes of one noun."""
CLIENT_LEFT = 499
"""The status of a response to a client that has left; nginx's."""
EXPOSED = ("x-request-id", "x-ignored-fields", "retry-after")


def make_app(llm: ServedLLM, options: ServeOptions) -> FastAPI:
    """An ASGI app that serves a model.

    It may be mounted in another server. The model may still be loading: routes that need it answer
    503 until it is there.

    Args:
        llm: the model.
        options: names, keys and limits.
    """
    service = Service.of(llm, options)
    app = FastAPI(
        title="nv",
        openapi_url=None,  # `describe` makes it beside the event loop
        docs_url=None,  # these pages fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to the host that the client names
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
        middleware=_middleware(service),
        exception_handlers={
            ApiError: _show,
            HTTPException: _show_http,
            RequestValidationError: _show_wrong_path,
            ClientDisconnect: _show_nothing,
            Exception: _show_failure,
        },
        lifespan=_lifespan,
    )
    app.state.service = service
    for part in PARTS:
        app.include_router(part.router)
    app.add_api_route("/openapi.json", _describe, include_in_schema=False)
    return app


def _middleware(service: Service) -> list[Middleware]:
    """From the outside to the inside."""
    options = service.options
    layers = [
        Middleware(RequestIds),
        Middleware(Counting, responses=service.metrics.responses),
    ]
    if options.allowed_origins:  # before the keys: a browser asks without one first
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        )
    if options.api_key:
        layers.append(Middleware(Keys, keys=options.api_key))
    return [*layers, Middleware(Departures)]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model, whatever server the app runs in, and watch it; the port is open meanwhile."""
    service: Service = app.state.service
    tasks = [asyncio.create_task(service.load()), asyncio.create_task(service.beat())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)


async def _describe(request: Request) -> Response:
    """/openapi.json, which takes half a second to make: in a thread, and once."""
    schema = await asyncio.to_thread(_schema, request.app)
    return Response(orjson.dumps(schema), media_type="application/json")


def _schema(app: FastAPI) -> dict[str, Any]:
    """What /openapi.json shows."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, defined = models_json_schema(
            [(model, "validation") for model in BODIES],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(defined["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema


async def _show(request: Request, error: Exception) -> Response:
    """An error of ours."""
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _show_http(request: Request, error: Exception) -> Response:
    """An error of the router's: there is no such route, or not for this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message = f"there is no route {request.url.path}: /openapi.json lists them"
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}: /openapi.json has its method"
    headers = dict(error.headers or {})
    shown = ApiError(error.status_code, INVALID, message, headers=headers)
    return error_response(shown, request.scope)


async def _show_wrong_path(request: Request, error: Exception) -> Response:
    """A parameter of a path that FastAPI refuses."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    shown = invalid(str(first["msg"]), ".".join(map(str, first["loc"])))
    return error_response(shown, request.scope)


async def _show_nothing(request: Request, error: Exception) -> Response:
    """The client has left while it sent the body."""
    return Response(status_code=CLIENT_LEFT)


async def _show_failure(request: Request, error: Exception) -> Response:
    """A fault of ours: the log has the traceback, the client the id to look for."""
    request_id, names = request.state.request_id, id_headers(request.scope)
    LOGGER.error("%s: %s", request_id, type(error).__name__)
    shown = ApiError(
        500,
        SERVER,
        f"the server failed on request {request_id}: its log has the reason",
        code="internal_error",
        headers={"connection": "close"} | {name.decode(): request_id for name in names},
    )
    return error_response(shown, request.scope)
