"""The kernel that multiplies tokens by a quantized weight on a card, and its settings.

Owns a table measured on an H200 (benchmarks/quantized_linear.py) and a rule for other shapes, as
`nv_kernels.linear.tuned` does for floats. A product of few tokens should have about three programs
per processor, all in flight at once: an empty third is a third of the time. From 17 tokens on one
program per processor can be faster, whose groups of warps share the tokens that it loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from nv_kernels.linear.tuned import PROCESSORS, Library

CHUNK = 128  # columns of a step of the kernels
PROGRAMS = 3 * PROCESSORS
FEW_TOKENS = 64
LOADING = 40  # registers per thread of a warp that only loads
TILE_TOKENS = 1000  # above it, writing the whole matrix costs less than a tenth of its product


@dataclass(frozen=True)
class Tile:
    """Triton's pipelined tensor-core loop, for every card and number of tokens.

    Attributes:
        block_m: tokens per program.
        block_n: weight rows per program.
        split_k: programs along K; each stores partials.
        stages: stages of the software pipeline.
        warps: warps per program.
        swap: weight rows lie along the tensor core's long side; weight-only products always swap.
        trigger: the time when the next kernel may start: 1 at once, 2 after the wait, 3 after the
            loop.
        prefetch: fetch the program's codes into L2 before the wait.
        band: tiles of tokens that use the same weight rows at the same time.
    """

    block_m: int
    block_n: int
    split_k: int
    stages: int
    warps: int
    swap: bool = True
    trigger: int = 2
    prefetch: bool = False
    band: int = 8


@dataclass(frozen=True)
class Ring:
    """Gluon: weights in flight before the wait, kept so through the whole loop.

    Attributes:
        block_m: tokens per program: 8, 16, 32 or 64.
        split_k: programs along K; each stores fp32 partials.
        stages: chunks of x in flight, and of the weight where it passes through shared memory.
        depth: chunks of the weight in registers (4 bits).
        rows: weight rows per program, 64 or 128 (8 bits).
        trigger: as for Tile.
    """

    block_m: int
    split_k: int
    stages: int = 4
    depth: int = 4
    rows: int = 64
    trigger: int = 2


@dataclass(frozen=True)
class Warps:
    """Gluon, 4 bits, one token: each warp has its own columns and all rows of the program.

    Attributes:
        groups: groups of rows per program, one after the other.
        units: units of 16 rows per group; 2 (gate and up) where gated.
        chunks: chunks of 128 columns per step.
        depth: steps in registers; it divides the steps of a group, or they divide it.
        warps: warps per program, 4 or 8.
        split_k: programs along K; each stores fp32 partials.
        trigger: as for Tile.
    """

    groups: int
    units: int
    chunks: int
    depth: int
    warps: int = 4
    split_k: int = 1
    trigger: int = 2

    @property
    def registers(self) -> int | None:
        """The most per thread with zero points: three programs should run at once, if they can."""
        few = self.warps == 4 and self.units * self.chunks * self.depth <= 8
        return 168 if few else None


@dataclass(frozen=True)
class Groups:
    """Gluon: a warp loads, and groups of four warps multiply 64 weight rows each.

    Attributes:
        block_m: tokens per program: 8 to 128, a power of 2.
        groups: 2 or 3.
        split_k: programs along K; each stores fp32 partials.
        stages: chunks in flight in shared memory.
        depth: chunks of the weight in registers (4 bits).
        trigger: as for Tile.
        registers: per thread; fewer let the next kernel's programs start beside these.
        turns: the groups multiply in turn, so that others unpack meanwhile (4 bits).
    """

    block_m: int
    groups: int
    split_k: int
    stages: int = 4
    depth: int = 2
    trigger: int = 2
    registers: int = 0
    turns: bool = False

    def __post_init__(self) -> None:
        """Take all registers of a processor by default."""
        if not self.registers:
            object.__setattr__(self, "registers", 128 if self.groups == 3 else 168)

    @property
    def group_registers(self) -> int:
        """Registers per thread of a group that multiplies; the loading warp leaves them its own."""
        warps = 4 * (self.groups + 1)
        return (self.registers * warps - 4 * LOADING) // (4 * self.groups) // 8 * 8


GluonForm = Ring | Warps | Groups
Form = Tile | GluonForm | Library

# (record, least tokens, most tokens, weight rows, columns, gated): form
TUNED: dict[tuple[str, int, int, int, int, bool], Form] = {
    # Qwen3-8B, 4 bits: qkv, o, gate_up, down
    ("4 bits", 1, 1, 6144, 4096, False): Warps(1, 1, 4, 2),
    ("4 bits", 1, 1, 4096, 4096, False): Warps(1, 2, 2, 2, 8),
    ("4 bits", 1, 1, 24576, 4096, True): Warps(2, 2, 2, 2, trigger=1),
    ("4 bits", 1, 1, 4096, 12288, False): Warps(1, 2, 2, 2, split_k=6),
    ("4 bits", 2, 8, 6144, 4096, False): Ring(8, 4, 4, 8),
    ("4 bits", 2, 8, 4096, 4096, False): Ring(8, 8, 4, 4),
    ("4 bits", 2, 8, 24576, 4096, True): Ring(8, 1, 4, 4, trigger=3),
    ("4 bits", 2, 8, 4096, 12288, False): Ring(8, 8, 4, 4),
    ("4 bits", 9, 16, 6144, 4096, False): Ring(16, 4, 4, 4),
    ("4 bits", 9, 16, 4096, 4096, False): Ring(16, 8, 4, 4),
    ("4 bits", 9, 16, 24576, 4096, True): Ring(16, 1, 4, 4),
    ("4 bits", 9, 16, 4096, 12288, False): Ring(16, 6, 4, 4),
    ("4 bits", 17, 32, 6144, 4096, False): Ring(32, 4, 3, 2),
    ("4 bits", 17, 32, 4096, 4096, False): Ring(32, 4, 4, 4),
    ("4 bits", 17, 32, 24576, 4096, True): Groups(32, 3, 1, 4, 4),
    ("4 bits", 17, 32, 4096, 12288, False): Groups(32, 2, 8, 4, 3, registers=80),
    ("4 bits", 33, 64, 6144, 4096, False): Ring(64, 4, 3, 2),
    ("4 bits", 33, 64, 4096, 4096, False): Ring(64, 4, 4, 4),
    ("4 bits", 33, 64, 24576, 4096, True): Groups(64, 3, 1, 4, 2, registers=112),
    ("4 bits", 33, 64, 4096, 12288, False): Ring(64, 4, 4, 4),
    ("4 bits", 65, 1000, 6144, 4096, False): Groups(128, 3, 2, 5, 2),
    ("4 bits", 65, 1000, 4096, 4096, False): Groups(128, 2, 2, 5, 4),
    ("4 bits", 65, 1000, 24576, 4096, True): Groups(128, 3, 1, 4, 1, turns=True),
    ("4 bits", 65, 1000, 4096, 12288, False): Groups(128, 2, 2, 5, 4),
    # Qwen3-8B, e4m3 (and to 64 tokens scales of blocks and int8): qkv, o, gate_up, down
    ("fp8", 1, 8, 6144, 4096, False): Ring(8, 4, 6),
    ("fp8", 1, 8, 4096, 4096, False): Ring(8, 8, 6),
    ("fp8", 1, 8, 24576, 4096, True): Ring(8, 1, 6, trigger=3),
    ("fp8", 1, 8, 4096, 12288, False): Ring(8, 8, 6),
    ("fp8", 9, 16, 6144, 4096, False): Ring(16, 4, 6),
    ("fp8", 9, 16, 4096, 4096, False): Ring(16, 4, 6),
    ("fp8", 9, 16, 24576, 4096, True): Ring(16, 1, 6),
    ("fp8", 9, 16, 4096, 12288, False): Ring(16, 6, 6),
    ("fp8", 17, 32, 6144, 4096, False): Ring(32, 2, 6),
    ("fp8", 17, 32, 4096, 4096, False): Ring(32, 4, 6),
    ("fp8", 17, 32, 24576, 4096, True): Ring(32, 1, 4),
    ("fp8", 17, 32, 4096, 12288, False): Ring(32, 4, 6),
    ("fp8", 33, 64, 6144, 4096, False): Ring(64, 2, 6),
    ("fp8", 33, 64, 4096, 4096, False): Groups(64, 2, 4, 6, registers=112),
    ("fp8", 33, 64, 24576, 4096, True): Groups(64, 3, 1, 4),
    ("fp8", 33, 64, 4096, 12288, False): Ring(64, 4, 6),
    ("fp8", 65, 128, 6144, 4096, False): Groups(128, 2, 2, 5),
    ("fp8", 65, 128, 4096, 4096, False): Groups(128, 2, 4, 5),
    ("fp8", 65, 128, 4096, 12288, False): Groups(128, 2, 4, 5),
    ("fp8", 129, 192, 6144, 4096, False): Groups(64, 3, 1, 6),
    ("fp8", 129, 192, 4096, 4096, False): Groups(64, 2, 1, 6),
    ("fp8", 129, 192, 24576, 4096, True): Groups(64, 3, 1, 5, registers=112),
    ("fp8", 193, 256, 4096, 4096, False): Groups(128, 2, 2, 5),
    ("fp8", 257, 1000, 4096, 4096, False): Groups(64, 2, 1, 6),
    ("fp8", 129, 1000, 4096, 12288, False): Groups(128, 2, 2, 5),
    # Qwen3-8B, e4m3 with scales of blocks: qkv, o, gate_up, down
    ("fp8 blocks", 33, 64, 6144, 4096, False): Groups(64, 3, 4, 6, registers=112),
    ("fp8 blocks", 33, 64, 4096, 4096, False): Groups(64, 2, 4, 6, registers=112),
    ("fp8 blocks", 33, 64, 24576, 4096, True): Groups(64, 3, 1, 5, registers=112),
    ("fp8 blocks", 33, 64, 4096, 12288, False): Groups(64, 2, 4, 8, registers=112),
    ("fp8 blocks", 65, 256, 4096, 4096, False): Groups(128, 2, 2, 5),
    ("fp8 blocks", 65, 256, 4096, 12288, False): Groups(128, 2, 2, 5),
    # Qwen3-8B, int8: qkv, o, gate_up, down
    ("int8", 33, 64, 4096, 4096, False): Ring(64, 4, 6),
    ("int8", 33, 64, 24576, 4096, True): Groups(64, 3, 1, 5),
    ("int8", 65, 1000, 6144, 4096, False): Groups(64, 3, 1, 6),
    ("int8", 65, 1000, 4096, 4096, False): Groups(64, 2, 1, 6),
    ("int8", 65, 1000, 24576, 4096, True): Tile(128, 128, 1, 3, 8, swap=False),
    ("int8", 65, 1000, 4096, 12288, False): Groups(128, 2, 2, 5),
}
INVARIANT = Tile(64, 128, 8, 3, 4)  # split_k is the most: few columns are split less
INVARIANT_COLUMNS = 512  # least columns of a part


@lru_cache(4096)  # a step without a graph asks for each product of each layer
def choose(record: str, num_tokens: int, rows: int, columns: int, gated: bool = False) -> Form:
    """Choose the form for a product of [num_tokens, columns] by [rows, columns].

    Args:
        record: "4 bits", "8 bits" (weight-only), "fp8", "fp8 blocks" or "int8".
        num_tokens: T.
        rows: N of the weight, gate and up together where gated.
        columns: K.
        gated: the product ends in silu(gate) * up.

    Returns:
        The measured form, or one by rule.
    """
    few = num_tokens <= FEW_TOKENS
    is_like_fp8 = few and record in ("fp8 blocks", "int8")  # the bytes decide, mostly
    for name in (record, "fp8") if is_like_fp8 else (record,):
        for (tuned, least, most, *shape), form in TUNED.items():
            if tuned == name and least <= num_tokens <= most and shape == [rows, columns, gated]:
                return form
    return by_rule(record, num_tokens, rows, columns, gated)


def by_rule(record: str, num_tokens: int, rows: int, columns: int, gated: bool) -> Form:
    """Choose without the table: Ring up to 64 tokens, then Tile, then Library.

    Never Warps or Groups: they were run with the shapes and codes of the table only.

    Args:
        record: as for `choose`.
        num_tokens: T.
        rows: N.
        columns: K.
        gated: as for `choose`.
    """
    if num_tokens > FEW_TOKENS:
        return many_tokens(record, num_tokens, rows, gated)
    block_m = next(size for size in (8, 16, 32, 64) if size >= num_tokens)
    is_like_fp8 = record in ("fp8", "fp8 blocks", "int8")
    stages = 6 if block_m < FEW_TOKENS and is_like_fp8 else 4
    return Ring(block_m, 1 if gated else _splits(rows, columns), stages)


def many_tokens(record: str, num_tokens: int, rows: int, gated: bool) -> Form:
    """Choose by rule for more than 64 tokens.

    Args:
        record: as for `choose`.
        num_tokens: T.
        rows: N.
        gated: as for `choose`.
    """
    if record in ("fp8", "fp8 blocks"):
        return Library()
    if record == "int8":
        return Tile(128, 128, 1, 3, 8, swap=False)
    if num_tokens > TILE_TOKENS:
        return Library()
    tiles = -(-num_tokens // 128) * -(-rows // 128)
    split_k = 1 if gated else max(1, min(4, 2 * PROCESSORS // tiles))
    return Tile(128, 128, split_k, 3, 8)


def tile_for(form: Form, num_tokens: int) -> Tile:
    """Return a form that every card and shape can run, in place of one that does not fit."""
    if num_tokens <= FEW_TOKENS and not isinstance(form, Library):
        size = next(size for size in (16, 32, 64) if size >= num_tokens)
        return Tile(size, 64, form.split_k, 4, 4)
    return Tile(128 if num_tokens > FEW_TOKENS else 64, 128, 1, 3, 8, swap=False)


def invariant_tile(rows: int, columns: int) -> Tile:
    """Choose by the weight's shape alone."""
    tile = INVARIANT
    wanted = PROCESSORS // -(-rows // tile.block_n)
    split_k = max(1, min(wanted, columns // INVARIANT_COLUMNS, tile.split_k))
    return replace(tile, split_k=split_k)


def _splits(rows: int, columns: int) -> int:
    """Choose the most parts of whole chunks that keep every program in flight."""
    tiles = -(-rows // 64)
    chunks = columns // CHUNK
    fitting = [n for n in range(1, 17) if chunks % n == 0 and chunks // n >= 4]
    return max((n for n in fitting if tiles * n <= PROGRAMS), default=1)
