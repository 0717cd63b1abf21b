"""The sum over ranks inside the norm: its definition, and the kernel together with it.

In the interpreter one rank runs the kernel and the others the definition, on threads. On a card all
ranks run the kernel, each on a stream of its own. nv-engine tests two cards.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from decoder_layer import RMS, Layer, after_attention
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.linear.triton.weight import TritonDense
from nv_kernels.ranks import triton_all_reduce as all_reduce

EPS = 1e-6
MAX_ROWS = 8 if INTERPRETING else 256
WIDTHS = (64, 96) if INTERPRETING else (1024, 4096, 5120)


def draw(*shape, dtype=torch.bfloat16, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def peers_of(size, width, device=DEVICE, max_rows=MAX_ROWS):
    """Make the buffers of `size` ranks, all in this process."""
    shape = (2, size, max_rows, width // 2)
    buffers = [
        torch.full(shape, nk.PeerBuffers.EMPTY, dtype=torch.int32, device=device)
        for _ in range(size)
    ]
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [
        replace(nk.PeerBuffers.at(rank, own, addresses), buffers=tuple(buffers))
        for rank, own in enumerate(buffers)
    ]


def expected_of(parts, residual, weight):
    """The library's sum, and its norm."""
    rounded = [
        (part.sum(0, dtype=torch.float32) if part.dim() == 3 else part).to(weight.dtype).float()
        for part in parts
    ]
    return reference.add_rms_norm(sum(rounded).to(weight.dtype), residual, weight, EPS)


def in_threads(calls):
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def call_of(op, part, residual, weight, peers):
    return lambda: op(part, residual, weight, EPS, peers)


@cache
def stream_of(rank):
    return torch.cuda.Stream()


def on_streams(calls):
    """Run each rank on a stream of its own; they wait for each other on the card."""
    streams = [stream_of(rank) for rank in range(len(calls))]
    found = []
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(call())
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return found


def all_ranks(parts, residual, weight, ranks, rank_of_kernel):
    """Return every rank's results."""
    fast, plain = all_reduce.all_reduce_add_rms_norm, reference.all_reduce_add_rms_norm
    if not INTERPRETING:
        calls = [
            call_of(fast, part, residual, weight, peers)
            for part, peers in zip(parts, ranks, strict=True)
        ]
        return on_streams(calls)
    calls = [
        call_of(fast if peers.rank == rank_of_kernel else plain, part, residual, weight, peers)
        for part, peers in zip(parts, ranks, strict=True)
    ]
    return in_threads(calls)


def load_kernels(parts, residual, weight, ranks):
    """Load each rank's kernel before any rank waits: loading may wait for the card."""
    if INTERPRETING:
        return
    for part, peers in zip(parts, ranks, strict=True):
        peers.own.zero_()  # as if all parts had arrived
        torch.cuda.synchronize()
        with torch.cuda.stream(stream_of(peers.rank)):
            all_reduce.all_reduce_add_rms_norm(part, residual, weight, EPS, peers)
        torch.cuda.synchronize()
    for peers in ranks:
        peers.own.fill_(nk.PeerBuffers.EMPTY)
        peers.counts.zero_()
    torch.cuda.synchronize()


def check(found, parts, residual, weight):
    out, total = expected_of(parts, residual, weight)
    for rank_out, rank_total in found:
        assert torch.equal(rank_total, total)
        assert torch.equal(rank_out, found[0][0]) or INTERPRETING  # there only one rank runs it
        torch.testing.assert_close(rank_out, out, rtol=1.5 * 2**-7, atol=0.05 * 2**-7)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@outer_only
