"""Answer: runs a job and sends its result; the way of every route that needs the engine.

Owns the order of a request's life: admitted, tokenized, accepted by the engine, sent. Whatever ends
it early, its sequences are aborted and its place in the queue is free.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from nv_engine import PoolingParams, SamplingParams
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nv_api.outputs import CompletionOutput
from nv_api.prompts import TokenPrompt
from nv_api.server.answers.form import Events
from nv_api.server.body import made_of_body
from nv_api.server.errors import ApiError
from nv_api.server.generation import Accepted, Generation, submit
from nv_api.server.guard import Guard
from nv_api.server.jobs.job import Job
from nv_api.server.service import LOGGER, Service, service_of
from nv_api.server.sse import EventStream
from nv_api.server.turns import turn

Body = TypeVar("Body", bound=BaseModel)
MakeJob = Callable[[Body, Service, str], Job]
"""Makes a job of a body, the service and the request's id."""


async def generated(request: Request, model: type[Body], make_job: MakeJob[Body]) -> "Answer":
    """The response of a route that generates text.

    Args:
        request: of HTTP.
        model: of its body.
        make_job: of the body.

    Raises:
        ApiError: no request can run, the model pools, or the body is wrong.
    """
    service = service_of(request)
    service.lifecycle.check_open()
    service.check_generates()
    return await _answer(request, model, make_job)


async def pooled(request: Request, model: type[Body], make_job: MakeJob[Body]) -> "Answer":
    """The response of a route that pools; as `generated`, for the other kind of models."""
    service = service_of(request)
    service.lifecycle.check_open()
    service.check_pools()
    return await _answer(request, model, make_job)


async def _answer(request: Request, model: type[Body], make_job: MakeJob[Body]) -> "Answer":
    service = service_of(request)
    request_id: str = request.state.request_id
    most = service.options.max_body_bytes

    def make(asked: Body) -> Job:
        return make_job(asked, service, request_id)

    return Answer(request, await made_of_body(request, model, most, make))


class Answer(Response):
    """A job's response; the job begins when the response is sent.

    Args:
        request: of HTTP.
        job: what to do.
    """

    def __init__(self, request: Request, job: Job) -> None:
        self.background = None
        self._service: Service = service_of(request)
        self._job = job
        self._scope = request.scope
        self._request_id: str = request.state.request_id
        self._arrived_at = asyncio.get_running_loop().time()
        ignored = ", ".join(job.ignored).encode()
        self._more_headers = [(b"x-ignored-fields", ignored)] if ignored else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job.

        Raises:
            ApiError: before anything was sent.
        """
        service, job = self._service, self._job
        with (
            service.admission.admit(job.num_sequences),
            Guard(service.options, service.lifecycle, scope) as guard,
        ):
            try:
                await self._run(guard, guard.watched(send))
            except asyncio.CancelledError:
                reason = guard.take_back()
                if guard.is_deaf:
                    await guard.hang_up()
                    return
                raise reason from None

    async def _run(self, guard: Guard, send: Send) -> None:
        service, job = self._service, self._job
        prompts = await job.prompts()
        params: list[SamplingParams | PoolingParams] = []
        for number, prompt in enumerate(prompts):
            await turn(number)
            params.append(job.params_of(prompt))
        try:
            streams = await submit(service.llm, prompts, params)
        except ApiError as error:
            raise await job.explained(error) from error
        accepted = [
            Accepted(stream, own, service.parsers.thought_tokens(stream.request))
            for stream, own in zip(streams, params, strict=True)
        ]
        with (
            Generation(service.llm, accepted, service.metrics, self._arrived_at) as generation,
            self._traced(params, generation),
        ):
            events = job.events(generation)
            if events is None:
                await self._send_whole(generation, send)
            else:
                await self._stream(guard, generation, events, send)
            self._log(prompts, params, generation)

    def _traced(
        self, params: Sequence[SamplingParams | PoolingParams], generation: Generation
    ) -> AbstractContextManager[None]:
        """Around the request's time in the engine: its span, if the options ask for one."""
        if self._service.tracing is None:
            return nullcontext()
        seconds = asyncio.get_running_loop().time() - self._arrived_at
        operation = self._job.operation
        return self._service.tracing.request(self._scope, operation, params, generation, seconds)

    async def _stream(
        self, guard: Guard, generation: Generation, events: Events, send: Send
    ) -> None:
        """Send events as they come; an error from here on is an event too."""
        stream = EventStream(send, self._more_headers, guard.writer)
        push, write = events.push, stream.write

        def take(number: int, deltas: Sequence[CompletionOutput]) -> Awaitable[None] | None:
            if len(deltas) == 1:  # nearly always
                new = push(number, deltas[0])
            else:
                new = b"".join([push(number, delta) for delta in deltas])
            return write(new) if new else None

        await stream.begin()
        seconds = self._service.options.ping_interval
        ping = None if seconds is None else asyncio.create_task(stream.ping(seconds))
        try:
            await generation.run(take)
        except ApiError as error:
            await stream.end(events.fail(error) + events.closing)
        except asyncio.CancelledError:
            reason = guard.take_back()
            if guard.is_deaf:
                await guard.hang_up()
            else:
                await stream.end(events.fail(reason) + events.closing)
        else:
            await stream.end(events.end(generation.usage()) + events.closing)
        finally:
            if ping is not None:
                ping.cancel()

    async def _send_whole(self, generation: Generation, send: Send) -> None:
        """Collect everything, then send it."""
        whole = self._job.whole(generation)

        def take(number: int, deltas: Sequence[CompletionOutput]) -> None:
            for delta in deltas:
                whole.push(number, delta)

        await generation.run(take)
        body = await whole.body(generation.usage())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._more_headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _log(
        self,
        prompts: Sequence[TokenPrompt],
        params: Sequence[SamplingParams | PoolingParams],
        generation: Generation,
    ) -> None:
        """One line for a request, if the options ask for it."""
        if self._service.options.log_requests == "none":
            return
        usage = generation.usage()
        LOGGER.info(
            "%s: %d prompts, %d prompt tokens, %d completion tokens",
            self._request_id,
            len(prompts),
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        if self._service.options.log_requests == "text":
            for prompt, own, request in zip(prompts, params, generation.requests, strict=True):
                texts = [completion.text for completion in request.completions]
                LOGGER.info("%s: %r %r -> %r", self._request_id, own, prompt.text, texts)
