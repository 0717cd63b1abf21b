"""The record of an architecture: what all its checkpoints share.

Owns the record and the layers of a decoder whose layers are alike. Never reads a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nv_models.config import ExpertNames, Factors, Fused, LayerNorms, LayerSpec, NormKind
from nv_models.fields import LARGEST_SIZE, flag, numbers, size, strings

FULL, SLIDING = "full_attention", "sliding_attention"
AFTER_ONLY = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
"""The norms of a layer that norms what attention and MLP give, and not what they read."""
Values = Mapping[str, Any]
"""The fields of config.json over the architecture's defaults."""


def alike(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """The layers of a decoder whose layers do not differ.

    Raises:
        ValueError: config.json names layers of another kind.
    """
    count = size(values, "num_hidden_layers")
    refuse_other_types(strings(values, "layer_types"), frozenset({FULL}))
    if first_windowed(values) < count:
        raise ValueError(
            f"sliding_window = {values.get('sliding_window', 4096)} is active, which is not "
            "supported in this architecture; set use_sliding_window to false to attend to "
            "everything"
        )
    return (layer,) * count


def first_windowed(values: Values) -> int:
    """The first layer with a window where `use_sliding_window` decides; past all if it is off."""
    if not (flag(values, "use_sliding_window") and values.get("sliding_window", 4096)):
        return LARGEST_SIZE
    return int(numbers(values, ("max_window_layers",)).get("max_window_layers", 28))


def last_windowed(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """The layers of Qwen: those from `max_window_layers` on may have a window."""
    first, count = first_windowed(values), size(values, "num_hidden_layers")
    if first >= count:
        return alike(values, layer)
    usual = [SLIDING if index >= first else FULL for index in range(count)]
    short = with_window({"sliding_window": 4096, **values}, layer)
    return mixed(values, usual, short, layer)


def windowed(values: Values, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    """The layers of a decoder that all have the window `sliding_window`, unless that is null."""
    if values.get("sliding_window") is None:
        return alike(values, layer)
    return (with_window(values, layer),) * size(values, "num_hidden_layers")


def with_window(values: Values, layer: LayerSpec) -> LayerSpec:
    """A layer that reads the last `sliding_window` keys only."""
    window = size(values, "sliding_window")
    return replace(layer, attention=replace(layer.attention, window=window))


def every(period: int, count: int) -> list[str]:
    """The kinds of `count` layers of which each `period`-th has no window, and the others have."""
    return [FULL if (index + 1) % period == 0 else SLIDING for index in range(count)]


def mixed(
    values: Values, usual: Sequence[str], short: LayerSpec, whole: LayerSpec
) -> tuple[LayerSpec, ...]:
    """Layers of two kinds, as `layer_types` has them: with a window, and without."""
    return tuple(short if kind == SLIDING else whole for kind in layer_types(values, usual))


def layer_types(values: Values, usual: Sequence[str]) -> tuple[str, ...]:
    """The field `layer_types`, or the usual kinds where config.json has none.

    It may be longer than the model: `hf_overrides` may cut the number of layers.

    Raises:
        ValueError: a kind that is not computed, or fewer kinds than layers.
    """
    kinds = strings(values, "layer_types") or tuple(usual)
    refuse_other_types(kinds, frozenset({FULL, SLIDING}))
    if len(kinds) < len(usual):
        raise ValueError(
            f"layer_types has {len(kinds)} entries: it must have num_hidden_layers = {len(usual)}"
        )
    return kinds[: len(usual)]


def gguf_layer_types(values: Values) -> Values:
    """The field `layer_types` of a GGUF file that lists whether each layer has a window."""
    pattern = values.get("sliding_window_pattern")
    if not isinstance(pattern, list):  # the number of layers after which their kinds repeat
        return {}
    kinds = [SLIDING if has_window else FULL for has_window in pattern]
    return {"sliding_window_pattern": None, "layer_types": kinds}


def refuse_other_types(kinds: Sequence[str], known: frozenset[str]) -> None:
    """Raise ValueError for a kind of layer that is not computed."""
    if others := sorted(set(kinds) - known):
        raise ValueError(
            f"layer_types names {others[0]!r}, which is not supported; this architecture's layers "
            f"may be {', '.join(sorted(known))}"
        )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The constants that all checkpoints of an architecture share.

    Args:
        model: the class, a `CausalLM`, by its full name.
        qk_norm: every query and key head goes through an RMS norm before its rotation.
        qk_norm_whole: that norm is over the heads together.
        qkv_bias: whether q, k and v have biases: True, False, or the name of the field of
            config.json that decides.
        output_bias: the same of attention's output.
        mlp_bias: the same of the MLP's matrices.
        activation: of the MLP, by transformers' name: of its gate "silu" or "gelu_pytorch_tanh", or
            "relu" where it has no gate.
        activation_field: the field of config.json that names it.
        width_field: the field of config.json with the width of the MLP.
        embedding_field: the field of config.json with the columns of the embedding, if they may be
            another number than hidden_size.
        norms: the norms of a layer.
        norm_kind: how a norm's weight multiplies.
        fused: matrices that are one tensor in the checkpoint.
        rotates_neighbours: the rotary embedding turns neighbouring elements, not halves.
        layers: makes the layers of the fields and of the usual layer.
        factors: reads the factors on embedding, residual and logits.
        reads: fields that `layers` and `factors` read, or that its class computes. Any other field
            that would change the numbers is refused (`support`).
        quantization: `quant_method` of the quantized checkpoints that are read; None: none are.
        defaults: fields that transformers' config class adds where config.json lacks them.
        gguf: `general.architecture` of its GGUF files; None: its GGUF files are not read.
        gguf_rotates_neighbours: its GGUF files hold the rows of q and k in llama.cpp's order.
        gguf_experts: the names, in checkpoints, of the router and of the stacks of experts that its
            GGUF files hold in place of each MLP.
        gguf_layers: names of its layers in GGUF files, and in checkpoints, where they are not the
            usual ones.
        gguf_fields: fields of config.json by keys of a GGUF file, which are read besides the usual.
        gguf_derived: makes the fields of config.json that llama.cpp does not write from those that
            it does.
    """

    model: str = "nv_models.decoder.Decoder"
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    activation: str = "silu"
    activation_field: str = "hidden_act"
    width_field: str = "intermediate_size"
    embedding_field: str | None = None
    norms: LayerNorms = LayerNorms()  # noqa: RUF009  # frozen
    norm_kind: NormKind = NormKind()  # noqa: RUF009  # frozen
    fused: Fused = Fused()  # noqa: RUF009  # frozen
    rotates_neighbours: bool = False
    layers: Callable[[Values, LayerSpec], tuple[LayerSpec, ...]] = alike
    factors: Callable[[Values], Factors] = lambda _: Factors()
    reads: frozenset[str] = frozenset()
    quantization: str | None = None
    defaults: Values = field(default_factory=dict)
    gguf: str | None = None
    gguf_rotates_neighbours: bool = False
    gguf_experts: ExpertNames | None = None
    gguf_layers: Mapping[str, str] = field(default_factory=dict)
    gguf_fields: Mapping[str, str] = field(default_factory=dict)
    gguf_derived: Callable[[Values], Values] = lambda _: {}
