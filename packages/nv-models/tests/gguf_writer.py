"""Writes a tiny checkpoint as a GGUF file, the way llama.cpp's converter does."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

NAMES = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
}
"""Names that llama.cpp has for architectures, by `model_type`."""
ROUTERS = ("mlp.gate.weight", "moe.gate.weight", "mlp.router.weight")
PERMUTED = {"llama", "smollm3", "granite"}
SPECIAL = ["<|end|>", "<|turn|>"]
CHAT_TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}"
Kinds = GGMLQuantizationType | dict[str, GGMLQuantizationType]
"""Of all matrices, or by a part of their names, the first that fits; "" is in each."""
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The first bytes of a block's scales in fp16."""


def kind_of(name: str, kinds: Kinds) -> GGMLQuantizationType:
    """The type of a matrix."""
    if isinstance(kinds, GGMLQuantizationType):
        return kinds
    return next(kind for part, kind in kinds.items() if part in name)


def encode(array: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """The bytes of a tensor; the library writes no K-quants, so they are random blocks."""
    if not kind.name.endswith("_K"):
        return quantize(np.ascontiguousarray(array), kind)
    block, size = GGML_QUANT_SIZES[kind]
    count = array.size // block
    rng = np.random.default_rng(array.size)
    rows = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for first in SCALES[kind.name]:
        scale = rng.uniform(2e-5, 1e-4, count).astype("<f2")
        rows[:, first : first + 2] = scale.view(np.uint8).reshape(count, 2)
    return rows.reshape(len(array), -1)


def byte_level_tokenizer(size: int, pre: str) -> dict:
    """Two special tokens, all bytes, a few merges, padding up to `size`."""
    merges = ["1 2", "12 3", "123 4", "h i", "Ġ hi"]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [merge.replace(" ", "") for merge in merges]
    padding = [f"[{index}]" for index in range(size - len(pieces))]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": pieces + padding,
        "token_type": [3, 3] + [1] * (len(pieces) - 2) + [5] * len(padding),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "eot_token_id": 1,
    }


def add_values(writer: GGUFWriter, values: dict) -> None:
    """Metadata with the types that the converter uses."""
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case None:
                continue
            case list():
                writer.add_array(key, value)


def write_gguf(
    folder: Path,
    file: Path,
    kind: Kinds,
    *,
    pre: str = "smollm",
    tokenizer: dict | None = None,
    metadata: dict | None = None,
    tokenizer_changes: dict | None = None,
    rope_factors: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """Write `folder`'s checkpoint to `file`, matrices as `kind`; returns the quantized values.

    `metadata` overrides keys of the architecture's section, `tokenizer_changes` those of the
    tokenizer's (None takes one out); the returned tensors are fp32 under the checkpoint's names.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = NAMES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(file, architecture)
    section = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim_of(config),
        "rope.freq_base": 10000.0,
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **(metadata or {}),
    }
    add_values(writer, {f"{architecture}.{key}": value for key, value in section.items()})
    values = tokenizer or byte_level_tokenizer(config["vocab_size"], pre)
    values = values | (tokenizer_changes or {})
    add_values(writer, {f"tokenizer.ggml.{key}": value for key, value in values.items()})
    writer.add_string("tokenizer.chat_template", CHAT_TEMPLATE)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = tensor_names(architecture, config["num_hidden_layers"])
    kept = add_tensors(writer, folder, kind, names, heads if architecture in PERMUTED else {})
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for length in ("long", "short"):
        if factors := config["rope_parameters"].get(f"{length}_factor"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def tensor_names(architecture: str, num_layers: int) -> Callable[[str], str]:
    """A module's name in GGUF files, from the table of llama.cpp's converter."""
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, num_layers)

    def find(module: str) -> str:
        if stack := re.fullmatch(r"model\.(.+)\.block_sparse_moe\.experts\.\*(.+)", module):
            module = f"{stack[1]}.feed_forward.experts{stack[2]}"  # as Mixtral's class merges them
        name = table.get_name(module.replace(".*", ""))
        assert name, module
        return name

    return find


def add_tensors(
    writer: GGUFWriter,
    folder: Path,
    kind: Kinds,
    names: Callable[[str], str],
    heads: dict[str, int],
) -> dict[str, torch.Tensor]:
    """Add every tensor, the projections in `heads` with their rows permuted."""
    from gguf.quants import dequantize  # noqa: PLC0415

    kept, is_offset = {}, "Gemma" in (folder / "config.json").read_text()
    stacks: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, tensor in by_expert(load_file(folder / "model.safetensors")).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "sinks":
            module, leaf = name, "weight"
        array, stored = (
            tensor.float().numpy(),
            kind_of(name, kind)
            if tensor.ndim == 2 and not name.endswith(ROUTERS)
            else GGMLQuantizationType.F32,
        )
        offset = 1 if is_offset and name.endswith("norm.weight") else 0  # as Gemma's classes add it
        data = encode(array + np.float32(offset), stored)
        kept[name] = torch.from_numpy(dequantize(data, stored) - offset)
        if count := heads.get(module.rpartition(".")[2]):
            halves = data.reshape(count, 2, -1, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        data = np.ascontiguousarray(data)
        if expert := re.search(r"\.experts\.(\d+)\.", module):
            target = names(module.replace(expert[0], ".experts.*."))
            stack = stacks.setdefault((target, leaf), {})
            stack[int(expert[1])] = data  # by number, while the file is sorted by name
            continue
        writer.add_tensor(f"{names(module)}.{leaf}", data, raw_dtype=stored)
    for (target, leaf), stack in stacks.items():
        data = np.stack([stack[expert] for expert in range(len(stack))])
        stored = kind_of(target, kind) if leaf == "weight" else GGMLQuantizationType.F32
        writer.add_tensor(f"{target}.{leaf}", data, raw_dtype=stored)
    return stacked(kept)


def by_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with GPT-OSS's stacks of experts taken apart; others as they are."""
    found = {}
    for name, tensor in tensors.items():
        layer, is_stack, part = name.partition(".experts.")
        if not is_stack or part[0].isdigit():
            found[name] = tensor
            continue
        leaf = "bias" if part.endswith("_bias") else "weight"
        for expert, each in enumerate(tensor if leaf == "bias" else tensor.mT):
            own = f"{layer}.experts.{expert}"
            if part.startswith("gate_up"):
                found[f"{own}.gate_proj.{leaf}"] = each[::2]
                found[f"{own}.up_proj.{leaf}"] = each[1::2]
            else:
                found[f"{own}.down_proj.{leaf}"] = each
    return found


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `by_expert` where layers have GPT-OSS's router; others as they are."""
    routers = [name for name in tensors if name.endswith("mlp.router.weight")]
    found = {name: each for name, each in tensors.items() if not routers or ".experts." not in name}
    for router in routers:
        experts = router.replace("router.weight", "experts")
        for leaf, end in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                torch.stack(
                    [
                        tensors[f"{experts}.{n}.{part}_proj.{leaf}"]
                        for n in range(len(tensors[router]))
                    ]
                )
                for part in ("gate", "up", "down")
            )
            pairs = torch.stack((gate, up), 2).flatten(1, 2)
            for part, values in (("gate_up_proj", pairs), ("down_proj", down)):
                is_bias = leaf == "bias"
                found[f"{experts}.{part}{end}"] = values if is_bias else values.mT.contiguous()
    return found


def head_dim_of(config: dict) -> int:
    """The elements of a head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
