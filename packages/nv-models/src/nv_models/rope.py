"""Rotary position embedding: the frequencies of every supported kind, and their table.

Owns RopeConfig and the [max_position, D] table of cosines and sines that `nk.apply_rope` reads.
Never rotates anything.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from nv_models.fields import LARGEST_SIZE, flag, number, numbers

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
RANGES = {"rope_theta": (1e-6, 1e15), "original_max_position_embeddings": (1, LARGEST_SIZE)}
"""The least and the largest value of a parameter that makes sense."""
ORIGINAL = "original_max_position_embeddings"
USUAL_RANGE = (1e-6, 1e6)
"""The same of every other parameter."""


@dataclass(frozen=True)
class RopeConfig:
    """The `rope_parameters` of a checkpoint, under transformers' names (version 5).

    Fields that a kind does not use stay None. `dynamic` only departs from `default` beyond
    `max_position_embeddings`, where this project never goes, so the two are the same table: each
    further token would change the angles of all keys that are in the cache already.
    """

    rope_theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """R: of a head's D elements, the first R are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def reach(self, max_position_embeddings: int) -> int:
        """The longest sequence that the rope is made for.

        As in vLLM: `linear` multiplies the length by its factor, `yarn` the length that it was
        stretched from; of llama3 `max_position_embeddings` is the stretched length already.
        """
        lengths = {
            "linear": max_position_embeddings,
            "yarn": self.original_max_position_embeddings,
        }
        length = lengths.get(self.rope_type)
        return int(length * required(self, "factor")) if length else max_position_embeddings

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> "RopeConfig":
        """Read a standardized `rope_parameters` dict.

        Raises:
            ValueError: a kind that is not supported, or a parameter of the wrong type or out of
                range.
        """
        kind = rope_kind(parameters)
        part = number(parameters, "partial_rotary_factor", 1.0)
        if part > 1:
            raise ValueError(f"partial_rotary_factor is {part:g}: it must be at most 1")
        theta = number(parameters, "rope_theta")
        if kind == "yarn" and theta <= 1:
            raise ValueError(f"rope_theta is {theta:g}: it must be more than 1 with yarn")
        for name in ("beta_fast", "beta_slow"):  # 0 means the default, as in transformers
            number({name: parameters.get(name) or 1}, name)
        given = {"rope_theta": theta, **numbers(parameters, OPTIONAL_NUMBERS)}
        refuse_out_of_range(given)
        truncate = flag({"truncate": True, **parameters}, "truncate")
        return cls(
            rope_type=kind,
            truncate=truncate,
            partial_rotary_factor=part,
            short_factor=factor_list(parameters, "short_factor"),
            long_factor=factor_list(parameters, "long_factor"),
            **given,
        )


def rope_kind(parameters: Mapping[str, Any]) -> str:
    """The rope_type, one of ROPE_KINDS; another value of any type is a ValueError."""
    kind = parameters["rope_type"]
    if kind not in ROPE_KINDS:
        raise ValueError(
            f"rope_type {kind!r:.200} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    return str(kind)


def factor_list(parameters: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """A list of longrope's factors; a missing one is empty."""
    values = parameters.get(name) or ()
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} of the rope is {values!r:.200}: it must be a list of numbers")
    return tuple(number({name: value}, name) for value in values)


OPTIONAL_NUMBERS = tuple(field.name for field in fields(RopeConfig) if field.default is None)


def refuse_out_of_range(parameters: Mapping[str, float]) -> None:
    """Raise ValueError for a parameter that is far from every sensible value.

    0 passes, as it means the default or is refused where the parameter is needed (`required`); as
    an `attention_factor` it would make every angle's cosine and sine 0.
    """
    for name, value in parameters.items():
        least, largest = RANGES.get(name, USUAL_RANGE)
        if (value or name == "attention_factor") and not least <= value <= largest:
            raise ValueError(
                f"{name} of the rope is {value!r:.200}: it must be a number from {least:.10g} to "
                f"{largest:.10g}"
            )


def cos_sin_table(
    rope: RopeConfig, head_dim: int, max_position: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """[max_position, R] fp32: the cosines of R/2 angles, then their sines.

    Computed on the CPU whatever the device, so that every rank and device reads the same bits.
    The attention factor of yarn and longrope is part of the table, as in transformers.
    """
    inv_freq, scale = frequencies(rope, head_dim, max_position)  # [R/2]
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32, device="cpu"), inv_freq)
    table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
    return table.to(device)


