"""AsyncLLM: prompts in, texts out, for many tasks of one event loop.

Owns the front end: the requests in flight, the tasks that wait for them, and the engine's process.
Never steps the engine (the host does).
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from nv_engine import EngineMetrics, LoRARequest, ModelFacts, PoolingParams, SamplingParams
from nv_engine.log import LOGGER
from nv_engine.validation import plain_lora, plain_lora_id
from nv_engine.values import one_id, shown

from nv_api import options as keywords
from nv_api.adapters import with_adapters
from nv_api.arguments import POOLING_NAMES, VLLM_NAMES, params_list, plain_name
from nv_api.chat_check import check_given
from nv_api.conversation import (
    Message,
    Rendering,
    chat_prompt,
    check_read,
    conversation_list,
)
from nv_api.host.client import HostClient
from nv_api.host.frames import (
    REFUSALS,
    Accepted,
    AddAdapter,
    Answer,
    Failed,
    FromHost,
    ListAdapters,
    Log,
    Lost,
    Ready,
    Refused,
    RemoveAdapter,
    Reset,
    Start,
    Stats,
    Step,
    Stop,
    ToHost,
)
from nv_api.host.process import HostProcess
from nv_api.members import OF_ASYNC_LLM, missing
from nv_api.one_process import OneProcess
from nv_api.outputs import RequestOutput
from nv_api.pooled_request import PooledRequest
from nv_api.pooling import existing_pooler, fields, refuse_pooler, with_task
from nv_api.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nv_api.pooling_prompts import bound_of, truncated, with_prompt
from nv_api.processor import Processor
from nv_api.prompts import PromptLike, TokenPrompt, single_prompt, tokenize
from nv_api.request_stream import EngineDead, RequestStream
from nv_api.row_tokens import RowTokens
from nv_api.start import Prepared, prepare
from nv_api.tokenizer import Tokenizer, existing
from nv_api.wake_queue import WakeQueue

if TYPE_CHECKING:
    from nv_models import PoolerConfig
    from transformers import PreTrainedTokenizerBase

    from nv_api.completion import Completion
    from nv_api.request import Request

NUM_TEXT_THREADS = 2
"""Templates and long texts are made into ids beside the event loop; the tokenizer releases the
interpreter meanwhile."""
CLOSE_SECONDS = 5.0
CLOSED = "this AsyncLLM is closed: make a new one"
OTHER_LOOP = (
    "this AsyncLLM belongs to another event loop, that of its first await: use it and close it "
    "within one asyncio.run, or make a new one in each"
)
NOT_READY = "the model is not loaded yet: await ready() first"
DEAD = "the engine's process ended ({}): its log has the reason; start it anew"
ERRORS = {kind.__name__: kind for kind in REFUSALS}

T = TypeVar("T")


class AsyncLLM(OneProcess):
    """A model in a process of its own, for asyncio; names follow vLLM's `AsyncLLM`.

    `LLM` for one event loop, that of the first `await`: any number of its tasks may call it at
    once. Another loop may only close it, after the first is closed. The model loads after the first
    `await`; `ready` waits for it, and every request does.

    Args:
        model: as of `LLM`.
        **options: as of `LLM`.

    Raises:
        ValueError, TypeError, NotImplementedError: an option is wrong; as `LLM`. What only the
            model's files show is raised by `ready`.
    """

    @VLLM_NAMES.arguments_of
    def __init__(self, model: str, **options: Any) -> None:  # noqa: ANN401
        self._options = dict(options)
        self._given = keywords.parse(model, options)
        self._process = HostProcess()  # imports torch while the files are read
        self.loss: str | None = None
        """Why nothing runs any more; None while it does."""
        self.stats = EngineMetrics()
        """The newest counters of the engine."""
        self.on_step: Callable[[Step], None] = lambda _: None
        """Called with each step, once its tokens are in their requests."""
        self.last_sign = time.monotonic()
        """When the host last sent something: at work a step, and idle its counters each second."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._prepared: Prepared | None = None
        self._preparing: asyncio.Task[Prepared] | None = None
        self._facts: ModelFacts | None = None
        self._starting: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._client = HostClient(self._receive, self._end)
        self._processor: Processor | None = None
        self._streams: dict[int, RequestStream] = {}
        self._rows = RowTokens(())
        """Of the newest step."""
        self._updated: set[Completion | None] = set()
        """Completions with an update of the step that is not whole yet."""
        self._wakes = WakeQueue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._names: dict[str | int, int] = {}
        self._texts = ThreadPoolExecutor(NUM_TEXT_THREADS, "nv text")

    @VLLM_NAMES.arguments_of
    async def ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ValueError, FileNotFoundError, …: it cannot be loaded; as `LLM`.
            EngineDead: the engine's process ended, or this AsyncLLM is closed.
            RuntimeError: this AsyncLLM belongs to another event loop.
        """
        self._enter()
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        self._check_alive()

    @property
    def is_ready(self) -> bool:
        """Whether requests run: the model is loaded, and nothing is lost."""
        return self._facts is not None and self.loss is None

    @property
    def is_running(self) -> bool:
        """Whether nothing is lost yet, which vLLM calls so; `is_ready` also waits for the model."""
        return self.loss is None

    @property
    def errored(self) -> bool:
        """Whether nothing runs any more (`loss` has the reason), as vLLM's."""
        return self.loss is not None

    @property
    def dead_error(self) -> EngineDead:
        """The error that a request gets once nothing runs any more, as vLLM's."""
        return EngineDead(self.loss or "the engine runs")

    @VLLM_NAMES.arguments_of
    async def check_health(self) -> None:
        """Raise EngineDead if nothing runs any more; as vLLM's, which a probe of a server calls."""
        self._check_alive()

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's numbers; raises RuntimeError before `ready`."""
        if self._facts is None:
            raise RuntimeError(NOT_READY)
        return self._facts

    @property
    def text(self) -> Tokenizer | None:
        """The tokenizer as nv uses it; None if there is none."""
        return self._known().tokenizer

    @property
    def pooler(self) -> "PoolerConfig | None":
        """How prompts are pooled; None: the model generates text."""
        return self._known().pooler

    @property
    def num_slots(self) -> int:
        """Sequences that run at once, if the KV cache has room for them."""
        config = self._known().engine
        return min(config.max_num_seqs, config.max_num_batched_tokens)

    @property
    def num_unfinished(self) -> int:
        """Requests in flight."""
        return len(self._streams)

    @VLLM_NAMES.arguments_of
    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The transformers tokenizer.

        Raises:
            ValueError: there is no tokenizer (`skip_tokenizer_init=True`).
        """
        return existing(self.text).backend

    @VLLM_NAMES.arguments_of
    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what generation_config.json recommends, with our defaults for the rest."""
        return self._known().default_params.clone()

    @VLLM_NAMES.arguments_of
    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt.

        Args:
            prompt: as one of `LLM.generate`.
            sampling_params: None: the checkpoint's recommendation.
            request_id: a str or an int, for `abort` and for the outputs, that no request in flight
                has.
            lora_request: an adapter; the model was loaded with enable_lora=True.

        Yields:
            The request so far, whenever there is more of it; the last one is finished.

        Raises:
            ValueError, TypeError, NotImplementedError: as `LLM.generate`, before the first output.
            EngineDead: the engine's process or its device is lost.
        """
        refuse_pooler((await self._prepare()).pooler)
        (tokenized,) = with_adapters(await self.tokenize([prompt]), lora_request)
        async with aclosing(self._outputs(tokenized, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    @VLLM_NAMES.arguments_of
    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | int | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation; outputs and errors as `generate`.

        Args:
            messages: dicts with "role" and "content", in order.
            sampling_params: as in `generate`.
            request_id: as in `generate`.
            chat_template: as of `LLM.chat`.
            add_generation_prompt: as of `LLM.chat`.
            continue_final_message: as of `LLM.chat`.
            tools: as of `LLM.chat`.
            chat_template_kwargs: as of `LLM.chat`.
            chat_template_content_format: as of `LLM.chat`.
            lora_request: as in `generate`.
        """
        rendering = Rendering(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            chat_template_content_format=chat_template_content_format,
        )
        refuse_pooler((await self._prepare()).pooler)
        check_given(chat_template, self.text)
        prompt = await self.chat_prompt(messages, rendering)
        check_read(self.text, conversation_list([messages]), rendering)
        (prompt,) = with_adapters([prompt], lora_request)
        async with aclosing(self._outputs(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    @POOLING_NAMES.arguments_of
    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | int | None = None,
        pooling_task: str | None = None,
        *,
        prompt_name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Pool one prompt; arguments and errors as `LLM.encode`.

        Args:
            prompt: as one of `LLM.encode`.
            pooling_params: None: the defaults.
            request_id: a name for `abort` and for the output, that no request in flight has.
            pooling_task: None: that of the parameters.
            prompt_name: of a prompt of the model's that goes in front of the text.
            lora_request: as in `generate`.

        Yields:
            The one output, once it is there.
        """
        await self.ready()
        pooler = existing_pooler(self._known().pooler)
        (params,) = with_task(pooling_params, pooling_task, 1, pooler)
        prompts = with_prompt([single_prompt(prompt)], pooler, prompt_name)
        length = bound_of([params], self.facts.max_model_len)
        tokenized = await self._in_thread(lambda: tokenize(prompts, self.text, length))
        (kept,) = truncated(tokenized, [params], self.facts.max_model_len)
        (kept,) = with_adapters([kept], lora_request)
        async with self._stream(kept, params, request_id) as stream:
            async for _ in stream:
                pass
            request = stream.request
        assert isinstance(request, PooledRequest)
        yield PoolingRequestOutput(*fields(request, PoolingOutput, request_id))

    @VLLM_NAMES.arguments_of
    async def abort(self, request_id: str | int) -> None:
        """End a request, whose outputs end; an unknown or finished one is a no-op."""
        self._check_loop()
        if stream := self._streams.get(self._names.get(one_id("request_id", request_id), -1)):
            stream.abort()

    @VLLM_NAMES.arguments_of
    async def submit(
        self, prompt: TokenPrompt, params: SamplingParams | PoolingParams | None = None
    ) -> RequestStream:
        """Queue a request, and wait until the engine has accepted it.

        Args:
            prompt: token ids.
            params: None: the checkpoint's recommendation for sampling. With PoolingParams the
                stream's one delta is empty, and `stream.request` is a PooledRequest.

        Raises:
            ValueError, NotImplementedError, ImportError: the engine refuses it; as `LLM.generate`.
            EngineDead: the engine's process or its device is lost.
        """
        await self.ready()
        if not isinstance(prompt, TokenPrompt):
            raise TypeError(
                f"prompt is {shown(prompt)}: it must be a TokenPrompt, which tokenize makes"
            )
        own = params if isinstance(params, PoolingParams) else self._params_of(params)
        return await self._submit(prompt, own)

    async def _submit(
        self,
        prompt: TokenPrompt,
        params: SamplingParams | PoolingParams,
        name: str | int | None = None,
    ) -> RequestStream:
        """Queue a request under a name, if it has one; nothing is awaited before it has it."""
        self._check_alive()
        assert self._processor is not None
        request: Request
        if isinstance(params, PoolingParams):
            (request,) = self._processor.pool([prompt], [params])
        else:
            (request,) = self._processor.add([prompt], [params])
        number = request.request_id
        stream = self._streams[number] = RequestStream(request, partial(self._drop, number))
        if name is not None:
            self._names[name] = number
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await answer
        except BaseException:
            self._drop(number)
            raise
        finally:
            self._answers.pop(number, None)
        return stream

    @VLLM_NAMES.arguments_of
    async def tokenize(
        self,
        prompts: Sequence[PromptLike],
        *,
        add_special_tokens: bool = True,
        truncates: bool = False,
    ) -> list[TokenPrompt]:
        """Prompts as token ids, made in a thread; raises as `LLM.generate`.

        Args:
            prompts: as of `LLM.generate`.
            add_special_tokens: texts get the tokenizer's first and last special tokens.
            truncates: the caller keeps some of the ids, so no text is too long.
        """
        await self._prepare()
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts is {shown(prompts)}: it must be a list of prompts")
        length = self._length(truncates)

        def ids() -> list[TokenPrompt]:
            named = [single_prompt(prompt) for prompt in prompts]
            return tokenize(named, self.text, length, add_special_tokens=add_special_tokens)

        return await self._in_thread(ids)

    @VLLM_NAMES.arguments_of
    async def chat_prompt(
        self, messages: Sequence[Message], rendering: Rendering, *, truncates: bool = False
    ) -> TokenPrompt:
        """The prompt of a conversation, made in a thread; raises as `LLM.chat`.

        Args:
            messages: as of `chat`.
            rendering: how they become a prompt.
            truncates: as of `tokenize`.
        """
        await self._prepare()
        (conversation,) = conversation_list([messages])
        length = self._length(truncates)
        return await self._in_thread(
            lambda: chat_prompt(self.text, conversation, rendering, length)
        )

    @VLLM_NAMES.arguments_of
    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; returns True."""
        await self.ready()
        self._client.send(Reset())
        return True

    @VLLM_NAMES.arguments_of
    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter's files and begin to read them, before a request needs it.

        Requests run meanwhile. An adapter whose call is cancelled may be added all the same.

        Returns:
            True.

        Raises:
            TypeError: a value that is not a LoRARequest.
            ValueError: the model was loaded without enable_lora=True, the id means another adapter,
                or the files do not fit the model.
            FileNotFoundError: the adapter's files do not exist.
            EngineDead: the engine's process or its device is lost.
        """
        lora = plain_lora(lora_request)
        await self._call(lambda number: AddAdapter(number, lora))
        return True

    @VLLM_NAMES.arguments_of
    async def remove_lora(self, lora_id: int) -> bool:
        """Let an adapter's id mean nothing; requests that run with it go on with it.

        Returns:
            False if it meant nothing.

        Raises:
            ValueError: a value that is not an adapter's id.
            EngineDead: the engine's process or its device is lost.
        """
        adapter_id = plain_lora_id(lora_id)
        return bool(await self._call(lambda number: RemoveAdapter(number, adapter_id)))

    @VLLM_NAMES.arguments_of
    async def list_loras(self) -> set[int]:
        """The ids of the adapters that requests or `add_lora` have named."""
        return set(await self._call(ListAdapters))

    async def _call(self, frame_of: Callable[[int], ToHost]) -> Any:  # noqa: ANN401
        """Send the frame of a call, by the call's number, and wait for its answer."""
        await self.ready()
        number = self._client.new_id()
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._client.send(frame_of(number))
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    @VLLM_NAMES.arguments_of
    async def close(self) -> None:
        """Stop the engine; unfinished requests raise EngineDead. A second call is a no-op.

        Raises:
            RuntimeError: this AsyncLLM belongs to another event loop, which is not closed.
        """
        if self._loop is not None and self._loop.is_closed():
            self._leave_loop()
        self._check_loop()
        self._is_closed = True
        if self.loss is None:
            self.loss = CLOSED
        self._client.send(Stop())
        self._client.close()
        if self._starting is None:
            self._process.end.close()  # no transport has it
        await asyncio.to_thread(self._stop, self._process)
        self._fail_all()
        self._texts.shutdown(wait=False, cancel_futures=True)

    if not TYPE_CHECKING:  # a type checker must report unknown names itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an AttributeError that names what there is in place of a member of vLLM's."""
            raise missing(self, name, OF_ASYNC_LLM)

    async def __aenter__(self) -> "AsyncLLM":
        await self.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _outputs(
        self, prompt: TokenPrompt, params: SamplingParams | None, name: str | int | None
    ) -> AsyncGenerator[RequestOutput]:
        await self.ready()
        async with self._stream(prompt, self._params_of(params), name) as stream:
            async for _ in stream:
                yield stream.request.output(name)

    @asynccontextmanager
    async def _stream(
        self, prompt: TokenPrompt, params: SamplingParams | PoolingParams, name: str | int | None
    ) -> AsyncIterator[RequestStream]:
        """A request under the user's name for it; it is aborted where the reader leaves."""
        if name is not None and plain_name(name) in self._names:
            raise ValueError(f"request_id is {shown(name)}: a request in flight has that id")
        try:
            async with await self._submit(prompt, params, name) as stream:
                yield stream
        finally:
            if name is not None:
                self._names.pop(name, None)

    async def _start(self) -> None:
        """Read the model's files, and have the host make the engine."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        await self._client.connect(self._process.end)
        try:
            prepared = await self._prepare()
        except BaseException:
            self._started.cancel()  # nothing awaits it
            raise
        keywords.warn_of_length(self._options, prepared.own_length, prepared.length_place)
        given = self._given
        source = None if given.skip_tokenizer_init else given.tokenizer or prepared.engine.model
        tokenizer = None if source is None else str(source)
        self._client.send(Start(prepared.engine, tokenizer, given.tokenizer_mode))
        await self._started

    async def _prepare(self) -> Prepared:
        """Read the model's files, once."""
        self._enter()
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._in_thread(partial(prepare, self._given)))
        self._prepared = await asyncio.shield(self._preparing)
        return self._prepared

    def _enter(self) -> None:
        """Let this event loop use it; raises EngineDead if it is closed, and as `_check_loop`."""
        self._check_loop()
        if self._is_closed:
            raise EngineDead(CLOSED)
        self._loop = asyncio.get_running_loop()

    def _check_loop(self) -> None:
        """Raise RuntimeError if it belongs to another event loop, where its tasks wait."""
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError(OTHER_LOOP)

    def _leave_loop(self) -> None:
        """Forget a loop that is closed: nothing of it can be woken any more."""
        self._loop = None
        self._client.forget()
        self._process.end.close()  # its transport cannot
        self._answers.clear()
        self._streams.clear()

    def _params_of(self, given: SamplingParams | None) -> SamplingParams:
        (params,) = params_list(given, self._known().default_params, 1)
        return params

    def _length(self, truncates: bool) -> int | None:
        """The context, which bounds a text; None while it is not known, and where it is cut."""
        return None if truncates or self._facts is None else self._facts.max_model_len

    def _known(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError(NOT_READY)
        return self._prepared

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run text work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    def _check_alive(self) -> None:
        if self.loss is not None:
            raise EngineDead(self.loss)

    def _receive(self, frame: FromHost) -> None:
        """Handle a frame of the host's."""
        self.last_sign = time.monotonic()
        match frame:
            case Step():
                self._step(frame)
            case Stats(metrics):
                self.stats = metrics
            case Accepted(request_id):
                if answer := self._waiting(request_id):
                    answer.set_result(None)
            case Answer(request_id, value):
                if answer := self._waiting(request_id):
                    answer.set_result(value)
            case Refused(request_id, kind, message):
                if answer := self._waiting(request_id):
                    answer.set_exception(ERRORS.get(kind, EngineDead)(message))
            case Ready(facts):
                self._facts = facts
                self._processor = Processor(self._client, self.text, lambda _: None)
                self._settle(None)
            case Failed(kind, message):
                self._settle(ERRORS.get(kind, RuntimeError)(message))
            case Lost(message):
                self.loss = message
            case Log(level, message):
                LOGGER.log(level, "%s", message)

    def _waiting(self, request_id: int) -> "asyncio.Future[Any] | None":
        """The future of the answer to a request or call; None if no task waits for it any more."""
        answer = self._answers.get(request_id)
        return None if answer is None or answer.done() else answer

    def _settle(self, error: BaseException | None) -> None:
        """End the start."""
        if self._started is None or self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self.loss = str(error)
            self._started.set_exception(error)

    def _step(self, frame: Step) -> None:
        """Hand a step's tokens to their requests, and wake the readers."""
        assert self._processor is not None
        if frame.rows is not None:
            names = zip(frame.rows.request_ids, frame.rows.indexes, strict=True)
            self._rows = self._processor.rows(names)
        updates = list(frame.updates)
        self._updated.update(map(self._processor.completion, updates))
        touched = dict.fromkeys([update.request_id for update in updates])
        if not frame.is_part:
            updates += self._rows.take(frame.token_ids, self._updated)
            self._updated.clear()
            touched.update(dict.fromkeys(self._rows.request_ids))
        while updates:
            try:
                self._processor.process(updates)
            except Exception as error:  # a tokenizer's: ends this request alone
                self._fail_first(updates, error)
        streams = [self._streams[each] for each in touched if each in self._streams]
        for request, _ in self._processor.ended:
            if request.finished:
                self._streams.pop(request.request_id, None)
        self._processor.ended.clear()
        if not self._processor.has_unfinished:
            self._rows = RowTokens(())  # nothing keeps the requests that have ended
        self._wakes.add(streams)
        self.on_step(frame)

    def _fail_first(self, updates: list[Any], error: Exception) -> None:
        """End the request whose text cannot be made; the other updates are intact."""
        assert self._processor is not None
        update = updates.pop(0)
        LOGGER.log(logging.ERROR, "request %d: no text", update.request_id, exc_info=error)
        stream = self._streams.pop(update.request_id, None)
        self._processor.abort(update.request_id)
        if stream is not None:
            stream.close()
            stream.fail(RuntimeError(f"the text cannot be made: {type(error).__name__}: {error}"))

    def _drop(self, request_id: int) -> None:
        """Abort a request and forget it."""
        self._streams.pop(request_id, None)
        if self._processor is not None:
            self._processor.abort(request_id)
        if answer := self._waiting(request_id):  # the host gives none of a grammar that compiles
            answer.set_result(None)

    def _end(self) -> None:
        """The connection is gone: whatever is in flight fails."""
        if self.loss is None:
            self.loss = DEAD.format(self._process.ending())
            LOGGER.error("%s", self.loss)
        self._settle(EngineDead(self.loss))
        self._fail_all()

    def _fail_all(self) -> None:
        assert self.loss is not None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(self.loss))
        for stream in tuple(self._streams.values()):
            stream.fail(EngineDead(self.loss))
        self._streams.clear()

    @staticmethod
    def _stop(process: HostProcess) -> None:
        process.wait(CLOSE_SECONDS)
        process.kill()
        process.reap()
