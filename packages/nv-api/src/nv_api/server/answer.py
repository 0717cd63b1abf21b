"""Answer: runs a job and sends its result.

Owns the order of a request's life: admitted, tokenized, accepted by the engine, sent. Whatever ends
it early, its sequences are aborted and its place in the queue is free.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from nv_engine import SamplingParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nv_api.outputs import CompletionOutput
from nv_api.prompts import TokenPrompt
from nv_api.server.errors import ApiError
from nv_api.server.generation import Accepted, Generation, submit
from nv_api.server.guard import Guard
from nv_api.server.jobs.job import Job
from nv_api.server.sampling import fitted
from nv_api.server.service import LOGGER, Service, service_of
from nv_api.server.sse import EventStream


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
        max_model_len = service.llm.facts.max_model_len
        params = [
            fitted(job.params_of(prompt), len(prompt.token_ids), max_model_len)
            for prompt in prompts
        ]
        try:
            streams = await submit(service.llm, prompts, params)
        except ApiError as error:
            raise await job.explained(error) from error
        accepted = [
            Accepted(stream, own, service.parsers.thought_tokens(prompt, own.n))
            for stream, own, prompt in zip(streams, params, prompts, strict=True)
        ]
        with (
            Generation(service.llm, accepted, service.metrics, self._arrived_at) as generation,
            self._traced(params, generation),
        ):
            if job.is_streamed:
                await self._stream(guard, generation, EventStream(send, self._more_headers))
            else:
                await self._send_whole(generation, send)
            self._log(prompts, params, generation)

    def _traced(
        self, params: Sequence[SamplingParams], generation: Generation
    ) -> AbstractContextManager[None]:
        """Around the request's time in the engine: its span, if the options ask for one."""
        if self._service.tracing is None:
            return nullcontext()
        seconds = asyncio.get_running_loop().time() - self._arrived_at
        return self._service.tracing.request(self._scope, params, generation, seconds)

    async def _stream(self, guard: Guard, generation: Generation, stream: EventStream) -> None:
        """Send events as they come; an error from here on is an event too."""
        events = self._job.events(generation)

        async def take(number: int, deltas: Sequence[CompletionOutput]) -> None:
            new = b"".join([events.push(number, delta) for delta in deltas])
            if new:
                await stream.write(new)

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

        async def take(number: int, deltas: Sequence[CompletionOutput]) -> None:
            for delta in deltas:
                whole.push(number, delta)

        await generation.run(take)
        body = whole.body(generation.usage())
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
        params: Sequence[SamplingParams],
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
