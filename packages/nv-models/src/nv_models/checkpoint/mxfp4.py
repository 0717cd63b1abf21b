"""MXFP4: matrices of 4-bit floats, of which 32 share a factor, as GPT-OSS's files have its experts.

Owns the format (OCP Microscaling Formats 1.0) and its two tensors. A matrix is dequantized when it
is copied, on the device of its target, so that never more than one is there twice.
"""

import torch

from nv_models.checkpoint import Checkpoint

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of a tensor's name: of the 4-bit values, and of the factors."""
BLOCK = 32
"""Values that share a factor; they lie in 16 bytes, the first of a byte in its low half."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
"""Of a factor's exponent."""


def is_packed(name: str) -> bool:
    """Whether a tensor of this name may be one of the two that hold bytes."""
    return name.endswith((BLOCKS, SCALES))


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of a matrix, in which a byte's two are neighbours.

    Args:
        blocks: [N, G, 16] uint8.
        scales: [N, G] uint8, exponents of 2.

    Returns:
        [N, 32 G] bf16.
    """
    return values_of_bytes(blocks, scales).flatten(1)


def values_of_bytes(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The two values of each byte, that of its low half first.

    Args:
        blocks: [N, G, 16] uint8.
        scales: [N, G] uint8, exponents of 2.

    Returns:
        [N, G, 16, 2] bf16, which holds them exactly.
    """
    values = torch.tensor((*POSITIVE, *(-each for each in POSITIVE)), dtype=torch.bfloat16)
    codes = torch.arange(256)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), 1).to(blocks.device)  # [256, 2]
    powers = torch.tensor([2.0 ** (code - BIAS) for code in range(256)], dtype=torch.bfloat16)
    factors = powers.to(scales.device)[scales.int()]  # [N, G]
    return pairs[blocks.int()] * factors[..., None, None]


class MXFP4Checkpoint:
    """A checkpoint in which each pair X_blocks, X_scales is one tensor X of floats.

    X is as the unquantized files have it: of blocks [E, N, G, 16] it is [E, 32 G, N].

    Args:
        files: that hold the pairs.
    """

    def __init__(self, files: Checkpoint) -> None:
        self.place, self.incomplete = files.place, files.incomplete
        self.broken = list(files.broken)
        self._files = files
        shapes = {name: shape for name, shape in files.shapes.items() if not is_packed(name)}
        names = {name[: -len(BLOCKS)] for name in files.shapes if is_packed(name)}
        self._packed = {name for name in sorted(names) if self._is_whole(name)}
        for name in self._packed:
            experts, rows, groups, _ = files.shapes[name + BLOCKS]
            shapes[name] = (experts, BLOCK * groups, rows)
        self.shapes = shapes

    def _is_whole(self, name: str) -> bool:
        """Whether both tensors are there and fit; notes it if not."""
        blocks, scales = (self._files.shapes.get(name + end) for end in (BLOCKS, SCALES))
        if blocks is None or scales is None:
            there, gone = (BLOCKS, SCALES) if scales is None else (SCALES, BLOCKS)
            self.broken.append(f"{name}{gone} is missing beside {name}{there}")
            return False
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or scales != blocks[:3]:
            self.broken.append(
                f"{name}{BLOCKS} has shape {list(blocks)} and {name}{SCALES} {list(scales)}: they "
                "must be [E, N, G, 16] and [E, N, G]"
            )
            return False
        return True

    def name_in_file(self, name: str) -> str:
        """The name of the values, if they are packed."""
        return self._files.name_in_file(name + BLOCKS if name in self._packed else name)

    def dtype(self) -> torch.dtype:
        """That of the tensors that are not packed."""
        return self._files.dtype()

    def stored(self, name: str) -> torch.dtype | None:
        """The dtype of the files, and of packed values bf16, which holds them exactly."""
        return torch.bfloat16 if name in self._packed else self._files.stored(name)

    def copy(self, name: str, dim: int, start: int, target: torch.Tensor) -> None:
        """Fill `target` with a slice of `name`, one expert's matrix after the other."""
        if name not in self._packed:
            self._files.copy(name, dim, start, target)
            return
        assert dim, "each rank has a part of every expert"
        _, rows, groups, _ = self._files.shapes[name + BLOCKS]
        blocks = torch.empty(1, rows, groups, BLOCK // 2, dtype=torch.uint8, device=target.device)
        scales = torch.empty(1, rows, groups, dtype=torch.uint8, device=target.device)
        for expert, matrix in enumerate(target):
            self._files.copy(name + BLOCKS, 0, expert, blocks)
            self._files.copy(name + SCALES, 0, expert, scales)
            values = dequantize(blocks[0], scales[0]).T  # [32 G, N]
            matrix.copy_(values.narrow(dim - 1, start, matrix.shape[dim - 1]))
