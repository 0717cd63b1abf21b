"""A decode layer's attention from the projection on: two launches against one, and short cuts.

CUDA graphs of at least 28 layers, each with keys of its own, more than L2 holds. Ahead of each
layer a small kernel writes the projection, as a product would: figures include it.
"""

import argparse
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import nv_kernels as nk
import torch
import triton
import triton.language as tl
from attention_work import graph_microseconds
from nv_kernels.attention.triton import TritonAttention
from nv_kernels.attention.triton_decode import Projected, launch_decode
from nv_kernels.metadata import AttentionShape
from nv_kernels.triton import settings
from nv_kernels.triton.dependent import dependent_launch
from nv_kernels.triton.previous import wait_for_previous
from nv_kernels.triton.rope_store import qk_norm_rope_store
from report import report

HEADS, HEAD_DIM, BLOCK = (16, 8), 128, 256
WIDTH = (HEADS[0] + 2 * HEADS[1]) * HEAD_DIM
COLD_BYTES = 160 * 2**20  # three times an H100's L2
ERROR_BOUND = 6e-3
SHAPES = (
    (1, 150), (1, 1024), (8, 1024), (16, 820), (64, 820), (128, 820), (256, 820), (32, 8192),
)  # fmt: skip
SHORT = (150, 256, 384)


