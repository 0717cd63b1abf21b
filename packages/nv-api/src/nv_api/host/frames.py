"""Frames: the messages between a front end and its engine host.

Owns their form: a length of four bytes, then msgpack. Never sends one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from struct import Struct
from typing import Any, TypeAlias

import msgspec
from nv_engine import (
    EngineConfig,
    EngineMetrics,
    EngineRequest,
    LoRARequest,
    ModelFacts,
    PoolingParams,
    SamplingParams,
    SequenceUpdate,
    StructuredOutputsParams,
)
from nv_engine.validation import plain_salt

LENGTH = Struct("<I")
MAX_BYTES = 2**32 - 1
"""The largest length of a frame that its first 4 bytes can hold."""

REFUSALS = (ValueError, TypeError, NotImplementedError, ImportError, FileNotFoundError)
"""Errors of a user, which the front end raises as what they are; others become RuntimeErrors."""

STOP = "stop"
"""The parameter that the front end sees to, where text is made. The engine reads no text of
`bad_words` either, but names it in an error if the user did."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first frame to a host: make the engine."""

    config: EngineConfig
    tokenizer: str | None
    """A folder or hub name, to compile grammars with; None: no tokenizer."""
    tokenizer_mode: str


class Add(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run a request; the host answers with Accepted or Refused."""

    request_id: int
    token_ids: list[int]
    params: dict[str, Any]
    """The fields that differ from the defaults."""
    cache_salt: str | None = None
    pools: bool = False
    """Whether the parameters are of PoolingParams instead."""
    lora: LoRARequest | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """End a request, or one of its completions; the host sends nothing of it any more."""

    request_id: int
    index: int | None = None


class Reset(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget every cached prefix."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """End the host."""


class AddAdapter(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Check an adapter's files and read them; the host answers with Accepted or Refused."""

    request_id: int
    """Of this call; requests and calls have different ids."""
    lora: LoRARequest


class RemoveAdapter(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Let an adapter's id mean nothing; the host answers whether it meant something."""

    request_id: int
    adapter_id: int


class ListAdapters(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Answer with the ids that mean an adapter."""

    request_id: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The engine is made."""

    facts: ModelFacts


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The engine cannot be made; the host ends."""

    kind: str
    """The exception's class."""
    message: str


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A request is queued, or a call is done."""

    request_id: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A request is not queued, or a call cannot be done."""

    request_id: int
    kind: str
    message: str


class RowNames(msgspec.Struct, frozen=True, array_like=True):
    """The completions that a step drew for."""

    request_ids: list[int]
    indexes: list[int]


class Step(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The updates of one step of the engine."""

    updates: list[SequenceUpdate]
    num_prefill_tokens: int
    num_decode_tokens: int
    token_ids: Sequence[Sequence[int]] = ()
    """Drawn tokens, by step and row. Rows that have an update take their tokens from there."""
    rows: RowNames | None = None
    """None: those of the frame before."""
    is_part: bool = False
    """More updates of this step follow, and then its tokens."""


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The engine's counters and state."""

    metrics: EngineMetrics


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The device is lost: the host ends."""

    message: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """A record of the host's log."""

    level: int
    message: str


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """The result of a call."""

    request_id: int
    value: bool | list[int]


ToHost: TypeAlias = Start | Add | Abort | Reset | Stop | AddAdapter | RemoveAdapter | ListAdapters
FromHost: TypeAlias = Ready | Failed | Accepted | Refused | Step | Stats | Lost | Log | Answer


def _plain(value: object) -> object:
    """A list of what msgpack has no form for: log-probabilities that are views of a step's."""
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a frame holds a {type(value).__name__}")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
FOR_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


def packed(frame: ToHost | FromHost) -> bytes:
    """A frame as it travels."""
    body = ENCODER.encode(frame)
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """The bytes of a connection that are not a whole frame yet."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, received: bytes) -> list[bytes]:
        """Add what was received; returns the bodies of the frames that are whole now."""
        held = self._bytes
        held += received
        bodies: list[bytes] = []
        start = 0
        while len(held) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(held, start)
            end = start + LENGTH.size + length
            if len(held) < end:
                break
            bodies.append(bytes(memoryview(held)[start + LENGTH.size : end]))
            start = end
        del held[:start]
        return bodies


_DEFAULTS = {
    kind: {field.name: field.default for field in fields(kind)}
    for kind in (SamplingParams, PoolingParams)
}


def add_of(request: EngineRequest, request_id: int) -> Add:
    """A request as it travels; the grammar is compiled where it arrives.

    Raises:
        ValueError: a cache_salt that the engine would refuse; here, as one that is not a text could
            not be read there.
    """
    plain_salt(request.cache_salt)
    given: dict[str, Any] = {
        name: value
        for name, default in _DEFAULTS[type(request.params)].items()
        if name != STOP and (value := getattr(request.params, name)) != default
    }
    if (form := given.get("structured_outputs")) is not None:
        given["structured_outputs"] = {f.name: getattr(form, f.name) for f in fields(form)}
    pools = isinstance(request.params, PoolingParams)
    salt, lora = request.cache_salt, request.lora
    return Add(request_id, list(request.token_ids), given, salt, pools, lora)


def request_of(add: Add) -> EngineRequest:
    """The request that an Add asks for, its grammar not compiled yet.

    Raises:
        ValueError: a parameter is out of range.
    """
    given: Mapping[str, Any] = add.params
    ids, salt = add.token_ids, add.cache_salt
    if add.pools:
        params = PoolingParams(**given)
        return EngineRequest(ids, params, request_id=add.request_id, cache_salt=salt, lora=add.lora)
    form = given.get("structured_outputs")
    sampling = SamplingParams(
        **{**given, "structured_outputs": form and StructuredOutputsParams(**form)}
    )
    return EngineRequest(ids, sampling, request_id=add.request_id, cache_salt=salt, lora=add.lora)


def with_grammar(request: EngineRequest, grammar: Any) -> EngineRequest:  # noqa: ANN401
    """The same request, its text held to a compiled grammar."""
    return replace(request, grammar=grammar)
