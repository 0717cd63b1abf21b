"""ServeOptions: how a server names its model, what it takes, and for how long.

Owns the options, their bounds and their defaults; checked once. Never opens a socket.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nv_engine import LoRARequest, SamplingParams, values
from nv_engine.user_line import warn_user
from nv_engine.values import shown

from nv_api.chat_check import template_faults
from nv_api.chat_templates import check_templates
from nv_api.said import REASONING_PARSERS, TOOL_CALL_PARSERS
from nv_api.server.tracing import checked_endpoint

LOG_REQUESTS = ("none", "ids", "text")
GENERATION_CONFIGS = ("auto", "nv")
TEMPLATE_OPTION = "the option chat_template"
ADVICE = "correct it, or leave the option out for the model's own"
"""About a template that is faulty."""
OFF = "none"
"""In place of a parser's name."""
MAX_SECONDS = 7 * 24 * 3600
_SIZE = re.compile(r"(\d{1,18})([kMG]?)i?B?")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "M": 20, "G": 30}


def byte_size(text: str) -> int:
    """The number of bytes of a text such as "64k" or "32M" (powers of 1,024).

    Raises:
        ValueError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"a size is {shown(text)}: it must be a number of bytes, 64k, 32M or 1G")
    return int(found[1]) << _POWERS[found[2]]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server.

    Raises:
        ValueError: at construction, for a value out of range; names the option, value and range.
        ImportError: at construction, for `otlp_endpoint` without the extra `nv-api[otlp]`.
    """

    model: str
    """The model as it was given: `root` in /v1/models."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use; none: `model`. The first is used where a request has none."""
    lora_modules: tuple[LoRARequest, ...] = ()
    """Adapters, which requests select by their names as they do a model; the engine has room."""
    allow_runtime_lora_updating: bool = False
    """Whether clients may load and unload adapters, from any folder of this machine or hub name."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys, any of which opens the server; none: it is open."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of these origins may call the server; "*": all."""
    generation_config: str = "auto"
    """"nv": fields that a request leaves out have our defaults and not the checkpoint's."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Values of SamplingParams in place of those, for fields that a request leaves out."""
    chat_template: str | None = None
    """The text of a Jinja template in place of the model's own."""
    reasoning_parser: str | None = None
    """The parser of thoughts in an answer; None: the chat template's; "none": none."""
    tool_call_parser: str | None = None
    """The parser of calls of functions; names as above."""
    max_queue: int = 1024
    """Sequences that may wait for the engine; more are refused with 429."""
    max_body_bytes: int = 32 << 20
    max_n: int = 128
    """Completions of a prompt."""
    max_logprobs: int = 20
    """Log-probabilities per token."""
    max_grammar_bytes: int = 64 << 10
    max_grammar_depth: int = 32
    """Most brackets that may be open at one point of a schema."""
    request_timeout: float = 600.0
    """Seconds from a request's arrival to its end."""
    write_timeout: float = 60.0
    """Seconds that a client may take to read what was sent."""
    drain_seconds: float = 30.0
    """Longest wait for running requests once the server is asked to end."""
    stall_seconds: float = 30.0
    """Without a step for so long, and with work waiting, the server is not healthy."""
    ping_interval: float | None = None
    """Seconds between comments in a stream that is silent; None: a stream has no comments."""
    log_requests: str = "none"
    """Lines of the log for each request: "none", "ids" or "text" (prompts and answers)."""
    otlp_endpoint: str | None = None
    """Where OpenTelemetry's spans of requests are sent; None: there are none."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model is {shown(self.model)}: it must be a name that is not empty")
        if self.model.startswith("--"):
            raise ValueError(
                f"model is {shown(self.model)}: give the model before the options and without "
                "--model, as in nv serve MODEL --port 8000"
            )
        for name in "served_model_name", "api_key", "allowed_origins":
            self._make(name, _texts)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins has {shown(origin)}: each must be * or an origin, such as "
                    "https://example.com, without a path"
                )
        for name in "max_queue", "max_body_bytes", "max_n", "max_grammar_bytes":
            self._make(name, values.integer, 1)
        self._make("max_grammar_depth", values.integer, 1, 100)
        self._make("max_logprobs", values.integer, 0)
        for name in "request_timeout", "write_timeout", "stall_seconds":
            self._make(name, values.real, 0.0, MAX_SECONDS, above=True)
        self._make("drain_seconds", values.real, 0.0, MAX_SECONDS)
        if self.ping_interval is not None:
            self._make("ping_interval", values.real, 0.0, MAX_SECONDS, above=True)
        if self.chat_template is not None:
            check_templates(self.chat_template, TEMPLATE_OPTION, ADVICE)
            for fault in template_faults(self.chat_template, TEMPLATE_OPTION, ADVICE):
                warn_user(fault)
        if self.otlp_endpoint is not None:
            self._make("otlp_endpoint", lambda _, text: checked_endpoint(text))
        self._check_override()
        self._check_adapters()
        _one_of("log_requests", self.log_requests, LOG_REQUESTS)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        _one_of("reasoning_parser", self.reasoning_parser or OFF, (OFF, *REASONING_PARSERS))
        _one_of("tool_call_parser", self.tool_call_parser or OFF, (OFF, *TOOL_CALL_PARSERS))

    def _make(self, name: str, plain: Any, *bounds: float, **more: Any) -> None:  # noqa: ANN401
        object.__setattr__(self, name, plain(name, getattr(self, name), *bounds, **more))

    def _check_override(self) -> None:
        given = self.override_generation_config
        if not isinstance(given, Mapping):
            raise ValueError(
                f"override_generation_config is {shown(given)}: it must be a JSON object"
            )
        try:
            SamplingParams(**given)
        except (ValueError, TypeError) as error:
            raise ValueError(f"override_generation_config: {error}") from error

    def _check_adapters(self) -> None:
        values.boolean("allow_runtime_lora_updating", self.allow_runtime_lora_updating)
        modules = tuple(self.lora_modules)
        object.__setattr__(self, "lora_modules", modules)
        if wrong := [each for each in modules if not isinstance(each, LoRARequest)]:
            raise ValueError(f"lora_modules has {shown(wrong[0])}: each must be a LoRARequest")
        for number, module in enumerate(modules):
            if module.lora_name in self.names:
                raise ValueError(
                    f"lora_modules has {shown(module.lora_name)}, a name of the model: give the "
                    "adapter another name, or the model one with served_model_name"
                )
            for other in modules[:number]:
                if module.lora_name == other.lora_name:
                    raise ValueError(
                        f"lora_modules has {shown(module.lora_name)} twice: give each another name"
                    )
                if module.lora_int_id == other.lora_int_id:
                    raise ValueError(
                        f"lora_modules has the lora_int_id {module.lora_int_id} twice, of "
                        f"{other.lora_name!r} and {module.lora_name!r}: give each another id"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names, at least one."""
        return self.served_model_name or (self.model,)


def _texts(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Texts that are not empty; an error does not show them, for they may be keys."""
    if isinstance(value, str) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{name} must be a list of texts, none of them empty")
    return tuple(dict.fromkeys(value))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {shown(value)}: it must be one of {', '.join(known)}")