@triton.jit
def project_kernel(source_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Stand for the product that writes the projection."""
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    tl.store(out_ptr + spot, tl.load(source_ptr + spot, mask=spot < size), mask=spot < size)


@dataclass(frozen=True)
class Layers:
    """One step's tensors over layers with caches of their own."""

    backend: TritonAttention
    source: torch.Tensor
    qkv: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor]
    cos_sin: torch.Tensor
    caches: list[nk.KVCache]
    slots: torch.Tensor
    positions: torch.Tensor
    metadata: nk.AttentionMetadata

    def project(self) -> torch.Tensor:
        """Write the projection anew."""
        size = self.qkv.numel()
        project_kernel[(triton.cdiv(size, 1024),)](
            self.source, self.qkv, size, 1024, num_warps=4, **dependent_launch(self.qkv)
        )
        return self.qkv

    def two(self, plan, index: int) -> torch.Tensor:
        """Norm, rotate and store; then attend."""
        kv = self.caches[index % len(self.caches)]
        q = qk_norm_rope_store(
            self.project(), *self.weights, 1e-6, self.positions, self.cos_sin, kv, self.slots,
            HEADS[0],
        )  # fmt: skip
        return self.backend.attend(q, kv, self.metadata, plan, HEAD_DIM**-0.5)

    def one(self, plan, index: int, early: bool = True) -> torch.Tensor:
        """The same in one launch."""
        kv = self.caches[index % len(self.caches)]
        x = Projected(self.project(), *self.weights, 1e-6, self.cos_sin, self.slots, early)
        rows = self.slots.shape[0]
        out = torch.empty(rows, HEADS[0], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        launch_decode(
            self.backend.shape, x, kv, self.metadata, plan.decode, scale=HEAD_DIM**-0.5, out=out
        )
        return out


def layers_of(rows: int, context: int, fp8: bool, short: bool = False) -> Layers:
    """Draw a step; `short`: caches of one block, for compilation."""
    torch.manual_seed(0)
    shape = AttentionShape(torch.device("cuda"), torch.bfloat16, *HEADS, HEAD_DIM, BLOCK)
    backend = TritonAttention(shape, "a benchmark")
    blocks = -(-context // BLOCK)
    layer_bytes = rows * context * 2 * HEADS[1] * HEAD_DIM * (1 if fp8 else 2)
    number = 1 if short else min(280, max(2, -(-COLD_BYTES // layer_bytes)))
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    caches = []
    sample = torch.randn(8, BLOCK, HEADS[1], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for _ in range(number):
        kv = backend.kv_layout(rows * blocks, dtype).allocate("cuda")
        for part in (*kv.k.split(8), *kv.v.split(8)):
            part.copy_(sample[: part.shape[0]])
        caches.append(kv)
    tables = torch.randperm(rows * blocks, device="cuda").int().view(rows, blocks)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    last = (context - 1) // BLOCK
    partials = (2,) if 3 <= rows <= 64 else ()
    source = torch.randn(*partials, rows, WIDTH, device="cuda")
    source = source if partials else source.bfloat16()
    angles = torch.rand(16384, HEAD_DIM // 2, device="cuda") * 6.3
    return Layers(
        backend=backend,
        source=source,
        qkv=torch.empty_like(source),
        weights=(torch.rand_like(sample[0, 0, 0]) + 0.5, torch.rand_like(sample[0, 0, 0]) + 0.5),
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1),
        caches=caches,
        slots=tables[:, last].long() * BLOCK + (context - 1) % BLOCK,
        positions=lengths.long() - 1,
        metadata=nk.AttentionMetadata(
            torch.arange(rows + 1, dtype=torch.int32, device="cuda"), lengths, tables, 1,
            max(4096, context), rows,
        ),
    )  # fmt: skip


def layer_microseconds(layers: Layers, attend: Callable[[int], object]) -> float:
    return graph_microseconds(attend, max(28, len(layers.caches)), replays=9)


def variants(layers: Layers) -> dict[str, Callable[[int], torch.Tensor]]:
    plan = layers.backend.plan(layers.metadata)
    torch.cuda.synchronize()
    return {
        "two": partial(layers.two, plan),
        "fused": partial(layers.one, plan),
        "fused_late": partial(layers.one, plan, early=False),
        "projection": lambda index: layers.project(),
    }


def cuts(context: int) -> dict[str, settings.DecodeSettings]:
    """Settings of one row to try, by tile, tiles a piece and warps."""
    usual = settings.decode_settings(
        AttentionShape(torch.device("cuda"), torch.bfloat16, *HEADS, HEAD_DIM, BLOCK), 1
    )
    found = {"usual": usual, "usual, no prefetch": replace(usual, prefetch=0)}
    for tile, tiles, warps in itertools.product((32, 64), (1, 2, 4), (2, 4)):
        pieces = triton.cdiv(triton.cdiv(context, tile), tiles)
        name = f"tile {tile} x {tiles}, {warps} warps"
        found[name] = replace(
            usual, tile=tile, warps=warps, num_resident=HEADS[1] * pieces, max_tiles=32,
            prefetch=0 if tiles == 1 else 2, merge=32,
        )  # fmt: skip
    return found


def with_settings(layers: Layers, chosen: settings.DecodeSettings):
    with patch.object(settings, "decode_settings", lambda *_: chosen):
        return layers.backend.plan(layers.metadata)


def compile_all() -> None:
    with nk.compile_ahead():
        for rows in sorted({rows for rows, _ in SHAPES}):
            for fp8 in (False, True):
                layers = layers_of(rows, 64, fp8, short=True)
                for attend in variants(layers).values():
                    attend(0)
        layers = layers_of(1, 64, fp8=False, short=True)
        for chosen in cuts(384).values():
            layers.one(with_settings(layers, chosen), 0)


def measure(rows: int, context: int, fp8: bool) -> dict[str, float]:
    layers = layers_of(rows, context, fp8)
    found = {name: layer_microseconds(layers, work) for name, work in variants(layers).items()}
    two, fused = (variants(layers)[name](0).double() for name in ("two", "fused"))
    found["error"] = float((two - fused).norm() / two.norm())
    if not found["error"] < ERROR_BOUND:
        raise SystemExit(f"{rows} x {context}, fp8 {fp8}: relative error {found['error']}")
    return {name: round(value, 5 if name == "error" else 2) for name, value in found.items()}


def measure_cuts() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for context in SHORT:
        layers = layers_of(1, context, fp8=False)
        for name, chosen in cuts(context).items():
            plan = with_settings(layers, chosen)
            torch.cuda.synchronize()
            micros = layer_microseconds(layers, partial(layers.one, plan))
            found.setdefault(name, {})[context] = round(micros, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    args = parser.parse_args()
    compile_all()
    gc.collect()
    torch.cuda.empty_cache()
    cases = {}
    print(f"{'us a layer':>20}    two  fused   late  projection   error")
    for fp8, (rows, context) in itertools.product((False, True), SHAPES):
        name = f"{rows} x {context}{', fp8' if fp8 else ''}"
        cases[name] = measure(rows, context, fp8)
        two, fused, late, projection, error = cases[name].values()
        print(f"{name:>20} {two:6.2f} {fused:6.2f} {late:6.2f} {projection:10.2f} {error:9.5f}")
        gc.collect()
        torch.cuda.empty_cache()
    tried = measure_cuts()
    print(f"{'1 row, fused':>24} {SHORT}")
    for name, micros in tried.items():
        print(f"{name:>24} {list(micros.values())}", flush=True)
    report("kernels_decode", {"microseconds_a_layer": cases, "cuts": tried}, args.save)


if __name__ == "__main__":
    main()
