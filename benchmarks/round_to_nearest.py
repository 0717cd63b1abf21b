"""Quantized checkpoints made of one in floats by rounding each value to the nearest code.

Owns the arithmetic and the files of each scheme. It sees no text, so its codes are worse than those
of a tool that calibrates, such as AWQ's and GPTQ's own: what a layout costs at most. Whole matrices
of the layers are quantized; embedding and head stay in floats, but for GGUF.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from k_quants import BLOCK as K_BLOCK
from k_quants import FALLBACKS, quantize_k
from nv_models.architectures import ARCHITECTURES
from nv_models.load import open_checkpoint
from safetensors.torch import save_file

E4M3_MAX = 448
BLOCK = 128
AWQ_FIELDS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of eight columns in a word, the field from the lowest bits on that holds each."""
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Floats:
    """A checkpoint in floats.

    Attributes:
        config: its config.json, without a quantization_config.
        tensors: bf16 by name.
    """

    config: Config
    tensors: Tensors

    @classmethod
    def read(cls, folder: Path) -> "Floats":
        """Read a folder that `nv_models.resolve` returned; blocks of GGUF are dequantized."""
        checkpoint = open_checkpoint(folder, "auto")
        tensors = {}
        for name, shape in checkpoint.shapes.items():
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16)
            checkpoint.copy(name, 0, 0, tensors[name])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(config | {"dtype": "bfloat16"}, tensors)

    def write(self, folder: Path, scheme: "Scheme | None" = None) -> Path:
        """Write the checkpoint, its matrices in a scheme; None: as they are."""
        folder.mkdir(parents=True)
        if scheme is None:
            return write(folder, self.config, self.tensors)
        tensors = dict(self.tensors)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module, values = name.removesuffix(".weight"), tensors.pop(name).float()
            parts = scheme.tensors(values)
            tensors |= {f"{module}.{end}": each.contiguous() for end, each in parts.items()}
        return write(folder, self.config | {"quantization_config": scheme.config}, tensors)

    def write_gguf(self, folder: Path, kind: str) -> Path:
        """Write a GGUF file beside config.json: matrices of a kind, embedding and head in Q8_0.

        Where a matrix has no whole blocks of a K-quant, it is of the kind that llama.cpp takes.
        """
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize
        from nv_models.checkpoint.gguf.tensors import gguf_name, names_of

        folder.mkdir(parents=True)
        row = ARCHITECTURES[self.config["architectures"][0]]
        own = {ours: name for name, ours in names_of(row).items()}
        heads = {"q_proj": self.config["num_attention_heads"],
                 "k_proj": self.config["num_key_value_heads"]}  # fmt: skip
        writer = GGUFWriter(folder / "model.gguf", row.gguf)
        for key, name in (("head_count", "q_proj"), ("head_count_kv", "k_proj")):
            writer.add_uint32(f"{row.gguf}.attention.{key}", heads[name])
        for name, tensor in self.tensors.items():
            of_matrix = kind if "_proj" in name else "Q8_0"
            if tensor.shape[-1] % K_BLOCK:
                of_matrix = FALLBACKS.get(of_matrix, of_matrix)
            stored = GGMLQuantizationType["F32" if tensor.ndim == 1 else of_matrix]
            values = tensor.float().numpy()
            if of_matrix in FALLBACKS:
                data = quantize_k(values, of_matrix)
            else:
                data = quantize(values, stored)
            if row.gguf_rotates_neighbours and (count := heads.get(name.split(".")[-2])):
                halves = data.reshape(count, 2, -1, data.shape[-1])
                data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
            writer.add_tensor(gguf_name(name, own), data, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return write(folder, self.config, {})


def write(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Write config.json, and tensors if there are any."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Scheme:
    """A `quantization_config`, and the tensors of a matrix [N, K] by the ends of their names."""

    config: Config
    tensors: Callable[[torch.Tensor], Tensors]


def compressed(file_format: str, weights: Config, inputs: Config | None = None) -> Config:
    """A `quantization_config` of compressed-tensors for all matrices but the head."""
    usual = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "format": file_format, "weights": usual | weights}
    if inputs:
        group["input_activations"] = {"symmetric": True, "dynamic": True, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def packed(bits: int, group_size: int) -> Scheme:
    """compressed-tensors: W4A16 or W8A16, symmetric."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size}

    def tensors(values: torch.Tensor) -> Tensors:
        codes, scale, _ = groups_of(values, bits, group_size, torch.bfloat16, has_zeros=False)
        return {
            "weight_packed": words(codes, 1, fields(bits)),
            "weight_scale": scale,
            "weight_shape": torch.tensor(values.shape),
        }

    return Scheme(compressed("pack-quantized", weights), tensors)


def awq(group_size: int) -> Scheme:
    """AWQ's files: 4 bits with zero points."""
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}

    def tensors(values: torch.Tensor) -> Tensors:
        codes, scale, zeros = groups_of(values, 4, group_size, torch.float16, has_zeros=True)
        shifts = [4 * field for field in AWQ_FIELDS]
        packed_codes, packed_zeros = (words(each.T, 1, shifts) for each in (codes, zeros))
        return {"qweight": packed_codes, "qzeros": packed_zeros, "scales": scale.T}

    return Scheme(config | {"group_size": group_size}, tensors)


def gptq(bits: int, group_size: int) -> Scheme:
    """GPTQ's files, symmetric, in order."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True}

    def tensors(values: torch.Tensor) -> Tensors:
        codes, scale, zeros = groups_of(values, bits, group_size, torch.float16, has_zeros=False)
        return {
            "qweight": words(codes.T, 0, fields(bits)),
            "qzeros": words(zeros.T - 1, 1, fields(bits)),
            "scales": scale.T,
            "g_idx": torch.arange(values.shape[1], dtype=torch.int32) // group_size,
        }

    return Scheme(config | {"desc_act": False}, tensors)


def int8() -> Scheme:
    """compressed-tensors: W8A8."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token"}

    def tensors(values: torch.Tensor) -> Tensors:
        codes, scale, zeros = groups_of(values, 8, values.shape[1], torch.float32, has_zeros=False)
        return {"weight": (codes - zeros).to(torch.int8), "weight_scale": scale}

    return Scheme(compressed("int-quantized", weights, inputs), tensors)


