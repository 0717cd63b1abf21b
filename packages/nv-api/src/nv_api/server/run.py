"""Run: a server on a socket, from its start to the exit code.

Owns signals and the end: drain, abort, exit. Never handles a request.
"""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from nv_engine import SamplingParams
from nv_engine.log import VARIABLE, follow_environment

import nv_api
from nv_api.server.app import make_app
from nv_api.server.arrivals import Arrivals
from nv_api.server.connection import Connection
from nv_api.server.listening import Listening
from nv_api.server.llm import ServedLLM
from nv_api.server.lora_modules import with_room
from nv_api.server.options import ServeOptions
from nv_api.server.service import LOADING_ERRORS, LOGGER, Service
from nv_api.server.vllm_flags import engine_options

if TYPE_CHECKING:
    from types import FrameType

LINGER_SECONDS = 1.0
"""From the loss of the engine to the exit: streams get their error events."""
POLL_SECONDS = 0.1
FULL_COLLECTION = 1000
"""Collections of younger objects before one of all: in minutes, not in seconds. It holds the loop
up for a fifth of a second beside a thousand streams, and requests leave nothing to it. Those of
younger objects stay frequent: one for 20 times as many takes 50 to 150 ms in place of 10 to 25."""
NUM_LISTENERS = 8
"""Of each socket: uvloop accepts one connection per listener in a turn of its loop, and a turn with
a thousand events takes tens of milliseconds."""


class Server(uvicorn.Server):
    """uvicorn's server, with an end of ours.

    The first signal drains: the port stays open and answers 503, running requests end. A second
    ends at once.

    Args:
        app: of `make_app`.
        listening: where.
    """

    def __init__(self, app: FastAPI, listening: Listening) -> None:
        super().__init__(_config(app, listening))
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._is_forced = False
        self._tasks: list[asyncio.Task[None]] = []
        self.exit_code = 0

    def handle_exit(self, sig: int, frame: "FrameType | None") -> None:
        """Drain, or if that was begun already, end."""
        if self._service.lifecycle.is_draining:
            self._is_forced = self.should_exit = True
        self._service.lifecycle.is_draining = True

    async def shutdown(self, sockets: Any = None) -> None:  # noqa: ANN401
        """Close the port and the connections; if a signal forced it, in the middle of answers."""
        for task in self._tasks:
            task.cancel()
        if self._is_forced:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)

    async def startup(self, sockets: Any = None) -> None:  # noqa: ANN401
        """Listen, and load meanwhile."""
        await super().startup(sockets)
        await self._listen_more()
        LOGGER.info("listening on %s; the model is loading", self._place)
        self._tasks = [
            asyncio.create_task(self._wait_for_the_model()),
            asyncio.create_task(self._watch()),
        ]

    async def _listen_more(self) -> None:
        """Add listeners to each socket."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class
        make: Any = partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for sock in [sock for server in self.servers for sock in server.sockets]:
            is_path = sock.family == socket.AF_UNIX
            create: Any = loop.create_unix_server if is_path else loop.create_server
            for _ in range(NUM_LISTENERS - 1):
                twin = socket.fromfd(sock.fileno(), sock.family, sock.type)
                self.servers.append(
                    await create(make, sock=twin, ssl=config.ssl, backlog=config.backlog)
                )

    @property
    def _place(self) -> str:
        """Where clients find the server."""
        config = self.config
        if config.uds is not None:
            return f"the socket {config.uds}"
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"{'https' if config.ssl else 'http'}://{host}:{port}"

    async def _wait_for_the_model(self) -> None:
        """Until it is loaded; if that fails, end with the reason."""
        try:
            await self._service.ready()
        except LOADING_ERRORS as error:
            self._fail(str(error))
            return
        except RuntimeError:  # the model is lost, which `_watch` sees, or closed after a signal
            return
        gc.collect()
        gc.freeze()  # the collector need not walk over what was loaded
        LOGGER.info("ready: %s serves %s", self._place, ", ".join(self._service.names))
        if (routes := self._service.abilities.routes) != ():
            LOGGER.info("the model pools: %s", ", ".join(routes))
            return
        LOGGER.info("parsers: %s", self._service.parsers)
        LOGGER.info("fields that a request leaves out: %s", _shown(self._service.default_params))

    async def _watch(self) -> None:
        """Until a signal or the loss of the engine; then end."""
        service = self._service
        while not service.lifecycle.is_draining:
            if service.llm.loss is not None:
                await asyncio.sleep(LINGER_SECONDS)
                self._fail(service.llm.loss)
                return
            await asyncio.sleep(POLL_SECONDS)
        await service.lifecycle.drain(service.options.drain_seconds)
        self.should_exit = True

    def _fail(self, reason: str) -> None:
        print(f"nv: {' '.join(reason.split())}", file=sys.stderr)
        self.exit_code = 1
        self.should_exit = True


def run(
    model: str, llm_options: Mapping[str, Any], options: ServeOptions, listening: Listening
) -> int:
    """Load a model and serve it until a signal; returns the exit code.

    The log goes to stderr from level INFO on, unless NV_LOG names another level.
    """
    listening.check_free()
    os.environ.setdefault(VARIABLE, "info")
    follow_environment()

    engine = with_room(engine_options(llm_options), options)
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION)

    async def whole() -> int:
        llm = nv_api.AsyncLLM(model, **engine)
        try:
            return await serve(llm, options, listening)
        finally:
            await llm.close()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(whole())


async def serve(llm: ServedLLM, options: ServeOptions, listening: Listening) -> int:
    """Serve until a signal; returns the exit code. The caller closes the model."""
    server = Server(make_app(llm, options), listening)
    await server.serve()
    return server.exit_code


def _shown(params: SamplingParams) -> str:
    """The parameters that are not the usual defaults."""
    changed = params.changed(field.name for field in fields(params))
    return ", ".join(f"{name}={getattr(params, name)!r}" for name in changed) or "the defaults"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    new: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return new


def _config(app: FastAPI, listening: Listening) -> uvicorn.Config:
    """Uvicorn's options."""
    return uvicorn.Config(
        app,
        http=partial(Connection, listening, Arrivals()),  # type: ignore[arg-type]  # makes one, too
        host=listening.host,
        port=listening.port,
        uds=listening.uds,
        root_path=listening.root_path,
        ssl_keyfile=listening.ssl_keyfile,
        ssl_certfile=listening.ssl_certfile,
        ssl_keyfile_password=listening.ssl_keyfile_password,
        ssl_ca_certs=listening.ssl_ca_certs,
        timeout_keep_alive=int(listening.keep_alive),
        timeout_graceful_shutdown=2,
        access_log=False,
        server_header=False,
        log_level="warning",
        ws="none",
    )
