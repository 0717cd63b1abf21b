"""Service: what the routes of one server share.

Owns nothing itself: the model, the options, and the parts that count and refuse.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from nv_engine import SamplingParams
from nv_engine.values import shown
from nv_models import PoolerConfig
from nv_models.listing import first_few
from starlette.requests import Request

from nv_api.sentences import USER_ERRORS
from nv_api.server.abilities import Abilities
from nv_api.server.adapters import ServedAdapters, ServedModel
from nv_api.server.admission import AdmissionControl
from nv_api.server.errors import INVALID, ApiError, unsupported
from nv_api.server.lifecycle import Lifecycle
from nv_api.server.llm import ServedLLM
from nv_api.server.metrics import Metrics
from nv_api.server.options import ServeOptions
from nv_api.server.parsers import Parsers
from nv_api.server.tracing import Tracing

LOGGER = logging.getLogger("nv.server")
PULSE_SECONDS = 0.25
MOST_NAMES = 32
"""In the error of a name that is not known."""
LOADING_ERRORS = (*USER_ERRORS, TypeError)
"""Errors of a model that cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One server's parts."""

    llm: ServedLLM
    options: ServeOptions
    lifecycle: Lifecycle
    admission: AdmissionControl
    metrics: Metrics
    adapters: ServedAdapters
    tracing: Tracing | None
    """None: requests have no spans."""
    started_at: int

    @classmethod
    def of(cls, llm: ServedLLM, options: ServeOptions) -> "Service":
        """The parts for a model."""
        endpoint = options.otlp_endpoint
        return cls(
            llm=llm,
            options=options,
            lifecycle=Lifecycle(llm, options.stall_seconds),
            admission=AdmissionControl(options.max_queue, lambda: llm.num_slots),
            metrics=Metrics(llm, options.names[0]),
            adapters=ServedAdapters(options.lora_modules, options.names),
            tracing=None if endpoint is None else Tracing(endpoint, options.names[0]),
            started_at=int(time.time()),
        )

    @property
    def default_params(self) -> SamplingParams:
        """The values of fields that a request leaves out; a copy."""
        is_ours = self.options.generation_config == "nv"
        params = SamplingParams() if is_ours else self.llm.get_default_sampling_params()
        override = self.options.override_generation_config
        return replace(params, **override) if override else params

    @cached_property
    def parsers(self) -> Parsers:
        """Of the model, once it is loaded."""
        return Parsers.of(self.llm.text, self.options)

    @property
    def abilities(self) -> Abilities:
        """Of the model, once it is loaded."""
        pooler = self.llm.pooler
        return Abilities(() if pooler is None else pooler.tasks)

    @property
    def pooler(self) -> PoolerConfig:
        """Of a model that pools."""
        pooler = self.llm.pooler
        assert pooler is not None, "checked by `check_pools`"
        return pooler

    def check_generates(self) -> None:
        """Raise a 400 if the model pools."""
        if (problem := self.abilities.no_text) is not None:
            raise unsupported(problem)

    def check_pools(self) -> None:
        """Raise a 400 if the model generates text."""
        if (problem := self.abilities.no_pooling) is not None:
            raise unsupported(problem)

    def check_task(self, *wanted: str) -> None:
        """Raise a 400 if the model has none of these tasks."""
        if (problem := self.abilities.lacks(*wanted)) is not None:
            raise unsupported(problem)

    def check_adapters_change(self) -> None:
        """Raise a 400 if this server's adapters are those of its start."""
        if not self.options.allow_runtime_lora_updating:
            raise unsupported(
                "this server's adapters are those of its start: restart it with other "
                "--lora-modules, or with --allow-runtime-lora-updating"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may have: the model's, then those of adapters."""
        return (*self.options.names, *self.adapters.names)

    def model_of(self, asked: str | None) -> ServedModel:
        """The model or adapter that was asked for; without a name the model.

        Raises:
            ApiError: 404, this server has no such name.
        """
        names = self.options.names
        if asked is None or asked in names:
            return ServedModel(asked or names[0])
        if (lora := self.adapters.find(asked)) is not None:
            return ServedModel(asked, lora)
        known = first_few([*map(repr, self.names)], MOST_NAMES)
        raise ApiError(
            404,
            INVALID,
            f"model is {shown(asked)}, which this server does not have: give one of "
            f"{', '.join(known)}",
            param="model",
            code="model_not_found",
        )

    async def ready(self) -> None:
        """Wait until the model is loaded and its adapters are checked; raises as `llm.ready`.

        Raises:
            ValueError: an adapter does not fit the model.
        """
        await self.llm.ready()
        await self.adapters.check(self.llm)

    async def load(self) -> None:
        """Load the model; if that fails or is broken off, routes answer 503 with the reason."""
        with suppress(*LOADING_ERRORS, RuntimeError):  # lost or closed: `llm.loss` has the reason
            await self.ready()

    async def beat(self) -> None:
        """Until it is cancelled: measure how late the event loop is, and watch the engine."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PULSE_SECONDS
            await asyncio.sleep(PULSE_SECONDS)
            self.metrics.loop_lag = max(0.0, loop.time() - due)
            self.lifecycle.note_progress()


def service_of(request: Request) -> Service:
    """The service of the app that a request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
