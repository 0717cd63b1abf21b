"""A scripted AsyncLLM, and a server over it on a real socket."""

import asyncio
import json
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import nv_api
import nv_api.async_llm
import pytest
import torch
from nv_api.completion import Completion
from nv_api.conversation import chat_prompt, conversation_list
from nv_api.prompts import single_prompt, tokenize
from nv_api.request import Request
from nv_api.request_stream import RequestStream
from nv_api.tokenizer import Tokenizer
from nv_engine import EngineMetrics, ModelFacts, SamplingParams, TokenLogprobs
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

for needed in "fastapi", "uvicorn", "prometheus_client":
    pytest.importorskip(needed)

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "host")]

from nv_api.server import ServeOptions, make_app  # noqa: E402  # after the skip
from nv_api.server.listening import Listening  # noqa: E402
from nv_api.server.run import Server  # noqa: E402
from pooling_models import OPTIONS as POOLING_OPTIONS  # noqa: E402
from pooling_models import PoolingServer, save  # noqa: E402
from running_server import RunningServer  # noqa: E402
from scripted_device import HostThread  # noqa: E402

EOS = 256
VOCAB_SIZE = 320
TAGS = ("</think>", "<tool_call>", "</tool_call>")  # and <think>, which the tokenizer has
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] %}<tool_call>{{ c }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens_thought %}<think>\n{% endif %}"
)
"""As Qwen3's, which may also open the thought itself."""
CALLING_TEMPLATE = """\
{%- if tools %}tools={{ tools | tojson }}
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
"""Of a model that thinks and calls functions."""


@pytest.fixture
def calling(byte_level, monkeypatch):
    """The tokenizer's chat template has thoughts and calls."""
    monkeypatch.setattr(byte_level, "chat_template", CALLING_TEMPLATE)


class ScriptedStream(RequestStream):
    """One request of a ScriptedLLM."""

    def __init__(self, llm, request, params, script):
        super().__init__(request, self._drop)
        self.llm, self.params = llm, params
        self.scripts = [deque(script[index:] or [EOS]) for index in range(params.n)]

    def _drop(self):
        self.llm.aborted.append(self.request.request_id)
        self.request.abort()

    def abort(self):
        super().abort()
        self.llm.forget(self)

    def step(self):
        """One token for each completion that runs."""
        for completion, script in zip(self.request.completions, self.scripts, strict=True):
            if completion.finish_reason:
                continue
            token = script.popleft()
            ends = {EOS: "stop"}.get(token)
            if token < 0:
                ends, token = "error", None
            elif len(completion.token_ids) + 1 >= self.params.max_tokens or not script:
                ends = ends or "length"
            top = self.params.logprobs
            own = [] if top is None else [self.llm.logprobs_of(token, top)]
            completion.begin()
            update = SimpleNamespace(
                index=completion.index,
                token_ids=[] if token is None else [token],
                finish_reason=ends,
                stop_reason="out of memory" if ends == "error" else None,
                num_cached_tokens=self.llm.num_cached_tokens,
                logprobs=own or None,
                prompt_logprobs=self._prompt_logprobs(completion),
                scheduled_time=time.monotonic(),
            )
            self.request.update(update)
            completion.begun = None
        self.wake()
        if self.request.finished:
            self.llm.forget(self)

    def _prompt_logprobs(self, completion):
        wanted = self.params.prompt_logprobs
        if wanted is None or completion.index or completion.token_ids:
            return None
        return [self.llm.logprobs_of(t, wanted) for t in self.request.prompt.token_ids[1:]]


