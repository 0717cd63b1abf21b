"""A writer of AWQ and GPTQ checkpoints of random codes, a field at a time, as the formats define.

It is slow and plain on purpose: the values that it returns are computed from the codes alone.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

AWQ_SHIFTS = [4 * field for field in (0, 4, 1, 5, 2, 6, 3, 7)]


def signed(words: torch.Tensor) -> torch.Tensor:
    """int64 words of 32 bits -> int32."""
    return torch.where(words >= 2**31, words - 2**32, words).int()


def along(values: torch.Tensor, dim: int, shifts: list[int]) -> torch.Tensor:
    """Pack each len(shifts) values along a dimension into a word."""
    values = values.long().movedim(dim, -1).unflatten(-1, (-1, len(shifts)))
    words = torch.zeros(values.shape[:-1], dtype=torch.int64)
    for index, shift in enumerate(shifts):
        words |= values[..., index] << shift
    return signed(words).movedim(-1, dim).contiguous()


class Packer:
    """Random matrices of one format.

    Args:
        bits: of a code.
        group_size: columns per scale; -1: all.
        scheme: "awq", "gptq" or "gptq_v2".
        sym: the zero point is the middle.
        desc_act: groups of columns lie in a random order, alike in all matrices of K columns.
    """

    def __init__(self, scheme, bits=4, group_size=32, *, sym=False, desc_act=False):
        self.scheme, self.bits, self.group_size = scheme, bits, group_size
        self.sym, self.desc_act = sym, desc_act
        self.generator = torch.Generator().manual_seed(0)

    def matrix(self, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Tensors by the ends of their names, and the values [N, K] in fp32."""
        size = columns if self.group_size == -1 else self.group_size
        top, num_groups = 2**self.bits, columns // size
        draw = {"generator": self.generator}
        q = torch.randint(0, top, (columns, rows), **draw)
        z = torch.randint(0, top, (num_groups, rows), **draw)
        z = torch.full_like(z, top // 2) if self.sym else z
        s = (torch.rand(num_groups, rows, **draw) * 0.3 / top + 0.1 / top).half()
        groups = torch.arange(columns) // size
        if self.desc_act:
            order = torch.Generator().manual_seed(columns)
            groups = groups[torch.randperm(columns, generator=order)]
        values = (q - z[groups]).float() * s[groups].float()
        if self.scheme == "awq":
            packed = [along(each, 1, AWQ_SHIFTS) for each in (q, z)]
            return {"qweight": packed[0], "qzeros": packed[1], "scales": s}, values.T
        shifts = list(range(0, 32, self.bits))
        stored = (z - int(self.scheme == "gptq")) % top
        return {
            "qweight": along(q, 0, shifts),
            "qzeros": along(stored, 1, shifts),
            "scales": s,
            "g_idx": groups.int(),
        }, values.T

    def config(self) -> dict:
        """The quantization_config."""
        if self.scheme == "awq":
            fields = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
            return {"quant_method": "awq", "bits": 4, "group_size": self.group_size, **fields}
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.sym,
            "desc_act": self.desc_act,
            "checkpoint_format": self.scheme,
            "lm_head": False,
        }


def write_packed(folder: Path, source: Path, packers: dict, config: dict) -> dict:
    """Write a copy of a checkpoint of floats whose matrices are random codes.

    Args:
        folder: to be written.
        source: with config.json and model.safetensors in floats.
        packers: by the end of a module's name; the first that fits counts. None: floats.
        config: its quantization_config.

    Returns:
        The values [N, K] of each packed matrix, by its module.
    """
    folder.mkdir()
    fields = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    tensors, expected = load_file(source / "model.safetensors"), {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        packer = next((each for end, each in packers.items() if module.endswith(end)), None)
        if packer is not None:
            parts, expected[module] = packer.matrix(*tensors.pop(name).shape)
            tensors |= {f"{module}.{end}": part for end, part in parts.items()}
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    return expected
