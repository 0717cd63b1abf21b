"""The kernel that multiplies tokens by a quantized weight on a card, and its settings.

Owns a table measured on an H200 (benchmarks/quantized_linear.py) and a rule for other shapes, as
`nv_kernels.linear.tuned` does for floats. A product of few tokens should have about three programs
per processor, all in flight at once: an empty third is a third of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nv_kernels.linear.tuned import PROCESSORS, Library

CHUNK = 128  # columns of a step of the kernels
PROGRAMS = 3 * PROCESSORS
FEW_TOKENS = 64
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


Form = Tile | Ring | Library

# (record, least tokens, most tokens, weight rows, columns, gated): form
TUNED: dict[tuple[str, int, int, int, int, bool], Form] = {
    # Qwen3-8B, 4 bits: qkv, o, gate_up, down
    ("4 bits", 1, 8, 6144, 4096, False): Ring(8, 4, 4, 8),
    ("4 bits", 1, 8, 4096, 4096, False): Ring(8, 8, 4, 4),
    ("4 bits", 1, 8, 24576, 4096, True): Ring(8, 1, 4, 4, trigger=3),
    ("4 bits", 1, 8, 4096, 12288, False): Ring(8, 8, 4, 4),
    ("4 bits", 9, 16, 6144, 4096, False): Ring(16, 4, 4, 4),
    ("4 bits", 9, 16, 4096, 4096, False): Ring(16, 8, 4, 4),
    ("4 bits", 9, 16, 24576, 4096, True): Ring(16, 1, 4, 4),
    ("4 bits", 9, 16, 4096, 12288, False): Ring(16, 6, 4, 4),
    ("4 bits", 17, 32, 6144, 4096, False): Ring(32, 4, 3, 2),
    ("4 bits", 17, 32, 4096, 4096, False): Ring(32, 4, 4, 4),
    ("4 bits", 17, 32, 24576, 4096, True): Ring(32, 1, 3, 2),
    ("4 bits", 17, 32, 4096, 12288, False): Ring(32, 4, 4, 4),
    ("4 bits", 33, 64, 6144, 4096, False): Ring(64, 4, 3, 2),
    ("4 bits", 33, 64, 4096, 4096, False): Ring(64, 4, 4, 4),
    ("4 bits", 33, 64, 24576, 4096, True): Ring(64, 1, 3, 2),
    ("4 bits", 33, 64, 4096, 12288, False): Ring(64, 4, 4, 4),
    ("4 bits", 65, 1000, 6144, 4096, False): Library(),
    ("4 bits", 65, 1000, 4096, 4096, False): Tile(128, 128, 4, 3, 8),
    ("4 bits", 65, 1000, 24576, 4096, True): Tile(128, 128, 1, 3, 8),
    ("4 bits", 65, 1000, 4096, 12288, False): Library(),
    # Qwen3-8B, e4m3 (and to 64 tokens int8): qkv, o, gate_up, down
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
    ("fp8", 33, 64, 4096, 4096, False): Ring(64, 4, 6),
    ("fp8", 33, 64, 24576, 4096, True): Ring(64, 1, 4),
    ("fp8", 33, 64, 4096, 12288, False): Ring(64, 4, 6),
    ("fp8", 65, 1000, 4096, 4096, False): Tile(128, 128, 2, 4, 8, swap=False),
    ("fp8", 65, 1000, 4096, 12288, False): Tile(128, 128, 2, 4, 8, swap=False),
    # Qwen3-8B, int8: qkv, o, gate_up, down
    ("int8", 65, 1000, 6144, 4096, False): Tile(128, 128, 1, 4, 8, swap=False),
    ("int8", 65, 1000, 4096, 4096, False): Tile(128, 64, 1, 5, 4, swap=False),
    ("int8", 65, 1000, 24576, 4096, True): Tile(128, 128, 1, 3, 8, swap=False),
    ("int8", 65, 1000, 4096, 12288, False): Tile(128, 128, 2, 4, 8, swap=False),
}
INVARIANT = Tile(64, 128, 8, 3, 4)  # split_k is the most: few columns are split less
INVARIANT_COLUMNS = 512  # least columns of a part


def choose(record: str, num_tokens: int, rows: int, columns: int, gated: bool = False) -> Form:
    """Choose the form for a product of [num_tokens, columns] by [rows, columns].

    Args:
        record: "4 bits", "8 bits" (weight-only), "fp8", "fp8 blocks" or "int8".
        num_tokens: T.
        rows: N of the weight, gate and up together where gated.
        columns: K.
        gated: the product ends in silu(gate) * up.

    Returns:
        The measured form, or one by rule: Ring up to 64 tokens, then Tile, then Library.
    """
    few = num_tokens <= FEW_TOKENS
    if few and record in ("fp8 blocks", "int8"):
        record = "fp8"  # the bytes decide
    for (name, least, most, *shape), form in TUNED.items():
        if name == record and least <= num_tokens <= most and shape == [rows, columns, gated]:
            return form
    if not few:
        return many_tokens(record, num_tokens, rows, gated)
    block_m = next(size for size in (8, 16, 32, 64) if size >= num_tokens)
    stages = 6 if block_m < FEW_TOKENS and record == "fp8" else 4
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
    if isinstance(form, Ring):
        return Tile(max(16, form.block_m), 64, form.split_k, 4, 4)
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