@dataclass
class ScriptedLLM:
    """The interface of AsyncLLM over scripts: `answers[i]` is what the i-th request will say.

    A request without an answer repeats its own prompt, then ends. At most `num_slots` sequences run
    at once; a step takes `pace` seconds.
    """

    text: Tokenizer
    answers: list = field(default_factory=list)
    pace: float = 0.0
    num_slots: int = 256
    max_model_len: int = 512
    num_cached_tokens: int = 0
    recommended: dict = field(default_factory=dict)
    loaded: bool = True
    loss: str | None = None
    pooler: object = None
    aborted: list = field(default_factory=list)
    submitted: list = field(default_factory=list)
    stats: EngineMetrics = field(default_factory=EngineMetrics)
    on_step: object = None
    paused: bool = False
    refuse: Exception | None = None

    def __post_init__(self):
        self.running, self.waiting, self.stepping = [], deque(), None

    @property
    def is_ready(self):
        return self.loaded and self.loss is None

    async def ready(self):
        while not self.loaded:
            await asyncio.sleep(0.005)
            if isinstance(self.refuse, RuntimeError):
                raise self.refuse

    @property
    def facts(self):
        return ModelFacts(
            vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), max_model_len=self.max_model_len,
            num_blocks=64, block_size=16,
        )  # fmt: skip

    def get_default_sampling_params(self):
        return SamplingParams(**self.recommended)

    async def submit(self, prompt, params):
        await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        wrong = [token for token in prompt.token_ids if not 0 <= token < VOCAB_SIZE]
        if wrong:
            raise ValueError(f"the prompt has {wrong[0]}: a token id is at most {VOCAB_SIZE - 1}")
        params = params.frozen()
        number = len(self.submitted)
        self.submitted.append(SimpleNamespace(prompt=prompt, params=params))
        completions = tuple(
            Completion(i, params, self.text.detokenizer(params, prompt.token_ids),
                       self.text.token_text, prompt.place)
            for i in range(params.n)
        )  # fmt: skip
        request = Request(number, prompt, completions, self.text.token_text)
        script = self.answers[number] if number < len(self.answers) else [*prompt.token_ids, EOS]
        stream = ScriptedStream(self, request, params, list(script))
        self.waiting.append(stream)
        self._admit()
        if self.stepping is None:
            self.stepping = asyncio.create_task(self._steps())
            self.stepping.add_done_callback(asyncio.Future.result)  # an error is shown
        return stream

    async def tokenize(self, prompts, *, truncates=False, **options):
        length = None if truncates else self.max_model_len
        return tokenize([single_prompt(prompt) for prompt in prompts], self.text, length, **options)

    async def chat_prompt(self, messages, rendering, *, truncates=False):
        (conversation,) = conversation_list([messages])
        length = None if truncates else self.max_model_len
        return chat_prompt(self.text, conversation, rendering, length)

    def forget(self, stream):
        self.running = [each for each in self.running if each is not stream]
        if stream in self.waiting:
            self.waiting.remove(stream)
        self._admit()

    def lose(self, reason):
        self.loss = reason
        for stream in [*self.running, *self.waiting]:
            stream.fail(RuntimeError(reason))
        self.running, self.waiting = [], deque()
        self._admit()

    def logprobs_of(self, token, top):
        others = [(token + k) % VOCAB_SIZE for k in range(1, top + 1)]
        values = [-0.5, *(-1.0 - k for k in range(top))]
        if token == ord("Z") - 33:
            values[0] = float("-inf")
        return TokenLogprobs([token, *others], values, 1)

    def _admit(self):
        while self.waiting and self._num_running + self.waiting[0].params.n <= self.num_slots:
            self.running.append(self.waiting.popleft())
        self.stats = replace(
            self.stats,
            num_running=self._num_running,
            num_waiting=sum(stream.params.n for stream in self.waiting),
            num_blocks=64,
            num_free_blocks=64 - min(64, self._num_running),
        )

    @property
    def _num_running(self):
        return sum(stream.params.n for stream in self.running)

    async def _steps(self):
        while self.running or self.waiting:
            await asyncio.sleep(self.pace)
            if self.paused:
                await asyncio.sleep(0.005)
                continue
            for stream in [*self.running]:
                stream.step()
            self.stats = replace(self.stats, num_steps=self.stats.num_steps + 1)
            if self.on_step is not None:
                self.on_step(SimpleNamespace(num_prefill_tokens=0, num_decode_tokens=1))
        self.stepping = None


class BatchLLM(ScriptedLLM):
    """A ScriptedLLM that is made as `AsyncLLM` is; at most `most` sequences were in flight."""

    most = 0
    is_closed = False

    def __init__(self, model, **options):
        super().__init__(self.tokenizer, **self.script)
        self.model, self.options = model, options
        self.made.append(self)

    async def submit(self, prompt, params):
        stream = await super().submit(prompt, params)
        self.most = max(self.most, len(self.running) + len(self.waiting))
        return stream

    async def close(self):
        self.is_closed = True


@pytest.fixture
def llms(monkeypatch, byte_level):
    """The class of `AsyncLLM`: `made` are its models, `script` is of the next one."""
    for name, value in ("made", []), ("script", {}), ("tokenizer", Tokenizer(byte_level)):
        monkeypatch.setattr(BatchLLM, name, value, raising=False)
    monkeypatch.setattr(nv_api, "AsyncLLM", BatchLLM)
    yield BatchLLM
    assert all(llm.is_closed and not llm.running for llm in BatchLLM.made)


@dataclass
class Served:
    """A server in a thread, and a client of it."""

    llm: ScriptedLLM
    server: Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    url: str
    client: httpx.Client

    @property
    def service(self):
        return self.server._service

    @property
    def last(self):
        """The last request that the engine got."""
        return self.llm.submitted[-1]

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def call(self, function, *arguments):
        """Call a function in the server's thread."""
        done = threading.Event()
        found = []

        def work():
            found.append(function(*arguments))
            done.set()

        self.loop.call_soon_threadsafe(work)
        assert done.wait(5)
        return found[0]

    def post(self, path, body, **more):
        return self.client.post(path, json=body, **more)

    def chat(self, content="ab", **fields):
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt="ab", **fields):
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def until(self, condition, seconds=5.0):
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.002)

    def idle(self):
        """Whether nothing is in flight anywhere."""
        return not (
            self.llm.running
            or self.llm.waiting
            or self.service.lifecycle.guards
            or self.service.admission.num_in_flight
        )


