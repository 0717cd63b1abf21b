"""Parts of the kernel benchmarks: graph timing, the read ceiling, a model's layers."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from nv_kernels import KVCache, SamplingTensors, reference
from nv_kernels.cache.triton_rope import qk_norm_rope_store
from nv_kernels.elementwise import triton_norm as norm
from nv_kernels.launch.dependent import dependent_launch
from nv_kernels.linear.stream import Stream
from nv_kernels.linear.triton.weight import TritonDense
from torch.nn import functional

DEVICE = "cuda"
BF16 = torch.bfloat16
EPS = 1e-6
HEAD_DIM = 128


def time_each(work, items, reps=11):
    """Median microseconds of `work` on one of the items, all of them in one graph."""
    return graph_time(lambda: [work(item) for item in items], reps=reps) / len(items)


def graph_time(work, reps=15, warm=2):
    """Median microseconds of one replay of `work`, captured as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(warm):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK * LOOP + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(LOOP):
        total += tl.load(x + at + step * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_ceiling(gib=2):
    """Bytes per second that a plain read reaches."""
    x = torch.randint(0, 1 << 30, (gib << 28,), dtype=torch.int32, device=DEVICE)
    programs = x.numel() // (4096 * 4)
    out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
    us = graph_time(lambda: _read_kernel[(programs,)](x, out, 4096, 4, num_warps=8), reps=9)
    return x.numel() * 4 / us * 1e6


@triton.jit
def _copy_kernel(x, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def stand_in(queries):
    """A copy in place of attention."""
    out = torch.empty_like(queries)
    n = queries.numel()
    options = dependent_launch(queries)
    _copy_kernel[(triton.cdiv(n, 1024),)](queries, out, n, 1024, num_warps=4, **options)
    return out.flatten(1)


class RMS(NamedTuple):
    """A norm of the stream."""

    weight: torch.Tensor
    eps: float


class Layer(NamedTuple):
    """A layer's norms and matrices."""

    attention_norm: RMS
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: RMS
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Layers of a decoder with random weights, and caches for their keys and values."""

    def __init__(self, hidden, q_heads, kv_heads, features, layers, seed=0):
        generator = torch.Generator(device=DEVICE).manual_seed(seed)

        def matrix(rows, columns):
            scale = 0.7 / columns**0.5
            return (torch.randn(rows, columns, device=DEVICE, generator=generator) * scale).to(BF16)

        def vector(size):
            return (1 + 0.1 * torch.randn(size, device=DEVICE, generator=generator)).to(BF16)

        self.hidden, self.q_heads, self.kv_heads = hidden, q_heads, kv_heads
        self.q_norm, self.k_norm = vector(HEAD_DIM), vector(HEAD_DIM)
        self.layers = [
            Layer(
                attention_norm=RMS(vector(hidden), EPS),
                qkv=matrix((q_heads + 2 * kv_heads) * HEAD_DIM, hidden),
                output=matrix(hidden, q_heads * HEAD_DIM),
                mlp_norm=RMS(vector(hidden), EPS),
                gate_up=matrix(2 * features, hidden),
                down=matrix(hidden, features),
            )
            for _ in range(layers)
        ]
        pool = (2, 16, 256, kv_heads, HEAD_DIM)
        self.caches = [KVCache(*torch.zeros(pool, dtype=BF16, device=DEVICE)) for _ in self.layers]
        steps = torch.arange(4096, device=DEVICE, dtype=torch.float32)[:, None]
        angles = steps * 1e6 ** -(torch.arange(64, device=DEVICE, dtype=torch.float32) / 64)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()

    def inputs(self, tokens):
        generator = torch.Generator(device=DEVICE).manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, device=DEVICE, generator=generator).to(BF16)
        positions = torch.randint(0, 4000, (tokens,), device=DEVICE, generator=generator)
        slots = torch.randperm(4096, device=DEVICE, generator=generator)[:tokens].contiguous()
        return x, positions, slots

    def run(self, x, positions, slots, weight=TritonDense, attend=stand_in):
        """All layers, with a copy of the queries as attention; returns the last total."""
        stream = Stream(x)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            qkv, stream = weight(layer.qkv).norm_linear(stream, layer.attention_norm)
            queries = qk_norm_rope_store(
                qkv, self.q_norm, self.k_norm, EPS, positions, self.cos_sin, cache, slots,
                self.q_heads, BF16,
            )  # fmt: skip
            stream = weight(layer.output).linear_add(attend(queries), stream)
            gated, stream = weight(layer.gate_up).norm_gated_linear(stream, layer.mlp_norm)
            stream = weight(layer.down).linear_add(gated, stream)
        if stream.pending is None:
            return stream.hidden
        weight = self.layers[0].attention_norm.weight
        return norm.add_rms_norm(stream.pending, stream.hidden, weight, EPS)[1]

    def plain(self, x, positions, slots, dtype=BF16):
        """The same in plain torch ops, at any precision; caches written in bf16 only."""
        x = x.to(dtype)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            tensors = [value.weight if isinstance(value, RMS) else value for value in layer]
            norm, qkv, output, mlp_norm, gate_up, down = (each.to(dtype) for each in tensors)
            qkv = functional.linear(self._norm(x, norm), qkv)
            heads = qkv.view(len(x), -1, HEAD_DIM)
            q, k, v = heads.split([self.q_heads, self.kv_heads, self.kv_heads], 1)
            q = reference.apply_rope(self._norm(q, self.q_norm.to(dtype)), positions, self.cos_sin)
            k = reference.apply_rope(self._norm(k, self.k_norm.to(dtype)), positions, self.cos_sin)
            if dtype == BF16:
                cache.k.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
                cache.v.view(-1, *v.shape[1:]).index_copy_(0, slots, v)
            x = x + functional.linear(q.flatten(1).clone(), output)
            gate, up = functional.linear(self._norm(x, mlp_norm), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return x

    @staticmethod
    def _norm(x, weight):
        return functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def sampling_tensors(rows, temperature=None, top_k=0, top_p=1.0, min_p=0.0, seed=1):
    """Parameters of a batch; temperature None: 0.3 to 1.3, else that of every row."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    heat = 0.3 + torch.rand(rows, device=DEVICE, generator=generator)
    if temperature is not None:
        heat = torch.full((rows,), float(temperature), device=DEVICE)
    return SamplingTensors(
        temperature=heat,
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((rows,), top_p, device=DEVICE),
        min_p=torch.full((rows,), min_p, device=DEVICE),
        seeds=torch.randint(0, 2**62, (rows,), device=DEVICE, generator=generator),
        positions=torch.randint(0, 4000, (rows,), device=DEVICE, generator=generator),
        any_filter=(top_k, top_p, min_p) != (0, 1.0, 0.0),
    )
