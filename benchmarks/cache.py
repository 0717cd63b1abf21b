"""nv-cache on one core: blocks matched per second, and the time of a step by the pool's size.

Matching is timed on prompts whose full blocks all hit, hashing and pinning included; freeing is
timed apart. A step consists of a scheduler's calls for 64 running sequences: one `extend` and one
`publish` each, one sequence freed and a new one matched, in a pool full of cached blocks. Figures
are the best of several rounds, because other work on the machine can only add time.
"""

import argparse
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from nv_cache import BlockManager
from report import report

BLOCK = 256
VOCAB = 151936


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prompts_of(num_prompts: int, num_blocks: int) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(VOCAB), k=num_blocks * BLOCK + 1) for _ in range(num_prompts)]


def fill(blocks: BlockManager, prompts: Sequence[Sequence[int]]) -> None:
    """Compute every prompt once, so that all its full blocks are cached and free."""
    for tokens in prompts:
        table = blocks.match(tokens)
        assert blocks.extend(table, len(tokens) - table.num_tokens)
        blocks.publish(table, tokens, len(tokens) - 1)
        blocks.free(table)


def match_rates(rounds: int, num_prompts: int = 64, num_blocks: int = 32) -> dict[str, int]:
    """Blocks per second, by the container of the tokens."""
    lists = prompts_of(num_prompts, num_blocks)
    blocks = BlockManager(num_prompts * (num_blocks + 1), BLOCK)
    fill(blocks, lists)
    total = num_prompts * num_blocks
    chains = [blocks.match(tokens).chain for tokens in lists]
    blocks = BlockManager(num_prompts * (num_blocks + 1), BLOCK)
    fill(blocks, lists)
    forms: dict[str, list[Any]] = {
        "list": lists,
        "array": [array("I", tokens) for tokens in lists],
        "memoryview": [memoryview(array("I", tokens)) for tokens in lists],
    }
    best = dict.fromkeys([*forms, "hashed before", "free"], float("inf"))
    for _ in range(rounds):
        for name, prompts in [*forms.items(), ("hashed before", lists)]:
            memory = chains if name == "hashed before" else [None] * num_prompts
            pairs = list(zip(prompts, memory, strict=True))
            start = time.perf_counter()
            tables = [blocks.match(tokens, chain=chain) for tokens, chain in pairs]
            best[name] = min(best[name], time.perf_counter() - start)
            assert all(table.num_cached == num_blocks * BLOCK for table in tables)
            took = seconds(lambda tables=tables: [blocks.free(table) for table in tables])
            best["free"] = min(best["free"], took)
    return {name: round(total / took) for name, took in best.items()}


def publish_rate(rounds: int, num_prompts: int = 16, num_blocks: int = 32) -> int:
    """Blocks per second that miss, get room (evicting others), are published and freed."""
    prompts = prompts_of(2 * num_prompts, num_blocks)
    blocks = BlockManager(num_prompts * (num_blocks + 1), BLOCK)
    fill(blocks, prompts)
    took = min(seconds(lambda: fill(blocks, prompts)) for _ in range(rounds))
    return round(len(prompts) * num_blocks / took)


def packing_rates(rounds: int, num_blocks: int = 512) -> dict[str, int]:
    """Blocks per second at which a list is packed, which is most of the time of matching it."""
    tokens = prompts_of(1, num_blocks)[0][:-1]
    layout = struct.Struct(f"{len(tokens)}I")

    def fromlist() -> None:
        array("I").fromlist(tokens)

    ways: dict[str, Callable[[], object]] = {
        "array('I').fromlist": fromlist,
        "array('I', list)": lambda: array("I", tokens),
        "struct.pack": lambda: layout.pack(*tokens),
    }
    best = {name: min(seconds(way) for _ in range(5 * rounds)) for name, way in ways.items()}
    return {name: round(num_blocks / took) for name, took in best.items()}


class Load:
    """64 sequences of 64 prompt tokens and up to 64 generated ones, in blocks of 16."""

    def __init__(self, num_blocks: int) -> None:
        self.rng = random.Random(0)
        self.blocks = BlockManager(num_blocks, 16)
        for _ in range(num_blocks // 200):  # 249 blocks each: the whole pool, and some blocks twice
            fill(self.blocks, [array("I", self.rng.randbytes(4 * 16 * 250))])
        self.running = [self.start() for _ in range(64)]

    def start(self) -> tuple[Any, list[int]]:
        """A prompt whose first half all prompts share."""
        tokens = [*range(32), *(self.rng.randrange(VOCAB) for _ in range(32))]
        table = self.blocks.match(tokens)
        assert self.blocks.extend(table, len(tokens) - table.num_tokens)
        return table, tokens

    def step(self) -> None:
        blocks = self.blocks
        for table, tokens in self.running:
            assert blocks.extend(table, 1)
            tokens.append(len(tokens))
            blocks.publish(table, tokens, len(tokens))
        table, _ = self.running.pop(0)
        blocks.free(table)
        self.running.append(self.start())


def step_costs(rounds: int, sizes: Sequence[int]) -> dict[str, float]:
    """Median microseconds per step, by the number of blocks in the pool; of the best round."""
    costs = {}
    for num_blocks in sizes:
        load = Load(num_blocks)
        medians = [statistics.median(seconds(load.step) for _ in range(300)) for _ in range(rounds)]
        costs[str(num_blocks)] = round(min(medians) * 1e6, 1)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--save", help="a file under benchmarks/results")
    args = parser.parse_args()
    figures = {
        "xxhash": metadata.version("xxhash"),
        "block_size": BLOCK,
        "matched_blocks_per_s": match_rates(args.rounds),
        "missed_published_freed_blocks_per_s": publish_rate(args.rounds),
        "packed_blocks_per_s": packing_rates(args.rounds),
        "step_us_by_pool_blocks": step_costs(args.rounds, args.sizes),
    }
    report("cache", figures, args.save)


if __name__ == "__main__":
    main()
