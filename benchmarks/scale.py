"""The tables of docs/scale.md: throughput against GPUs, nodes, model size and context, on paper.

Owns the tables (`--write` writes them there) and the measured figures in them. It times nothing and
needs no card. Tables that do not name a card are for H100s.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from scale_model import H100, H200, HOP, MORE, ROW_BYTES, Cluster, Replica
from workload import QWEN3, reference_workload

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "scale.md"
BEGIN = "<!-- tables: benchmarks/scale.py --write -->"
END = "<!-- end of tables -->"


def measured(benchmark: str, key: str, replica: Replica) -> float | None:
    """A figure of benchmarks/results, if it is there."""
    for path in sorted(RESULTS.rglob("*.json")):
        found = json.loads(path.read_text())
        same = (
            found.get("benchmark") == benchmark
            and found.get("model") == replica.model
            and found.get("kv_cache_dtype") == "auto"
            and found.get("tensor_parallel_size", 1) == replica.ranks
            and not found.get("disable_custom_all_reduce", False)
            and replica.card.name in found["machine"]
        )
        if same:
            return float(found[key])
    return None


def table(head: str, rows: Sequence[Sequence[object]]) -> str:
    names = head.split(" | ")
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def against_measured() -> str:
    work, rows = reference_workload(), []
    for model, ranks in (("qwen3-0.6b", 1), ("qwen3-8b", 1), ("qwen3-8b", 2)):
        for card in (H100, H200):
            replica = Replica(model, ranks, card)
            cases = [
                ("reference workload, s", "throughput", "seconds", replica.seconds(work)),
                ("batch 1, ms", "latency", "ms_per_token", replica.decode(1, 256) * 1e3),
            ]
            if model == "qwen3-0.6b":
                step = replica.decode(32, 32 * 8224) * 1e3
                cases.append(
                    ("32 x 8,192 tokens, ms per step", "long_context", "ms_per_token", step)
                )
            for what, benchmark, key, value in cases:
                found = measured(benchmark, key, replica)
                shown = ("not yet measured", "")
                if found is not None:
                    shown = (f"{found:.2f}", f"{found / value:.2f}")
                rows.append((model, f"{ranks} x {card.name}", what, f"{value:.2f}", *shown))
    return table("model | cards | what | on paper | measured | measured / paper", rows)


def targets() -> str:
    """Two cards against one, and the time that a sum over the ranks must save for it."""
    work, rows = reference_workload(), []
    for card in (H100, H200):
        one, two = Replica("qwen3-8b", 1, card), Replica("qwen3-8b", 2, card)
        num_sums = 2 * one.shape[0]
        pairs = [measured("throughput", "seconds", replica) for replica in (one, two)]
        slow, fast = one.seconds(work), two.seconds(work)
        missing = (fast - slow / 1.6) / (max(work.output_lens) - 1) / num_sums
        what = "reference workload, times one card"
        rows.append((card.name, what, ">= 1.6", slow / fast, _ratio(*pairs), missing))
        pairs = [measured("latency", "ms_per_token", replica) for replica in (two, one)]
        slow, fast = one.decode(1, 256), two.decode(1, 256)
        what, missing = "batch-1 token time, of one card's", (fast - 0.62 * slow) / num_sums
        rows.append((card.name, what, "<= 0.62", fast / slow, _ratio(*pairs), missing))
    shown = [(*row[:3], f"{row[3]:.2f}", row[4], f"{max(row[5], 0) * 1e6:.1f}") for row in rows]
    head = "cards | qwen3-8b on two | target | on paper | measured | us per sum to save, on paper"
    return table(head, shown)


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else "not yet measured"


def sizes() -> str:
    rows, work = [], reference_workload()
    for model in QWEN3 | MORE:
        for ranks in HOP:
            replica = Replica(model, ranks)
            if replica.room < 256 * 1024:
                rows.append((model, ranks, "does not hold 256 x 1,024 tokens", "", "", ""))
                continue
            seconds = replica.seconds(work)
            rate = work.num_output_tokens / seconds
            rows.append(
                (
                    model,
                    ranks,
                    f"{seconds:.1f}",
                    f"{rate / ranks:,.0f}",
                    f"{replica.decode(1, 256) * 1e3:.2f}",
                    f"{replica.collectives(1, 1) / replica.decode(1, 256):.0%}",
                )
            )
    head = "model | cards per replica | reference, s | tokens/s per card | batch 1, ms | of it sums"
    return table(head, rows)


def contexts() -> str:
    rows = []
    for model, ranks in (("qwen3-8b", 1), ("qwen3-8b", 2), ("qwen3-32b", 2), ("qwen3-32b", 4)):
        for context in (1024, 8192, 32768, 131072):
            replica = Replica(model, ranks)
            batch = min(replica.room // context, 512)
            rate = batch / replica.decode(batch, batch * context) if batch > 0 else 0
            rows.append((model, ranks, f"{context:,}", batch, f"{rate / ranks:,.0f}"))
    return table(
        "model | cards per replica | context | sequences at once | tokens/s per card", rows
    )


def clusters() -> str:
    rows = []
    for model, ranks in (("qwen3-8b", 1), ("qwen3-32b", 2)):
        replica = Replica(model, ranks)
        seconds = replica.seconds(reference_workload())
        for nodes in (1, 10, 100, 1000):
            cluster = Cluster(replica, nodes, seconds)
            rows.append(
                (
                    model,
                    nodes,
                    cluster.replicas,
                    f"{cluster.tokens_per_second / 1e6:,.2f}",
                    f"{cluster.prompts_per_second:,.0f}",
                    f"{cluster.driver_tasks_per_second:,.1f}",
                    f"{cluster.prompts_per_second * ROW_BYTES / 1e9:.2f}",
                    f"{cluster.load_seconds:,.0f}",
                    f"{cluster.batch_seconds:.0f}",
                    f"{cluster.failures_per_hour:.3f}",
                    f"{cluster.lost_share:.1e}",
                )
            )
    return table(
        "model | nodes | replicas | M tokens/s | prompts/s | driver tasks/s | GB/s of rows | "
        "load, s | a batch, s | failures/h | work lost",
        rows,
    )


def tables() -> str:
    """All tables, as docs/scale.md contains them."""
    parts = (
        ("On paper and measured", f"{against_measured()}\n\n{targets()}"),
        ("Cards per replica", sizes()),
        ("Context", contexts()),
        ("Nodes", clusters()),
    )
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    if not parser.parse_args().write:
        print(tables())
        return
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
