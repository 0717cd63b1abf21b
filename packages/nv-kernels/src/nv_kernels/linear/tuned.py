"""The kernel that multiplies a few tokens by a weight, and its settings.

Owns a table measured on an H100 (benchmarks/kernels_step.py; 8B from 17 tokens on: an H200) and a
rule for other shapes. Results of the measurement: loads of weights must start before the wait for
the previous kernel (into registers at 1 and 2 tokens, by TMA into shared memory above); there
should be about as many programs as processors, in one wave; and only the time of a whole layer
shows which setting is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

PROCESSORS = 132  # of an H100: the settings below aim at one program per processor
SLAB_BYTES = 225_000  # shared memory that a slab program may use
GEMV_TOKENS = 2
SLAB_TOKENS = 64
DOT_TOKENS = 256


@dataclass(frozen=True)
class Gemv:
    """CUDA cores, whole rows of the weight in registers.

    Attributes:
        rows: weight rows per program.
        block_k: columns per load, 256 per warp: warps * 256 divides a row among all warps.
        warps: warps per program.
        registers: per thread, at most, with an adapter: as many as without, so that no fewer
            programs run at once. None: as the compiler likes.
    """

    rows: int
    block_k: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True)
class Direct:
    """One token of bf16 on Hopper, in place of a Gemv: weights from memory to the tensor cores.

    Attributes:
        warps: per program; each has its own columns.
        rows: weight rows per program, 8 or 16; 8 of gate and of up where gated.
        chains: products that do not wait for each other.
    """

    warps: int
    rows: int
    chains: int = 2


@dataclass(frozen=True)
class Slab:
    """Gluon: loads a program's whole weight slab by TMA before the wait, then runs wgmma.

    Attributes:
        block_m: tokens per program: 16, 32 or 64.
        split_k: programs along K; each stores fp32 partials.
        half: feature rows per program of gated products, 24 or 32.
        trigger: the time when the next kernel may start: 1 at once, 2 after the wait, 3 after the
            loop.
    """

    block_m: int
    split_k: int
    half: int = 32
    trigger: int = 1


@dataclass(frozen=True)
class Dot:
    """Triton's pipelined tensor-core loop.

    Attributes:
        block_m: tokens per program.
        block_n: weight rows per program.
        block_k: columns per iteration of the loop.
        split_k: programs along K; each stores partials.
        stages: stages of the software pipeline.
        swap: weight rows lie along the tensor core's long side.
        warps: warps per program.
        trigger: as for Slab; 0 without programmatic launch.
        prefetch: fetch the program's weights into L2 before the wait.
        narrow: store partials in the activations' dtype.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    stages: int
    swap: bool
    warps: int
    trigger: int = 2
    prefetch: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Many:
    """Gluon: a warp loads, and groups of four warps multiply 64 weight rows each.

    Attributes:
        piece: tokens per instruction, 32, 64 or 128.
        pieces: pieces per program; with 3 groups at most 256 tokens.
        groups: 2 or 3.
        split_k: programs along K; each stores partials.
        stages: chunks of 64 columns in flight in shared memory; at least a piece's tokens / 64
            for each piece.
        trigger: as for Slab.
        narrow: store partials in the activations' dtype.
    """

    piece: int
    pieces: int
    groups: int
    split_k: int
    stages: int
    trigger: int = 2
    narrow: bool = False

    @property
    def registers(self) -> int:
        """Registers per thread when a program starts: all of a processor's."""
        return 128 if self.groups == 3 else 168

    def group_registers(self, loading: int) -> int:
        """Registers per thread of a group, if a loading warp's thread has so many."""
        warps = 4 * (self.groups + 1)
        return (self.registers * warps - 4 * loading) // (4 * self.groups) // 8 * 8


@dataclass(frozen=True)
class Library:
    """The library's kernel (cuBLAS)."""


Form = Gemv | Slab | Dot | Many | Library
AnyForm = TypeVar("AnyForm", bound=Form)

