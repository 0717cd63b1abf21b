"""The CPU's compiled kernels against their definitions, and the fallback without a compiler."""

import os
import subprocess
import sys
from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from decoder_layer import Layer, after_attention, before_attention
from nv_kernels.cpp import elementwise, linear, rope
from nv_kernels.cpp.calls import kernel
from nv_kernels.cpp.library import find_compiler, why_not
from nv_kernels.cpp.sample import sample
from nv_kernels.cpp.weight import CppDense
from nv_kernels.linear.weight import Dense

compiled = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [16, 64, 100, 576, 7]


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def close(got, want, dtype):
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol / 10)


@compiled
def test_this_machine_has_the_kernels_where_it_has_a_compiler():
    assert why_not() == ""
    assert kernel("linear", torch.float32, torch.float32)
    assert kernel("add_rms_norm", torch.float32)
    assert kernel("linear", torch.float16, torch.float16) is None
    assert kernel("attention", torch.bfloat16, torch.float8_e4m3fn)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_norms(tokens, width, dtype):
    x, residual = draw(tokens, width, dtype=dtype), draw(tokens, width, dtype=dtype, seed=1)
    weight = draw(width, dtype=dtype, seed=2)
    for got, want in zip(
        elementwise.add_rms_norm(x, residual, weight, 1e-6),
        nk.reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        close(got, want, dtype)
    normed, total = elementwise.add_rms_norm(x, None, weight, 1e-6)
    assert total is x
    close(normed, nk.reference.rms_norm(x, weight, 1e-6), dtype)
    close(elementwise.rms_norm(x[:, None], weight, 1e-6)[:, 0], normed, dtype)
    part = draw(tokens, 2 * width, dtype=dtype)[:, ::2]  # not contiguous
    close(
        elementwise.rms_norm(part, weight, 1e-6), nk.reference.rms_norm(part, weight, 1e-6), dtype
    )


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate(width, dtype):
    x = draw(20, 2 * width, dtype=dtype, scale=30.0)
    close(elementwise.silu_and_mul(x), nk.reference.silu_and_mul(x), dtype)
    ends = torch.tensor([[-1e4, -300.0, -88.0, -0.0, 0.0, 88.0, 300.0, 1e4] + [1.0] * 8]).to(dtype)
    close(elementwise.silu_and_mul(ends), nk.reference.silu_and_mul(ends), dtype)
    close(elementwise.gelu_tanh_and_mul(x), nk.reference.gelu_tanh_and_mul(x), dtype)
    close(elementwise.gelu_tanh_and_mul(ends), nk.reference.gelu_tanh_and_mul(ends), dtype)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 100, 50257])
def test_greedy(size, dtype):
    logits = draw(9, size, dtype=dtype)
    logits[3] = -torch.inf
    logits[4] = 1.5  # ties: the first
    logits[5, size // 2] = torch.nan
    logits[6, -1] = torch.inf
    none = torch.zeros(9)
    sampling = nk.SamplingTensors(
        none, none.long(), none + 1, none, none.long(), none.long(), any_filter=False
    )
    wanted = logits.argmax(-1)
    wanted[[3, 5, 6]] = -1
    assert torch.equal(sample(logits, sampling), wanted)
    past = torch.full((9, 5), torch.nan, dtype=dtype)  # ids that are not read
    bounded = replace(sampling, num_ids=size)
    assert torch.equal(sample(torch.cat([logits, past], dim=1), bounded), wanted)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 64), ((3, 1), 24), ((9, 3), 128)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("part", [1, 0.5, 0])
def test_rope_and_store(part, normed, heads, dim, order, dtype):
    q_heads, kv_heads = heads
    qkv = draw(7, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = (
        (draw(dim, dtype=dtype, seed=1), draw(dim, dtype=dtype, seed=2)) if normed else (None,) * 2
    )
    angles = torch.arange(50)[:, None] * torch.linspace(1, 0.01, int(part * dim) // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1) if part else None
    positions = torch.tensor([0, 49, 3, 7, 7, 20, 1])
    slots = torch.tensor([5, 40, -1, 17, 0, 63, 31])
    found = []
    for op in (rope.qk_norm_rope_store, nk.reference.qk_norm_rope_store):
        kv = nk.KVLayout(4, 16, kv_heads, dim, dtype, order).allocate("cpu")
        q = op(qkv, *weights, 1e-6, positions, table, kv, slots, q_heads)
        found.append((q, kv.k, kv.v))
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)
    assert (found[0][1].flatten(0, 1).abs().amax((1, 2)) > 0).sum() == 6


@compiled
@pytest.mark.skipif(not linear.has_tiles(), reason="this processor has no tiles")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("outputs", "columns"), [(16, 32), (48, 64), (112, 64), (960, 576), (576, 1536)]
)
def test_products_by_tiles(outputs, columns, biased):
    x = draw(301, columns, dtype=torch.bfloat16)
    weight = draw(outputs, columns, dtype=torch.bfloat16, seed=1, scale=columns**-0.5)
    bias = draw(outputs, dtype=torch.bfloat16, seed=2) if biased else None
    in_tiles = linear.pack_weight(weight)
    assert linear.is_in_tiles(in_tiles)
    whole = linear.linear(x, in_tiles, bias)
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), truth, rtol=2**-7, atol=2**-9)
    for rows in (*range(1, 18), 25, 31, 32, 33, 64, 100, 256, 257, 300):
        for start in (0, 1, 301 - rows):
            part = linear.linear(x[start : start + rows], in_tiles, bias)
            assert torch.equal(part, whole[start : start + rows]), (rows, start)


