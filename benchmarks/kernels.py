"""Every kernel against its bound, on one card.

The bound of attention is the read or the matmul ceiling; the bound of the other kernels is bytes
over the read rate; all are measured in the same run. FlashAttention, if installed, and torch are
measured too. All parts run unless some are named. `plot.py` draws the file of `--save`.
"""

import argparse

import kernels_attention
import kernels_step
from kernels_elementwise import elementwise_rows
from report import matmul_ceiling, report
from step_parts import read_ceiling

STEP_PARTS = {**kernels_step.PARTS, "elementwise": elementwise_rows}
PARTS = ("attention", *STEP_PARTS)


def step_rows(parts: list[str], rate: float) -> list[dict]:
    """Time the named parts of a step, printing a table."""
    found = []
    print(f"{'':24}{'rows':>5}{'bound':>9}{'ours':>9}{'target':>9}{'torch':>9}", flush=True)
    for part in parts:
        for row in STEP_PARTS[part](rate):
            found.append(row)
            digits = 3 if row["unit"] == "ms" else 1
            numbers = (row["bound"], row["ours"], row["target"], row["torch"])
            cells = "".join(f"{'' if n is None else f'{n:.{digits}f}':>9}" for n in numbers)
            more = {key: round(row[key], 4) for key in ("error", "without_stand_in", "logits")
                    if key in row}  # fmt: skip
            print(f"{row['what']:24}{row['rows']:5}{cells} {row['unit']} {more or ''}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--sustained", action="store_true", help="heat the card before attention")
    parser.add_argument("--save")
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    figures: dict = {"read_rate": read_ceiling(), "matmul_ceiling": matmul_ceiling()}
    if "attention" in parts:
        figures["load"] = "sustained" if args.sustained else "burst"
        figures["cases"] = kernels_attention.attention_cases(args.sustained)
    if steps := [part for part in parts if part != "attention"]:
        figures["rows"] = step_rows(steps, figures["read_rate"])
    report("kernels", figures, args.save)


if __name__ == "__main__":
    main()
