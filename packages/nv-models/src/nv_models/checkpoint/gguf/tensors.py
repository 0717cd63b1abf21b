"""The tensors of a GGUF file under their checkpoint names, dequantized a few rows at a time.

Owns the names, the order of Llama's rows, the experts of a stack, and the memory map. The
arithmetic of each quantized type is the gguf library's, but for MXFP4. Never holds a dequantized
tensor whole but for a matrix of one expert in MXFP4.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from nv_models.architectures import ARCHITECTURES, Architecture
from nv_models.checkpoint import mxfp4
from nv_models.checkpoint.gguf.architecture import architecture_of
from nv_models.checkpoint.gguf.folder import source_of
from nv_models.checkpoint.gguf.header import Header, TensorInfo, read_header
from nv_models.checkpoint.gguf.section import Section
from nv_models.config import ExpertNames

CHUNK_ELEMENTS = 1 << 18  # fp32 values in flight: a megabyte, which stays in the cache
MXFP4_BYTES = 17  # of a block
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = {
    "exaone4": {ROPE_FACTORS},
    "llama": {ROPE_FACTORS},
    "phi3": {LONG_FACTORS, SHORT_FACTORS},
}
"""Divisors of the rope's frequencies, by architecture: part of the config, not of the model."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
"""The usual names of layers; an architecture's row may have others (`names_of`)."""
QKV = {"attn_q", "attn_k", "attn_v"}
MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BARE = {"self_attn.sinks"}
"""Tensors whose checkpoint's name ends with the layer's, without `weight`."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FLOAT_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFCheckpoint:
    """A GGUF file as the loader sees it."""

    def __init__(self, file: Path) -> None:
        header = read_header(file)  # of all parts
        source = source_of(file.parent)
        self._is_linked = source != file.parent  # from the folder in the cache
        self.place = source if self._is_linked else file
        self.broken: list[str] = []
        self.incomplete = False
        self._header = header
        self._row = ARCHITECTURES[architecture_of(header)]
        self._names = names_of(self._row)
        self._own_names = {ours: own for own, ours in self._names.items()}
        self._tensors = {
            own: part
            for name, info in header.tensors.items()
            if name not in ROPE_TENSORS.get(header.architecture, ())
            for own, part in by_expert(name, info, self._names)
        }
        self.shapes = {own: info.shape for own, info in self._tensors.items()}
        files = {info.file for info in header.tensors.values()}
        self._data = {each: np.memmap(each, dtype=np.uint8, mode="c") for each in files}
        ends = {name: self._check(name, info) for name, info in header.tensors.items()}
        self._check_places({name: end for name, end in ends.items() if end is not None})

    def _check(self, name: str, info: TensorInfo) -> int | None:
        """Where a tensor ends in its file; None, and a note, for one that cannot be read."""
        if info.kind not in GGML_QUANT_SIZES:
            self.broken.append(f"{name} in {self._file(info)} has the unknown type {info.kind}")
            return None
        if not is_readable(info.kind):
            kind = GGMLQuantizationType(info.kind).name
            self.broken.append(
                f"{name} in {self._file(info)} has the type {kind}, which is not read: convert "
                "the model to F16, BF16 or Q8_0"
            )
            return None
        end = info.offset + int(np.prod(info.shape[:-1])) * row_bytes(info.shape[-1], info.kind)
        size = len(self._data[info.file])
        if end > size:
            file = self._file(info)
            self.broken.append(f"{file} is truncated: {name} ends at byte {end} of {size}")
        return end

    def _check_places(self, ends: Mapping[str, int]) -> None:
        """Note tensors that begin within another one of their file."""
        infos = self._header.tensors
        in_order = sorted(ends, key=lambda name: (str(infos[name].file), infos[name].offset))
        for before, name in pairwise(in_order):
            info = infos[name]
            if infos[before].file == info.file and info.offset < ends[before]:
                self.broken.append(
                    f"{self._file(info)}: {name} begins at byte {info.offset}, within {before}, "
                    f"which ends at byte {ends[before]}"
                )

    def _file(self, info: TensorInfo) -> Path:
        """The user's own file that holds a tensor."""
        return info.file.readlink() if self._is_linked else info.file

    def name_in_file(self, name: str) -> str:
        """The checkpoint's name, and GGUF's after it."""
        own = gguf_name(name, self._own_names)
        return name if own == name else f"{name} ({own} in the file)"

    def dtype(self) -> torch.dtype:
        """The matrices' own float type; bfloat16 where any is quantized."""
        return float_dtype(self._header)

    def stored(self, name: str) -> torch.dtype:
        """The dtype of dequantized values."""
        del name  # the gguf library's is one for all
        return torch.float32

    def block_kind(self, name: str) -> str | None:
        """The name of a quantized type; None: a tensor in floats, or one that is not there.

        Also None for an unknown type, which `broken` names.
        """
        info = self._tensors.get(name)
        if info is None or info.kind not in GGML_QUANT_SIZES:
            return None
        kind = GGMLQuantizationType(info.kind)
        return None if kind in FLOAT_DTYPES else kind.name

    def blocks(self, name: str, rows: range, columns: range) -> torch.Tensor:
        """Rows of blocks where they lie in the mapped file, uint8 [n, bytes]."""
        info = self._tensors[name]
        first, last = (row_bytes(bound, info.kind) for bound in (columns.start, columns.stop))
        return torch.from_numpy(self._rows(info)[rows.start : rows.stop, first:last])

    def row_index(self, name: str, rows: range) -> torch.Tensor | None:
        """Which of these rows is the checkpoint's i-th one; None: they are in order.

        Rows that change places are those of one head, and a range of rows has whole heads.
        """
        if not self._is_permuted(name):
            return None
        order = self._row_order(name, self.shapes[name][0])[rows.start : rows.stop]
        return torch.from_numpy(order - rows.start)

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`, dequantized and converted."""
        info = self._tensors[name]
        stop = start + target.shape[dim]
        rows = self._rows(info)  # [N, bytes of a row]
        order = self._row_order(name, len(rows))
        order, columns = (
            (order[start:stop], slice(None)) if dim == 0 else (order, slice(start, stop))
        )
        target = target if target.ndim == 2 else target[:, None]  # [N, K]
        if info.kind == GGMLQuantizationType.MXFP4:
            target.copy_(mxfp4_values(rows[order], target.device)[:, columns])
            return
        step = max(1, CHUNK_ELEMENTS // max(target.shape[1], 1))
        for first in range(0, len(order), step):
            chunk = rows[order[first : first + step]]
            values = dequantize(chunk, GGMLQuantizationType(info.kind))  # [step, K] fp32
            if name.endswith("norm.weight"):  # llama.cpp's converter added it
                values = values - np.float32(self._row.norm_kind.offset)
            target[first : first + step].copy_(torch.from_numpy(values)[:, columns])

    def _rows(self, info: TensorInfo) -> np.ndarray:
        """A tensor's bytes, [N, bytes of a row]; a vector is N rows of one."""
        count, width = info.shape if len(info.shape) == 2 else (info.shape[0], 1)
        size = row_bytes(width, info.kind)
        data: np.ndarray = self._data[info.file][info.offset : info.offset + count * size]
        return data.reshape(count, size)

    def _is_permuted(self, name: str) -> bool:
        """Whether the file's rows are in another order."""
        return self._row.gguf_rotates_neighbours and name.split(".")[-2] in {"q_proj", "k_proj"}

    def _row_order(self, name: str, num_rows: int) -> np.ndarray:
        """Which of the file's rows is the checkpoint's i-th row."""
        order = np.arange(num_rows)
        if not self._is_permuted(name):
            return order
        projection = name.split(".")[-2]
        sizes = Section(self._header, self._header.architecture)
        heads = sizes.size("attention.head_count")
        if projection == "k_proj":
            heads = sizes.size("attention.head_count_kv", heads)
        # llama.cpp rotates neighbours, so its rows are 0, D/2, 1, D/2 + 1, … of each head.
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def mxfp4_values(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Values of a matrix in blocks of a factor and 16 bytes, which have halves of 16 values.

    It is dequantized whole, on the device, as these are the matrices of one expert each.

    Args:
        rows: [N, 17 G] uint8.
        device: of the result.

    Returns:
        [N, 32 G] bf16.
    """
    blocks = torch.from_numpy(rows).to(device).reshape(len(rows), -1, MXFP4_BYTES)  # [N, G, 17]
    return mxfp4.values_of_bytes(blocks[..., 1:], blocks[..., 0]).mT.flatten(1)


def names_of(row: Architecture) -> dict[str, str]:
    """The names of an architecture's layers in GGUF files, and in checkpoints."""
    norms = row.norms
    named = {
        "attn_norm": norms.before_attention,
        "post_attention_norm": norms.after_attention,
        "ffn_norm": norms.before_mlp,
        "post_ffw_norm": norms.after_mlp,
    }
    heads = HEAD_NORMS if row.qk_norm else {}
    mlp = expert_names(row.gguf_experts) if row.gguf_experts else MLP
    if row.fused.gate_up:
        mlp = {"ffn_up": "mlp.gate_up_proj", "ffn_down": MLP["ffn_down"]}
    usual = NAMES
    if row.fused.qkv:
        usual = {own: name for own, name in NAMES.items() if own not in QKV}
        usual["attn_qkv"] = "self_attn.qkv_proj"
    usual = usual | mlp | heads | {own: name for own, name in named.items() if name is not None}
    others = row.gguf_layers
    return {own: name for own, name in usual.items() if name not in others.values()} | {**others}


def expert_names(names: ExpertNames) -> dict[str, str]:
    """The names of a router, and of the tensors [E, N, K] and biases [E, N] of all experts.

    In the checkpoint each expert has a tensor of its own, with its number in place of the star.
    """
    expert = f"{names.module}.experts.*"
    return {
        "ffn_gate_inp": f"{names.module}.{names.router}",
        "ffn_gate_exps": f"{expert}.{names.gate}",
        "ffn_up_exps": f"{expert}.{names.up}",
        "ffn_down_exps": f"{expert}.{names.down}",
    }


def by_expert(
    name: str, info: TensorInfo, names: Mapping[str, str]
) -> Iterator[tuple[str, TensorInfo]]:
    """The checkpoint's names of a tensor: one, or one for each expert of a stack."""
    own = checkpoint_name(name, names)
    if "*" not in own:
        yield own, info
        return
    if info.kind not in GGML_QUANT_SIZES or len(info.shape) != (2 if own.endswith("bias") else 3):
        yield name, info  # reported as a tensor that does not belong here
        return
    count, *shape = info.shape
    size = math.prod(shape[:-1]) * row_bytes(shape[-1], info.kind)
    for expert in range(count):
        part = replace(info, shape=tuple(shape), offset=info.offset + expert * size)
        yield own.replace("*", str(expert)), part


def checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names as is."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[2] not in names:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    own = names[match[2]]
    return f"{layer}{own}" if own in BARE else f"{layer}{own}.{match[3]}"


def gguf_name(name: str, own_names: Mapping[str, str]) -> str:
    """The inverse of `checkpoint_name`, or an expert's stack; unknown names as is."""
    of_stack = re.sub(r"\.experts\.\d+\.", ".experts.*.", name)
    if any(of_stack.endswith(f".{bare}") for bare in BARE):
        of_stack += ".weight"
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(\S+)\.(weight|bias)", of_stack)
    if not match or match[2] not in own_names:
        return name
    layer = f"blk.{match[1]}." if match[1] else ""
    return f"{layer}{own_names[match[2]]}.{match[3]}"


@cache
def is_readable(kind: int) -> bool:
    """Whether the gguf library has the arithmetic of a type."""
    try:
        block = np.zeros((1, row_bytes(1, kind)), np.uint8)
        dequantize(block, GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def row_bytes(width: int, kind: int) -> int:
    """Bytes of a row of `width` values; quantized rows are whole blocks."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return -(-width // block) * size


def float_dtype(header: Header) -> torch.dtype:
    """The matrices' own float type; bfloat16 where any is quantized or they differ.

    The router does not count: llama.cpp keeps it in fp32.
    """
    kinds = {
        info.kind
        for name, info in header.tensors.items()
        if len(info.shape) >= 2 and ".ffn_gate_inp." not in name
    }
    if len(kinds) == 1:
        return FLOAT_DTYPES.get(GGMLQuantizationType(kinds.pop()), torch.bfloat16)
    return torch.bfloat16