@compiled
@pytest.mark.skipif(not linear.has_tiles(), reason="this processor has no tiles")
@pytest.mark.parametrize("outputs", [16, 112, 960])
def test_threads_share_out_tiles(outputs):
    x = draw(17, 64, dtype=torch.bfloat16)
    in_tiles = linear.pack_weight(draw(outputs, 64, dtype=torch.bfloat16, seed=1))
    whole, threads = linear.linear(x, in_tiles), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for rows in (1, 5, 17):
            assert torch.equal(linear.linear(x[:rows], in_tiles), whole[:rows])
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_a_layer_in_compiled_calls_is_the_layer_op_by_op(tokens, biased, dtype):
    size, width, heads = 64, 96, 4
    shapes = {"qkv": (128, size), "output": (size, heads * 16), "gate_up": (2 * width, size),
              "down": (size, width)}  # fmt: skip
    named = {
        name: linear.pack_weight(draw(*shape, dtype=dtype, seed=i, scale=shape[1] ** -0.5))
        for i, (name, shape) in enumerate(shapes.items())
    }
    if biased:
        named |= {f"{n}_bias": draw(s[0], dtype=dtype, seed=9) for n, s in shapes.items()}
    norms = {n: draw(size, dtype=dtype, seed=7) for n in ("attention_norm", "mlp_norm")}
    layer = Layer(**norms, **named, eps=1e-6)
    hidden, pending = draw(tokens, size, dtype=dtype), draw(tokens, size, dtype=dtype, seed=3)
    attended = draw(tokens, heads * 16, dtype=dtype, seed=4)

    def run(weight):
        first, _ = before_attention(layer, nk.Stream(hidden), weight)
        qkv, stream = before_attention(layer, nk.Stream(hidden, pending), weight)
        after = after_attention(layer, attended, stream, weight)
        return first, qkv, stream.hidden, after.hidden, after.pending

    own = CppDense.of(layer.qkv)
    assert (own is not None) == (dtype == torch.float32 or linear.has_tiles())
    if own is not None:
        for ours, plain in zip(run(CppDense.of), run(Dense), strict=True):
            assert torch.equal(ours, plain)


@compiled
def test_with_ranks_each_product_is_summed_before_it_is_added():
    tensors = {
        n: draw(s, 32) for n, s in (("qkv", 96), ("output", 32), ("gate_up", 64), ("down", 32))
    }
    tensors |= {n: torch.ones(32) for n in ("attention_norm", "mlp_norm")}
    layer, stream = Layer(**tensors, eps=1e-6), nk.Stream(draw(3, 32))
    doubled = after_attention(layer, draw(3, 32), stream, CppDense.of, nk.RankSum(lambda x: x * 2))
    tensors |= {n: 2 * tensors[n] for n in ("output", "down")}
    expected = after_attention(Layer(**tensors, eps=1e-6), draw(3, 32), stream, Dense)
    assert torch.equal(doubled.hidden, expected.hidden)
    assert torch.equal(doubled.pending, expected.pending)


WITHOUT = """
import torch
import nv_kernels as nk
from nv_kernels.cpp.library import library, why_not
assert library() is None
print(why_not())
x, weight = torch.randn(3, 32), torch.randn(48, 32)
torch.testing.assert_close(nk.linear(x, nk.pack_weight(weight)), x @ weight.T)
torch.testing.assert_close(nk.rms_norm(x, x[0], 1e-6), nk.reference.rms_norm(x, x[0], 1e-6))
nk.linear(x.bfloat16(), nk.pack_weight(weight.bfloat16()))
print(nk.attention_backend("auto", device="cpu", dtype=torch.float32, num_q_heads=2,
                           num_kv_heads=1, head_dim=64, block_size=16).reason)
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"CXX": "no-such-compiler"}, "no-such-compiler was not found; install g++, or set CXX"),
        ({"CXX": "false -O1"}, "false -O1 failed"),
        (
            {"XDG_CACHE_HOME": "/dev/null", "HOME": "/dev/null", "TMPDIR": "{tmp_path}"},
            "set XDG_CACHE_HOME to a folder that can",
        ),
    ],
)
def test_without_the_kernels_torch_computes_and_why_not_has_the_reason(change, words, tmp_path):
    (tmp_path / f"nv-{os.getuid()}").touch()  # so that no folder for temporary files exists
    change = {name: value.format(tmp_path=tmp_path) for name, value in change.items()}
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **change}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=True
    )
    assert all(words in line for line in done.stdout.splitlines()), done.stdout
