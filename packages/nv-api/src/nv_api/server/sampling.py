"""Sampling: from a request's fields to `SamplingParams`.

Owns what a field that is left out means, and the server's own limits.
"""

from dataclasses import fields
from typing import Any

from nv_engine import SamplingParams, StructuredOutputsParams
from nv_engine.sampling_names import SAMPLING_NAMES
from nv_engine.values import shown

from nv_api.server.errors import NO_ROOM, invalid, refusals, unsupported
from nv_api.server.options import ServeOptions
from nv_api.server.protocol.fields import Json, Sampling
from nv_api.server.schema_limits import check_depth, check_size

_OURS = [field.name for field in fields(SamplingParams)]
_NAMES = [name for name in _OURS if name in Sampling.model_fields and name != "structured_outputs"]
"""Fields that requests and `SamplingParams` share."""
KNOWN_ELSEWHERE = frozenset(SAMPLING_NAMES.unbuilt) | SAMPLING_NAMES.no_difference
GRAMMAR_KEYS = tuple(field.name for field in fields(StructuredOutputsParams))


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
        SAMPLING_NAMES.ignored("a request", foreign, _OURS)
        _check_limits(given, options)
        for name, value in given.items():
            if value is not None:
                setattr(params, name, value)
        if asked.logit_bias is not None:
            params.logit_bias = _biases(asked.logit_bias)
        params.check()
    return params


def fitted(params: SamplingParams, prompt_len: int, max_model_len: int) -> SamplingParams:
    """The same parameters for one prompt, frozen: max_tokens is at most the rest of the context.

    Raises:
        ApiError: 400, the prompt leaves no room.
    """
    room = max_model_len - prompt_len
    if room < 1:
        raise invalid(
            # litellm and langchain look for "prompt is too long" or the words before the bound
            f"the prompt is too long: it has {prompt_len} tokens and this model's maximum context "
            f"length is {max_model_len} tokens; shorten it to {max_model_len - 1} tokens or less, "
            "which leaves room for an answer",
            "prompt",
            NO_ROOM,
        )
    own = params.clone()
    own.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    with refusals():
        return own.frozen()


def structured_outputs(asked: Sampling, options: ServeOptions) -> StructuredOutputsParams | None:
    """VLLM's structured_outputs of a request; None: it has none.

    Raises:
        ApiError: 400, it is not a form, or larger than this server compiles.
    """
    given = asked.structured_outputs
    if given is None:
        return None
    wanted = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(wanted.keys() - set(GRAMMAR_KEYS))
    if unknown:
        raise unsupported(
            f"structured_outputs has {shown(unknown[0])}: it may have {', '.join(GRAMMAR_KEYS)}",
            "structured_outputs",
        )
    with refusals("structured_outputs"):
        form = StructuredOutputsParams(**wanted)
    source = form.source
    check_size(f"structured_outputs.{source.kind}", source.text, options)
    check_depth(f"structured_outputs.{source.kind}", form.json, options)
    return form


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