@pytest.fixture
def serve(byte_level):
    """Start a server; `options` as of ServeOptions, `script` as of ScriptedLLM."""
    yield from _servers(byte_level)


@pytest.fixture(scope="session")
def speaking(folder):
    """A tokenizer whose tags are tokens, with a template of thoughts and calls."""
    backend = AutoTokenizer.from_pretrained(folder)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    backend.chat_template = TEMPLATE
    return backend


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory, folder, speaking):
    """A tiny random model of that tokenizer."""
    torch.manual_seed(0)
    target = tmp_path_factory.mktemp("speaking")
    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    Qwen3ForCausalLM(config).eval().save_pretrained(target)
    speaking.save_pretrained(target)
    return str(target)


@pytest.fixture
def speak(speaking):
    """As `serve`, over the tokenizer with tags."""
    yield from _servers(speaking)


@pytest.fixture(scope="module")
def served_speaking(speaking):
    """One such server for the tests of a module that do not change it."""
    servers = _servers(speaking)
    yield next(servers)()
    next(servers, None)


@pytest.fixture
def engine_server(monkeypatch, speaking_checkpoint):
    """Start a server over the real engine, with a device; None: the tiny model on the CPU."""
    with ExitStack() as stack:

        def start(device=None, waits=True, **options):
            monkeypatch.setattr(nv_api.async_llm, "HostProcess", lambda: HostThread(device))
            llm = nv_api.AsyncLLM(
                speaking_checkpoint, device="cpu", max_model_len=512, num_kvcache_blocks=64,
                kvcache_block_size=16,
            )  # fmt: skip
            served = stack.enter_context(_running(llm, ServeOptions(model="m/tiny", **options)))
            if waits:
                served.until(lambda: llm.is_ready, 60)
            return served

        yield start


@pytest.fixture(scope="module")
def llm(checkpoint, request):
    """`LLM` over the tiny model, with the module's OPTIONS."""
    with nv_api.LLM(checkpoint, **request.module.OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def served_answers(checkpoint, request):
    """Returns what a client's coroutine gets from a server over that model with these OPTIONS."""

    def answers(ask_all, **options):
        async def main():
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
                return await ask_all(client)

        server = RunningServer(
            lambda: nv_api.AsyncLLM(checkpoint, **request.module.OPTIONS), **options
        )
        try:
            return asyncio.run(main())
        finally:
            server.close()

    return answers


@pytest.fixture(scope="session")
def pooling(tmp_path_factory, byte_level):
    """A server over a tiny model by its kind, and an LLM over the same; each is made once."""
    found = {}

    def of(kind):
        if kind not in found:
            folder = save(kind, tmp_path_factory.mktemp(kind), byte_level)
            served = PoolingServer(folder)
            found[kind] = served, nv_api.LLM(str(folder), **POOLING_OPTIONS)
        return found[kind]

    yield of
    for served, llm in found.values():
        llm.close()
        served.close()


@pytest.fixture(scope="module")
def served(byte_level):
    """One server for the tests of a module that do not change it."""
    servers = _servers(byte_level)
    yield next(servers)(script={"recommended": {"temperature": 0.6, "top_k": 20}})
    next(servers, None)


def _servers(backend):
    with ExitStack() as stack:

        def start(script=None, listening=None, **options):
            llm = ScriptedLLM(Tokenizer(backend), **(script or {}))
            options = ServeOptions(model="m/tiny", **options)
            return stack.enter_context(_running(llm, options, **(listening or {})))

        yield start


@contextmanager
def _running(llm, options, verify=True, **listening):
    """A server over a model, on any free port; `verify`: the client's certificates."""
    server = Server(make_app(llm, options), Listening(port=0, **listening))
    loops = []

    async def run():
        loops.append(asyncio.get_running_loop())
        await server.serve()
        if hasattr(llm, "close"):
            await llm.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    uds, authority = listening.get("uds"), "127.0.0.1"
    if uds is None:
        authority += f":{server.servers[0].sockets[0].getsockname()[1]}"
    url = f"{'https' if 'ssl_certfile' in listening else 'http'}://{authority}"
    transport = httpx.HTTPTransport(uds=uds, verify=verify)
    with httpx.Client(base_url=url, timeout=60, transport=transport) as client:
        yield Served(llm, server, thread, loops[0], url, client)
    server._is_forced = server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def events_of(text):
    """The JSON of each event of a stream; the last one is [DONE]."""
    *lines, end = text.split("\n\n")
    assert end == ""
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture(scope="session")
def events():
    return events_of