def fp8_tensor() -> Scheme:
    """`quant_method: "fp8"` with a scale per matrix."""

    def tensors(values: torch.Tensor) -> Tensors:
        scale = values.abs().amax() / E4M3_MAX
        return {"weight": to_e4m3(values / scale), "weight_scale": scale}

    return Scheme({"quant_method": "fp8", "activation_scheme": "dynamic"}, tensors)


def fp8_blocks() -> Scheme:
    """`quant_method: "fp8"` with scales of blocks of 128 by 128, of which matrices are whole."""

    def tensors(values: torch.Tensor) -> Tensors:
        blocks = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale = blocks.abs().amax((1, 3)) / E4M3_MAX
        codes = to_e4m3(blocks / scale[:, None, :, None])
        return {"weight": codes.view(values.shape), "weight_scale_inv": scale}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Scheme(config | {"weight_block_size": [BLOCK, BLOCK]}, tensors)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def groups_of(
    values: torch.Tensor, bits: int, group_size: int, dtype: torch.dtype, *, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K] from 0 on, scales [N, K / group_size] in `dtype`, and the codes of zero.

    Without zero points the range is symmetric and zero is the middle code.
    """
    groups, top = values.unflatten(1, (-1, group_size)), 2**bits - 1
    if has_zeros:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / top).to(dtype)
        zeros = (-low / scale.float()).round().clamp(0, top)
    else:
        scale = (groups.abs().amax(2) / (top / 2)).to(dtype)
        zeros = torch.full_like(scale, (top + 1) / 2, dtype=torch.float32)
    codes = (groups / scale.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, top).flatten(1).long(), scale, zeros.long()


def fields(bits: int) -> list[int]:
    """Shifts of a word's fields, the lowest first."""
    return list(range(0, 32, bits))


def words(codes: torch.Tensor, dim: int, shifts: list[int]) -> torch.Tensor:
    """Pack each len(shifts) codes along a dimension into a word of int32."""
    parts = codes.movedim(dim, -1).unflatten(-1, (-1, len(shifts)))
    whole = (parts << torch.tensor(shifts)).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int().movedim(-1, dim)