def frequencies(
    rope: RopeConfig, head_dim: int, max_position: int = 0
) -> tuple[torch.Tensor, float]:
    """[R/2] fp32 radians per position, and the factor on cosines and sines.

    Args:
        rope: the rotary embedding.
        head_dim: D.
        max_position: the longest sequence that will come; longrope depends on it.
    """
    size = rope.rotated(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    periods = rope.rope_theta**exponents  # [R/2] positions per radian
    match rope.rope_type:
        case "linear":
            return 1.0 / periods / required(rope, "factor"), 1.0
        case "yarn":
            return yarn_frequencies(rope, periods), yarn_attention_factor(rope)
        case "llama3":
            return llama3_frequencies(rope, periods), 1.0
        case "longrope":
            return longrope_frequencies(rope, periods, max_position), longrope_factor(rope)
        case _:
            return 1.0 / periods, 1.0


def required(rope: RopeConfig, name: str) -> float:
    """A parameter that this kind of rope cannot do without."""
    value = getattr(rope, name)
    if value is None or value <= 0:
        raise ValueError(
            f"{name} of the rope is {value}: it must be a positive number where its rope_type is "
            f"{rope.rope_type!r}"
        )
    return float(value)


def yarn_frequencies(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): slow dimensions are stretched, fast ones kept."""
    num_frequencies = len(periods)
    dim = 2 * num_frequencies
    context = required(rope, ORIGINAL)

    def dimension_of(rotations: float) -> float:
        """The (fractional) dimension that turns `rotations` times over the trained context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = dimension_of(rope.beta_fast or 32), dimension_of(rope.beta_slow or 1)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    ramp = (
        (torch.arange(num_frequencies, dtype=torch.float32, device="cpu") - first) / width
    ).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (required(rope, "factor") * periods) * (1 - kept) + 1.0 / periods * kept


def yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature, as a factor on cosines and sines."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = required(rope, "factor")

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)


def llama3_frequencies(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long waves divided by `factor`, short ones kept, a ramp between."""
    factor = required(rope, "factor")
    low, high = required(rope, "low_freq_factor"), required(rope, "high_freq_factor")
    context = required(rope, ORIGINAL)
    inv_freq = 1.0 / periods
    wavelength = 2 * math.pi / inv_freq
    ramp = (context / wavelength - low) / (high - low)
    blended = (1 - ramp) * inv_freq / factor + ramp * inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, blended)
    return torch.where(wavelength < context / high, inv_freq, scaled)


def longrope_frequencies(
    rope: RopeConfig, periods: torch.Tensor, max_position: int
) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): each frequency has a divisor of its own.

    Which of the two lists applies depends on the longest sequence that will come, as in vLLM: all
    keys of a cache must be rotated alike. (transformers goes by the sequence's length so far.)
    """
    context = required(rope, ORIGINAL)
    for name in ("short_factor", "long_factor"):  # both, whichever is used at this length
        if (count := len(getattr(rope, name))) != len(periods):
            raise ValueError(
                f"{name} of the rope has {count} entries: it must have {len(periods)}, one for "
                "each pair of rotated dimensions"
            )
    factors = rope.long_factor if max_position > context else rope.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * periods)


def longrope_factor(rope: RopeConfig) -> float:
    """LongRoPE's factor on cosines and sines."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = required(rope, "factor")
    if factor <= 1:
        return 1.0
    context = required(rope, ORIGINAL)
    if context <= 1:
        raise ValueError(
            f"{ORIGINAL} of the rope is {context:g}: it must be more than 1 where its rope_type is "
            f"{rope.rope_type!r}"
        )
    return math.sqrt(1 + math.log(factor) / math.log(context))