@pytest.mark.parametrize("size", [2, 3])
def test_definition_is_the_norm_of_the_sum(size):
    """Calls with other numbers of rows: each row continues from its own count."""
    ranks, weight = peers_of(size, 32, "cpu", 8), draw(32, seed=9, device="cpu")
    for step, num_rows in enumerate((3, 8, 1, 5, 5, 0, 19)):
        parts = [draw(num_rows, 32, seed=10 * step + rank, device="cpu") for rank in range(size)]
        parts[0] = parts[0][None].float()  # partials on one of them
        residual = draw(num_rows, 32, seed=100 + step, device="cpu") if step % 2 else None
        calls = [
            call_of(nk.all_reduce_add_rms_norm, part, residual, weight, peers)
            for part, peers in zip(parts, ranks, strict=True)
        ]
        out, total = expected_of(parts, residual, weight)
        for rank_out, rank_total in in_threads(calls):
            assert torch.equal(rank_total, total)
            assert torch.equal(rank_out, out)
    assert ranks[0].counts.tolist() == [
        8,
        7,
        7,
        5,
        5,
        3,
        3,
        3,
    ]  # the last sum has three parts
    assert all((buffer == nk.PeerBuffers.EMPTY).all() for buffer in ranks[0].buffers)


@outer_only
def test_a_part_that_looks_empty_arrives_as_nan():
    ranks, weight = peers_of(2, 8, "cpu", 1), torch.ones(8, dtype=torch.bfloat16)
    empty = torch.full((1, 4), nk.PeerBuffers.EMPTY, dtype=torch.int32).view(torch.bfloat16)
    calls = [call_of(nk.all_reduce_add_rms_norm, empty, None, weight, peers) for peers in ranks]
    assert all(total.isnan().all() for _, total in in_threads(calls))


