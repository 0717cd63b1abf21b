"""Draws the figures of kernels.py: each kernel's share of its bound, with its peers and the target.

    uv run --no-project --with matplotlib benchmarks/plot.py FILE... --save kernels.svg

It reads only the JSON files. Several files are merged: a figure of a later file replaces that of
the same case in an earlier file, so that peers may come from another run.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

OURS, TARGET = "ours", "target"
COLORS = {OURS: "#1f5fa8", "FlashAttention": "#d9822b", "torch": "#9aa5b1"}
BAR = 0.8  # of a row's height, for all its bars together


class Row(NamedTuple):
    """One kernel: shares of its bound, from 0 to 1, by implementation."""

    label: str
    shares: dict[str, float]


def attention_rows(figures: dict[str, Any]) -> list[Row]:
    """Decode cases against the read ceiling, prefill cases against the matmul ceiling."""
    peers = {OURS: "", "FlashAttention": "flash_attn_", "torch": "torch_"}
    found = []
    for name, case in figures.get("cases", {}).items():
        if "read_microseconds" in case:
            bound = case["read_microseconds"]
        else:
            work = case["teraflops"] * case["microseconds"]  # 1e6 FLOPs
            bound = work / (figures["matmul_ceiling"] / 1e12)
        times = {series: case.get(f"{prefix}microseconds") for series, prefix in peers.items()}
        found.append(Row(name, {series: bound / time for series, time in times.items() if time}))
    return found


def step_rows(figures: dict[str, Any]) -> list[Row]:
    """The other kernels against bytes over the read rate."""
    found = []
    for row in figures.get("rows", []):
        shares = {
            series: row["bound"] / row[series]
            for series in (OURS, TARGET, "torch")
            if row.get(series)
        }
        found.append(Row(f"{row['what']}, {row['rows']}", shares))
    return found


def draw(figures: dict[str, Any], sources: list[str], path: str) -> None:
    """Draw both panels into one picture."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    mpl.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "kernels"})
    panels = {
        "Attention: share of the read (prefill: matmul) ceiling": attention_rows(figures),
        "Rest of a step, by rows: share of bytes / read rate": step_rows(figures),
    }
    panels = {title: rows for title, rows in panels.items() if rows}
    height = 1.2 + 0.24 * max(len(rows) for rows in panels.values())
    figure = Figure(figsize=(6.2 * len(panels), height), layout="constrained")
    for axes, (title, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        _panel(axes, rows)
        axes.set_title(title, fontsize=9, loc="left")
    shown = {series for rows in panels.values() for row in rows for series in row.shares}
    handles = [
        Patch(color=color, label=series) for series, color in COLORS.items() if series in shown
    ]
    if TARGET in shown:
        handles.append(Patch(facecolor="black", label=TARGET))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False)
    figure.suptitle("; ".join(sources), fontsize=8, x=0.01, ha="left")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None, dpi=110)


def _panel(axes: Any, rows: list[Row]) -> None:
    """Draw a bar per implementation with a time, from top to bottom, and a mark for the target."""
    for index, row in enumerate(rows):
        bars = [series for series in COLORS if series in row.shares]
        thickness = BAR / len(bars)
        for place, series in enumerate(bars):
            middle = index - BAR / 2 + thickness * (place + 0.5)
            axes.barh(middle, row.shares[series] * 100, thickness, color=COLORS[series])
        share = row.shares[OURS]
        label = f"{share:.0%}" if share >= 0.01 else "< 1%"
        axes.text(101, index, label, va="center", fontsize=7)
        if TARGET in row.shares:
            edges = index - BAR / 2, index + BAR / 2
            axes.vlines(row.shares[TARGET] * 100, *edges, color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 108)
    axes.xaxis.grid(visible=True, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.set_xlabel("% of the bound")


def source(figures: dict[str, Any]) -> str:
    """Return the card and the commit of a file's figures."""
    return f"{figures.get('machine') or figures['card']}, commit {figures['commit']}"


def merge(into: dict[str, Any], figures: dict[str, Any]) -> None:
    """Merge figures at every depth; later ones replace earlier ones."""
    for key, value in figures.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--save", required=True, help="a .svg or .png file")
    args = parser.parse_args()
    files = [json.loads(Path(name).read_text()) for name in args.files]
    merged: dict[str, Any] = {}
    for figures in files:
        merge(merged, figures)
    draw(merged, list(dict.fromkeys(source(figures) for figures in files)), args.save)


if __name__ == "__main__":
    main()
