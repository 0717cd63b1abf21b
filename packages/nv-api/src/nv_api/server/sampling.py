"""Sampling: from a request's fields to `SamplingParams`.

Owns what a field that is left out means, and the server's own limits.
"""

from dataclasses import fields
from typing import Any

from nv_engine import SamplingParams, StructuredOutputsParams
from nv_engine.params import VLLM_NAMES
from nv_engine.values import shown

from nv_api.server.errors import invalid, refusals, unsupported
from nv_api.server.options import ServeOptions
from nv_api.server.protocol.fields import Json, Sampling

_OURS = [field.name for field in fields(SamplingParams)]
_NAMES = [name for name in _OURS if name in Sampling.model_fields and name != "structured_outputs"]
"""Fields that requests and `SamplingParams` share."""
KNOWN_ELSEWHERE = frozenset(VLLM_NAMES.unbuilt) | VLLM_NAMES.no_difference
GRAMMAR_KEYS = tuple(field.name for field in fields(StructuredOutputsParams))
NO_ROOM = "context_length_exceeded"


def sampling_params(
    asked: Sampling,
    defaults: SamplingParams,
    options: ServeOptions,
    **more: Any,  # noqa: ANN401
) -> SamplingParams:
    """The parameters of a request; its max_tokens is not cut to the context yet.

    Args:
        asked: the request.
        defaults: the values of fields that it leaves out.
        options: the server's limits.
        **more: fields that the route has worked out itself.

    Raises:
        ApiError: 400, a field is out of range.
    """
    params = defaults.clone()
    given = {name: getattr(asked, name) for name in _NAMES}
    given |= {"structured_outputs": structured_outputs(asked, options), **more}
    unknown = (asked.model_extra or {}).items()
    foreign = {name: value for name, value in unknown if name in KNOWN_ELSEWHERE}
    with refusals():
        VLLM_NAMES.ignored("a request", foreign, _OURS)
        _check_limits(given, options)
        for name, value in given.items():
            if value is not None:
                setattr(params, name, value)
        if asked.logit_bias is not None:
            params.logit_bias = _biases(asked.logit_bias)
        params.check()
    return params


def fitted(params: SamplingParams, prompt_len: int, max_model_len: int) -> SamplingParams:
    """The same parameters for one prompt: max_tokens is at most the rest of the context.

    Raises:
        ApiError: 400, the prompt leaves no room.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise invalid(
            f"the prompt has {prompt_len} tokens and the model's context is {max_model_len}: at "
            f"most {max_model_len - 1} leave room for an answer, so shorten it",
            "prompt",
            NO_ROOM,
        )
    own = params.clone()
    own.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    with refusals():
        own.check()
    return own


def structured_outputs(asked: Sampling, options: ServeOptions) -> StructuredOutputsParams | None:
    """The form that a request wants its text to have; None: it is free.

    Raises:
        ApiError: 400, it is not a form, or larger than this server compiles.
    """
    wanted = _wanted(asked)
    if wanted is None:
        return None
    unknown = sorted(wanted.keys() - set(GRAMMAR_KEYS))
    if unknown:
        raise unsupported(
            f"structured_outputs has {shown(unknown[0])}: it may have {', '.join(GRAMMAR_KEYS)}",
            "structured_outputs",
        )
    with refusals("structured_outputs"):
        form = StructuredOutputsParams(**wanted)
    _check_form(form, options)
    return form


def _wanted(asked: Sampling) -> Json | None:
    """The fields of `StructuredOutputsParams` that a request asks for."""
    given = asked.structured_outputs
    ours = None if given is None else {n: v for n, v in given.items() if v is not None}
    if asked.response_format is None:
        return ours
    form = asked.response_format
    kind = form.get("type")
    if kind == "text":
        return ours
    if ours is not None:
        raise invalid(
            "the request has response_format and structured_outputs: give one of them",
            "response_format",
        )
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise invalid(
            f"response_format.type is {shown(kind)}: it must be text, json_object or json_schema",
            "response_format.type",
        )
    named = form.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise invalid(
            f"response_format.json_schema is {shown(named)}: it must be an object whose `schema` "
            "is a JSON schema",
            "response_format.json_schema",
        )
    return {"json": schema}


def _check_form(form: StructuredOutputsParams, options: ServeOptions) -> None:
    source = form.source
    size = len(source.text.encode())
    if size > options.max_grammar_bytes:
        raise invalid(
            f"structured_outputs.{source.kind} is {size} bytes long: this server takes at most "
            f"{options.max_grammar_bytes}, so give a smaller one",
            "structured_outputs",
        )
    depth = _depth(form.json) if isinstance(form.json, dict) else 0
    if depth > options.max_grammar_depth:
        raise invalid(
            f"the JSON schema is nested {depth} levels deep: this server takes at most "
            f"{options.max_grammar_depth}, so put inner schemas under $defs",
            "structured_outputs",
        )


def _depth(value: Any) -> int:  # noqa: ANN401
    """Brackets open at the deepest point; the body's depth is bounded."""
    members = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, members), default=0)


def _check_limits(given: Json, options: ServeOptions) -> None:
    """The limits of this server, which are below those of `SamplingParams`."""
    limits = {
        "n": (1, options.max_n),
        "logprobs": (0, options.max_logprobs),
        "prompt_logprobs": (0, options.max_logprobs),
    }
    for name, (low, high) in limits.items():
        value = given.get(name)
        if value is not None and not low <= value <= high:
            raise ValueError(
                f"{name} is {shown(value)}: this server takes an integer from {low} to {high}"
            )
    if given["max_tokens"] is not None and given["max_tokens"] > 2**31 - 1:
        given["max_tokens"] = 2**31 - 1  # more than fits is cut anyway


def _biases(given: Json) -> dict[int, Any]:
    """Biases by token id; JSON's keys are texts."""
    biases: dict[int, Any] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise ValueError(
                f'logit_bias has the key {shown(key)}: every key must be a token id, such as "1734"'
            )
        biases[int(key)] = bias
    return biases