# (least tokens, most tokens, weight rows, columns, gated): form
TUNED: dict[tuple[int, int, int, int, bool], Form] = {
    # Qwen3-0.6B: qkv, o, gate_up, down
    (1, 1, 4096, 1024, False): Gemv(2, 1024, 4),
    (1, 1, 1024, 2048, False): Gemv(4, 1024, 8),
    (1, 1, 6144, 1024, True): Gemv(32, 512, 16),
    (1, 1, 1024, 3072, False): Gemv(2, 2048, 8),
    (2, 2, 4096, 1024, False): Gemv(4, 512, 2),
    (2, 2, 1024, 2048, False): Gemv(4, 512, 2),
    (2, 2, 6144, 1024, True): Gemv(2, 512, 2),
    (2, 2, 1024, 3072, False): Gemv(1, 1024, 4),
    (3, 16, 4096, 1024, False): Dot(16, 64, 64, 2, 4, True, 4, prefetch=True),
    (3, 16, 1024, 2048, False): Slab(16, 8, trigger=2),
    (3, 16, 6144, 1024, True): Slab(16, 1, trigger=2),
    (3, 16, 1024, 3072, False): Slab(16, 8),
    (17, 32, 4096, 1024, False): Slab(32, 1),
    (17, 32, 1024, 2048, False): Slab(32, 4),
    (17, 32, 6144, 1024, True): Slab(32, 1, trigger=2),
    (17, 32, 1024, 3072, False): Slab(32, 6),
    (33, 64, 4096, 1024, False): Slab(64, 2, trigger=2),
    (33, 64, 1024, 2048, False): Slab(64, 4, trigger=2),
    (33, 64, 6144, 1024, True): Dot(64, 64, 128, 1, 4, False, 4),
    (33, 64, 1024, 3072, False): Slab(64, 6, trigger=2),
    (65, 256, 4096, 1024, False): Dot(128, 64, 128, 1, 3, False, 8),
    (65, 256, 1024, 2048, False): Dot(128, 64, 64, 4, 4, False, 8, narrow=True),
    (65, 256, 6144, 1024, True): Dot(128, 64, 64, 1, 4, False, 4, trigger=3),
    (65, 256, 1024, 3072, False): Dot(128, 64, 64, 4, 4, False, 8, narrow=True),
    # Qwen3-8B
    (1, 1, 6144, 4096, False): Gemv(4, 1024, 4),
    (1, 1, 4096, 4096, False): Gemv(1, 2048, 8),
    (1, 1, 24576, 4096, True): Gemv(1, 2048, 8, registers=48),
    (1, 1, 4096, 12288, False): Gemv(1, 2048, 8),
    (3, 16, 6144, 4096, False): Dot(16, 64, 128, 2, 3, True, 4, trigger=3),
    (3, 16, 4096, 4096, False): Dot(16, 64, 128, 4, 4, True, 4, trigger=1, prefetch=True),
    (3, 16, 24576, 4096, True): Dot(16, 64, 128, 1, 6, True, 4),
    (3, 16, 4096, 12288, False): Dot(16, 64, 128, 4, 3, True, 4, trigger=3),
    (17, 32, 6144, 4096, False): Many(32, 1, 2, 2, 8),
    (17, 32, 4096, 4096, False): Many(32, 1, 2, 4, 8, trigger=3),
    (17, 32, 24576, 4096, True): Many(32, 1, 3, 1, 7),
    (17, 32, 4096, 12288, False): Many(32, 1, 2, 4, 8, trigger=3),
    (33, 64, 6144, 4096, False): Many(64, 1, 2, 2, 8, narrow=True),
    (33, 64, 4096, 4096, False): Many(64, 1, 2, 4, 8, trigger=3, narrow=True),
    (33, 64, 24576, 4096, True): Many(64, 1, 3, 1, 7),
    (33, 64, 4096, 12288, False): Many(64, 1, 2, 4, 8, trigger=3, narrow=True),
    (65, 128, 6144, 4096, False): Many(128, 1, 2, 2, 7, narrow=True),
    (65, 128, 4096, 4096, False): Many(128, 1, 2, 4, 7, trigger=3, narrow=True),
    (65, 128, 24576, 4096, True): Many(128, 1, 3, 1, 5),
    (65, 128, 4096, 12288, False): Many(128, 1, 2, 4, 7, trigger=3, narrow=True),
    (129, 192, 6144, 4096, False): Many(64, 3, 2, 2, 5, narrow=True),
    (129, 192, 4096, 4096, False): Many(64, 3, 2, 4, 5, trigger=3, narrow=True),
    (129, 192, 24576, 4096, True): Many(64, 3, 3, 1, 4),
    (129, 192, 4096, 12288, False): Many(64, 3, 2, 4, 5, trigger=3, narrow=True),
    (193, 256, 4096, 4096, False): Many(128, 1, 2, 2, 7, trigger=3, narrow=True),
    (193, 256, 24576, 4096, True): Many(128, 2, 3, 1, 4),
    (193, 256, 4096, 12288, False): Many(128, 1, 2, 2, 7, trigger=3, narrow=True),
    # Qwen3-30B-A3B
    (33, 64, 5120, 2048, False): Library(),
    (33, 64, 2048, 4096, False): Dot(64, 64, 128, 4, 4, False, 4),
    # LM head of 151,936 tokens, hidden 1024
    (1, 2, 151936, 1024, False): Gemv(4, 1024, 8),
    (3, 16, 151936, 1024, False): Dot(16, 128, 128, 1, 3, True, 8, trigger=3),
    (17, 64, 151936, 1024, False): Dot(64, 128, 64, 1, 5, True, 8, trigger=3),
}