@outer_only
def test_which_sums_are_left_to_the_norm():
    pair, peers = peers_of(2, 64, "cpu", 4)[0], peers_of(3, 64, "cpu", 4)[0]
    rows = torch.ones(5, 64, dtype=torch.bfloat16)
    assert nk.RankSum(lambda x: x, pair).peers_for(rows) is pair
    reduce = nk.RankSum(lambda x: x + 1, peers)
    assert reduce.peers_for(torch.ones(4, 64, dtype=torch.bfloat16)) is peers
    for x in (rows, torch.ones(4, 32, dtype=torch.bfloat16), torch.ones(4, 64)):
        assert reduce.peers_for(x) is None
    assert nk.RankSum(lambda x: x).peers_for(torch.ones(4, 64)) is None
    assert reduce(torch.ones(1)) == 2


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "rank_of_kernel"), [(2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel(size, rank_of_kernel, width, dtype):
    ranks, weight = peers_of(size, width), draw(width, dtype=dtype, seed=9)
    heights = (1, 3, 2, 2, 8, 11) if INTERPRETING else (1, 16, 5, 40, 40, 2)  # all on one card
    load_kernels([draw(1, width, dtype=dtype)] * size, None, weight, ranks)
    load_kernels([draw(3, 1, width, dtype=torch.float32)] * size, None, weight, ranks)
    load_kernels([draw(1, width, dtype=dtype)] * size, draw(1, width, dtype=dtype), weight, ranks)
    load_kernels(
        [draw(3, 1, width, dtype=torch.float32)] * size, draw(1, width, dtype=dtype), weight, ranks
    )
    for step, num_rows in enumerate(heights):
        splits, kind = ((3,), torch.float32) if step % 2 else ((), dtype)
        seeds = range(10 * step, 10 * step + size)
        parts = [draw(*splits, num_rows, width, dtype=kind, seed=seed) for seed in seeds]
        if splits:  # the sum is exact in every order
            parts = [part.to(dtype).float() * torch.tensor([1, 0, 0], device=DEVICE)[:, None, None]
                     for part in parts]  # fmt: skip
        residual = draw(num_rows, width, dtype=dtype, seed=100 + step) if step > 1 else None
        found = all_ranks(parts, residual, weight, ranks, rank_of_kernel)
        check(found, parts, residual, weight)
    assert all((buffer == nk.PeerBuffers.EMPTY).all() for buffer in ranks[0].buffers)


@on_device
def test_a_layer_on_two_ranks_is_the_layer():
    """Each rank has half of the features; the sums are left to the norms."""
    width, features, num_rows = (64, 96, 3) if INTERPRETING else (1024, 3072, 5)
    whole = Layer(
        attention_norm=draw(width, seed=1),
        qkv=draw(width, width, seed=2) / width**0.5,
        output=draw(width, width, seed=3) / width**0.5,
        mlp_norm=draw(width, seed=4),
        gate_up=draw(2 * features, width, seed=5) / width**0.5,
        down=draw(width, features, seed=6) / features**0.5,
        eps=EPS,
    )
    hidden, attended = draw(num_rows, width, seed=7), draw(num_rows, width, seed=8)
    ranks = peers_of(2, width)
    halves = [half_of(whole, rank) for rank in range(2)]
    for peers, half in zip(ranks, halves, strict=True):
        warm_layer(half, attended.chunk(2, 1)[peers.rank], hidden, peers)

    def run(rank):
        own = attended.chunk(2, 1)[rank].contiguous()
        fast = rank == 0 or not INTERPRETING
        return (fast_layer if fast else plain_layer)(halves[rank], own, hidden, ranks[rank])

    calls = [lambda: run(0), lambda: run(1)]
    found = in_threads(calls) if INTERPRETING else on_streams(calls)
    expected = plain_layer(whole, attended, hidden, None)
    for out, total in found:
        torch.testing.assert_close(total.float(), expected[1].float(), rtol=2e-2, atol=4e-2)
        torch.testing.assert_close(out.float(), expected[0].float(), rtol=2e-2, atol=4e-2)


def half_of(layer, rank):
    gate, up = layer.gate_up.chunk(2)
    parts = [gate.chunk(2)[rank], up.chunk(2)[rank]]
    return Layer(
        layer.attention_norm,
        layer.qkv,
        layer.output.chunk(2, 1)[rank].contiguous(),
        layer.mlp_norm,
        torch.cat(parts),
        layer.down.chunk(2, 1)[rank].contiguous(),
        EPS,
    )


def fast_layer(layer, attended, hidden, peers):
    reduce = nk.RankSum(lambda _: pytest.fail("the norm sums"), peers)
    stream = after_attention(layer, attended, nk.Stream(hidden), TritonDense, reduce)
    assert stream.peers is peers
    normed, stream = nk.normalise(stream, RMS(layer.attention_norm, EPS))
    return normed, stream.hidden


def plain_layer(layer, attended, hidden, peers):
    def normed(part, stream, weight):
        if peers is None:
            return reference.add_rms_norm(part, stream, weight, EPS)
        return reference.all_reduce_add_rms_norm(part, stream, weight, EPS, peers)

    part = reference.linear(attended, layer.output)
    x, hidden = normed(part, hidden, layer.mlp_norm)
    gated = reference.silu_and_mul(reference.linear(x, layer.gate_up))
    return normed(reference.linear(gated, layer.down), hidden, layer.attention_norm)


def warm_layer(half, attended, hidden, peers):
    """Load the kernels of a rank before any rank waits."""
    if INTERPRETING:
        return
    peers.own.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(peers.rank)):
        fast_layer(half, attended.contiguous(), hidden, peers)
    torch.cuda.synchronize()
    for buffer in peers.buffers:
        buffer.fill_(nk.PeerBuffers.EMPTY)
    peers.counts.zero_()
    torch.cuda.synchronize()


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("size", "width", "partials"), [(2, 4096, 1), (2, 4096, 8), (8, 8192, 4)])
def test_compiles_ahead_of_time(capability, size, width, partials):
    block, warps = all_reduce._tile(width)
    pointers = ("x", "residual", "weight", "out", "total", "addresses", "counts")
    types = dict.fromkeys(pointers, "*bf16") | {"addresses": "*i64", "counts": "*i32"}
    types |= dict.fromkeys(("num_rows", "first_row"), "i32") | {"eps": "fp32"}
    types["x"] = "*fp32" if partials > 1 else "*bf16"
    compiled = compile_for(
        all_reduce.all_reduce_add_rms_norm_kernel,
        types,
        {
            "RANK": 1,
            "SIZE": size,
            "MAX_ROWS": 256,
            "E": width,
            "BLOCK": block,
            "PARTIALS": partials,
            "HAS_RESIDUAL": True,
            "PDL": capability >= 90,
        },
        capability,
        divisible=pointers,
        num_warps=warps,
        maxnreg=all_reduce.MAX_REGISTERS,
    )
    assert_fits(compiled, capability)
    assert compiled.ptx.count("ld.volatile.global.v4.b32") >= 2 * (size - 1)
    assert "ld.volatile.global.b32" not in compiled.ptx
