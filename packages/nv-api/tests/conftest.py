"""A scripted engine and tiny tokenizers: what the tests of text need, and no model."""

import importlib.util
import json
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import nv_api.start
import pytest
import torch
from nv_engine.log import LOGGER, VARIABLE
from nv_engine.validation import numbered
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}tools={{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 256
VOCAB_SIZE = 320
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("S", "T"), ("O", "P")]


@pytest.fixture(autouse=True)
def log_of_before():
    """`nv serve` sets NV_LOG and the log's level in its process, which may be that of the tests."""
    given, level, handlers = os.environ.get(VARIABLE), LOGGER.level, [*LOGGER.handlers]
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers
    if given is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = given


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, a few merges, three special tokens and one added token that is none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *SPECIAL, *("".join(pair) for pair in MERGES)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """Words that carry their leading space, and bytes where a word is missing (Llama 2's way)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁hello", "▁world", "llo", "▁he", ",", "▁a"]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")


@dataclass
class Running:
    """A completion of the scripted engine."""

    request_id: int
    index: int
    prompt_len: int
    script: deque[int]
    max_tokens: int
    num_given: int = 0


@dataclass
class ScriptedEngine:
    """The engine's interface over scripts: `answers[i]` is what the i-th request will say.

    A request without an answer repeats its own prompt, then EOS. Every step gives each completion
    `burst` tokens; the first step of a request also counts its prompt as prefill.
    """

    answers: list[list[int]] = field(default_factory=list)
    burst: int = 1
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 4096
    interrupt_at_step: int | None = None
    num_rests: int = 0
    num_steps: int = 0
    num_added: int = 0
    aborted: list[int] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    closed: bool = False

    @property
    def facts(self):
        return SimpleNamespace(max_model_len=self.max_model_len)

    @property
    def has_unfinished(self):
        return bool(self.running)

    @property
    def next_id(self):
        return self.num_added

    def validate(self, request):
        token_ids = request.token_ids
        if self.closed:
            raise ValueError("the engine is closed: make a new one")
        if any(not 0 <= token < self.vocab_size for token in token_ids):
            raise ValueError(f"a token id is outside the vocabulary of {self.vocab_size}")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens: at most {self.max_model_len}"
            )

    def add(self, request):
        self.validate(request)
        token_ids, params = request.token_ids, request.params
        request_id, self.num_added = self.num_added, self.num_added + 1
        known = request_id < len(self.answers)
        answer = self.answers[request_id] if known else [*token_ids, EOS]
        room = self.max_model_len - len(token_ids)
        for index in range(params.n):
            rotated = answer[index:]  # completions differ: each begins one token later
            limit = min(params.max_tokens or room, room)
            run = Running(request_id, index, len(token_ids), deque(rotated), limit)
            self.running.append(run)
        return request_id

    def add_list(self, requests, *, plain):
        assert plain, "the processor has plain ints"
        checked = []
        with numbered(checked, len(requests)):
            for request in requests:
                checked.append(self.validate(request))  # noqa: PERF401  # counted so far
        return [self.add(request) for request in requests]

    def rest(self):
        self.num_rests += 1

    def step(self):
        self.num_steps += 1
        if self.num_steps == self.interrupt_at_step:
            raise KeyboardInterrupt
        fresh = [run for run in self.running if run.num_given == 0]
        updates = [self._update(run) for run in self.running]
        self.running = [
            run
            for run, update in zip(self.running, updates, strict=True)
            if not update.finish_reason
        ]
        num_tokens = sum(len(update.token_ids) for update in updates)
        num_prefill = sum(run.prompt_len for run in fresh if run.index == 0)
        return SimpleNamespace(
            updates=updates,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_tokens - len(fresh),
        )

    def abort(self, request_id, index=None):
        self.aborted.append(request_id if index is None else (request_id, index))
        self.running = [
            run
            for run in self.running
            if run.request_id != request_id or index not in (None, run.index)
        ]

    advance = step  # the caller takes the updates off the list

    def check_usable(self):
        """It is."""

    is_here = True

    def close(self):
        self.closed = True

    def _update(self, run):
        tokens, finish_reason, stop_reason = [], None, None
        while len(tokens) < self.burst and finish_reason is None:
            tokens.append(run.script.popleft())
            run.num_given += 1
            if tokens[-1] == EOS:
                finish_reason = "stop"
            elif run.num_given >= run.max_tokens or not run.script:
                finish_reason = "length"
        return SimpleNamespace(
            request_id=run.request_id,
            index=run.index,
            token_ids=tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=0,
            scheduled_time=1.0,
            logprobs=None,
            prompt_logprobs=None,
        )


@pytest.fixture(scope="session")
def byte_level():
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentence_piece():
    return sentence_piece_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, byte_level) -> Path:
    """A model folder without weights: a config and a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    byte_level.save_pretrained(path)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, folder):
    """A tiny random checkpoint with the byte-level tokenizer and a chat template."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target = tmp_path_factory.mktemp("tiny")
    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    Qwen3ForCausalLM(config).eval().save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    return str(target)


@pytest.fixture(scope="session")
def adapter_writer():
    """nv-models' writer of adapters, in the format of peft."""
    file = Path(__file__).parents[2] / "nv-models/tests/adapter_writer.py"
    spec = importlib.util.spec_from_file_location("adapter_writer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def scripted(monkeypatch, engine, folder):
    """Make an LLM over the scripted engine; options as for LLM."""
    monkeypatch.setattr(nv_api.start, "Engine", lambda config: engine)
    return lambda **options: nv_api.LLM(str(folder), **options)