# (weight rows, columns, gated): the form for one token, measured on an H200 in a whole step. With
# it for Qwen3-0.6B's down too, a step takes 566 microseconds in place of 541.
DIRECT: dict[tuple[int, int, bool], Direct] = {
    # Qwen3-0.6B: qkv, o, gate_up
    (4096, 1024, False): Direct(4, 16, chains=4),
    (1024, 2048, False): Direct(8, 8),
    (6144, 1024, True): Direct(4, 8),
}

# As TUNED, with adapters, measured on an H200. All programs should fit on the card at once, also
# those that multiply by the A of 32 adapters.
ADAPTED: dict[tuple[int, int, int, int, bool], Dot] = {
    # Qwen3-8B
    (17, 64, 6144, 4096, False): Dot(64, 64, 128, 2, 3, False, 4),
    (17, 64, 4096, 4096, False): Dot(64, 64, 64, 4, 4, False, 4),
    (17, 64, 24576, 4096, True): Dot(64, 64, 64, 1, 3, False, 4),
    (17, 64, 4096, 12288, False): Dot(64, 64, 64, 4, 4, False, 4),
}


@lru_cache(4096)  # a step without a graph asks for each product of each layer
def choose(num_tokens: int, rows: int, columns: int, gated: bool = False) -> Form:
    """Choose the form for a product of [num_tokens, columns] by [rows, columns].

    Args:
        num_tokens: T.
        rows: N of the weight, gate and up together where gated.
        columns: K.
        gated: the product ends in silu(gate) * up.

    Returns:
        The measured form, or by rule: GEMV up to 2 tokens, Slab up to 64 if the shape divides.
    """
    measured = _measured(TUNED, num_tokens, rows, columns, gated)
    if measured is not None:
        return measured
    if num_tokens <= GEMV_TOKENS:
        return _gemv(rows // 2 if gated else rows, columns, gated)
    if num_tokens <= SLAB_TOKENS:
        return _slab(num_tokens, rows, columns, gated)
    return Library()


@lru_cache(4096)
def choose_adapted(num_tokens: int, rows: int, columns: int, gated: bool = False) -> Dot | None:
    """Choose the form of a kernel that multiplies by the weight and by the adapters.

    Args:
        num_tokens: T; one or two take this form only where `Gemv` does not fit.
        rows: N of the weight, gate and up together where gated.
        columns: K.
        gated: the product ends in silu(gate) * up.

    Returns:
        The measured form; else the product's own form, if it is a Dot; else a Dot by rule. None,
        from 65 tokens on or if the shape does not divide: adapters need launches of their own.
    """
    if num_tokens > SLAB_TOKENS:
        return None
    measured = _measured(ADAPTED, num_tokens, rows, columns, gated)
    if measured is not None:
        return measured
    alone = choose(num_tokens, rows, columns, gated)
    if isinstance(alone, Dot):
        return alone
    if rows % 64 or columns % 64:
        return None
    block_m = _height(num_tokens)
    splits = [1] if gated else [n for n in (1, 2, 4, 8) if columns // 64 % n == 0]
    split_k = min(splits, key=lambda n: abs(rows // 64 * n - 2 * PROCESSORS))
    return Dot(block_m, 64, 64, split_k, 3, swap=block_m < 64, warps=4)


def _measured(
    table: Mapping[tuple[int, int, int, int, bool], AnyForm],
    num_tokens: int,
    rows: int,
    columns: int,
    gated: bool,
) -> AnyForm | None:
    """Look up a form; None: this shape was not measured at this number of tokens."""
    for (least, most, *shape), form in table.items():
        if least <= num_tokens <= most and shape == [rows, columns, gated]:
            return form
    return None


def _height(num_tokens: int) -> int:
    """Tokens per program, for at most 64: the least height that holds all of them."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def _gemv(outputs: int, columns: int, gated: bool) -> Form:
    """Choose for two or more programs per processor, and at most 64 weight registers per thread."""
    warps = 4 if columns <= 4096 else 8
    rows = 8
    per_thread = columns * (2 if gated else 1) // (warps * 64)  # registers per row
    while rows > 1 and (rows * per_thread > 64 or outputs < rows * 2 * PROCESSORS):
        rows //= 2
    return Gemv(rows, warps * 256, warps) if per_thread <= 96 else Library()


def _slab(num_tokens: int, rows: int, columns: int, gated: bool) -> Form:
    """Choose for as many programs as processors, with slabs that fit shared memory."""
    if rows % 64 or columns % 64:
        return Library()
    block_m = _height(num_tokens)
    tiles = rows // 64
    splits = [n for n in range(1, columns // 64 + 1) if (columns // 64) % n == 0 and n <= 16]
    if gated:
        splits = [1]
    fitting = [n for n in splits if (64 + block_m) * 2 * columns // n <= SLAB_BYTES]
    if not fitting:
        return Library()
    return Slab(block_m, min(fitting, key=lambda n: abs(tiles * n - PROCESSORS)))
