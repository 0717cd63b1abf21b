"""Tensors that the compiled kernels cannot read go to the definitions: computed or refused."""

from functools import partial

import nv_kernels as nk
import pytest
import torch
from nv_kernels.cpp import elementwise, experts, linear, rope
from nv_kernels.cpp.library import find_compiler
from nv_kernels.cpp.quantized_weight import CppQuantized
from nv_kernels.cpp.weight import CppDense
from nv_kernels.linear.weight import Dense

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16]
REFUSALS = (RuntimeError, IndexError, ValueError, AssertionError)


def draw(*shape, dtype=FP32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def result(call, *arguments):
    """The tensors that a call returns; None if it refuses its arguments."""
    try:
        out = call(*arguments)
    except REFUSALS:
        return None
    return out if isinstance(out, tuple) else (out,)


def agree(fast, definition, *arguments):
    """Check that both refuse, or return the same."""
    want, got = result(definition, *arguments), result(fast, *arguments)
    assert (got is None) == (want is None), f"the definition returns {want}, the kernel {got}"
    for one, other in zip(got or (), want or (), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def other(dtype):
    return BF16 if dtype == FP32 else FP32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 1, 128])
def test_a_norm_reads_a_weight_of_its_own_width_alone(width, dtype):
    x, weight = draw(4, 64, dtype=dtype), draw(width, dtype=dtype)
    agree(elementwise.rms_norm, nk.reference.rms_norm, x, weight, 1e-6)
    agree(elementwise.add_rms_norm, nk.reference.add_rms_norm, x, x, weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (64,), (4, 32), (4, 1)])
def test_a_norm_adds_a_residual_of_another_shape_as_the_definition_does(shape, dtype):
    x, weight = draw(4, 64, dtype=dtype), draw(64, dtype=dtype)
    residual = draw(*shape, dtype=dtype, seed=1)
    agree(elementwise.add_rms_norm, nk.reference.add_rms_norm, x, residual, weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_adds_a_residual_of_another_dtype_as_the_definition_does(dtype):
    x, weight, residual = draw(4, 64, dtype=dtype), draw(64, dtype=dtype), draw(4, 64)
    given = (x, residual.to(other(dtype)), weight, 1e-6)
    agree(elementwise.add_rms_norm, nk.reference.add_rms_norm, *given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_needs_an_even_width(dtype):
    x = draw(3, 7, dtype=dtype)
    agree(elementwise.silu_and_mul, nk.reference.silu_and_mul, x)
    agree(elementwise.gelu_tanh_and_mul, nk.reference.gelu_tanh_and_mul, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["linear", "batch_invariant_linear", "batch_invariant_partials"])
def test_a_product_reads_what_its_weight_and_bias_hold(op, dtype):
    fast, definition = getattr(linear, op), getattr(nk.reference, op)
    x, weight = draw(4, 64, dtype=dtype), draw(32, 64, dtype=dtype, seed=1)
    for columns in (32, 128):
        agree(fast, definition, draw(4, columns, dtype=dtype), weight)
    for bias in (draw(8), draw(1), draw(64)[::2]):
        agree(fast, definition, x, weight, bias.to(dtype))
    agree(fast, definition, x, weight, draw(32, dtype=other(dtype)))
    agree(fast, definition, draw(2, 2, 64, dtype=dtype), weight)
    assert result(fast, draw(4, 32, dtype=dtype), linear.pack_weight(weight)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 128])
def test_a_head_reads_rows_of_its_width(columns, dtype):
    hidden, weight = draw(4, columns, dtype=dtype), draw(32, 64, dtype=dtype)
    assert result(linear.logits, hidden, weight) is None
    assert result(linear.batch_invariant_logits, hidden, weight) is None


class Norm:
    eps = 1e-6

    def __init__(self, weight):
        self.weight = weight


def weights():
    """A fast weight of each kind with the one that it must agree with, [32, 64]."""
    values = draw(32, 64, seed=1) / 8
    record = nk.Int8((draw(32, 64, seed=1) * 40).clamp(-127, 127).to(torch.int8), draw(32).abs())
    fast, quantized = CppDense.of(linear.pack_weight(values)), nk.quantized_weight(record)
    assert isinstance(quantized, CppQuantized)
    return [(fast, Dense(values)), (quantized, record)]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("name", ["norm_linear", "norm_gated_linear"])
def test_a_weight_reads_streams_norms_and_biases_of_its_size(name, kind):
    fast, definition = weights()[kind]
    x, norm = draw(4, 64), Norm(draw(64, seed=2))

    def check(stream, own_norm, bias=None):
        pair = [partial(first, getattr(each, name)) for each in (fast, definition)]
        agree(*pair, stream, own_norm, bias)

    check(nk.Stream(x, draw(1, 64)), norm)
    check(nk.Stream(x, draw(3, 64)), norm)
    check(nk.Stream(draw(4, 32)), Norm(draw(32)))
    check(nk.Stream(x), Norm(draw(32)))
    check(nk.Stream(x), Norm(draw(128)[::2]))
    check(nk.Stream(x), norm, draw(8))
    check(nk.Stream(x), norm, draw(64)[::2])
    agree(fast.linear, definition.linear, draw(4, 32))
    agree(fast.linear, definition.linear, x, draw(8))
    agree(fast.linear, definition.linear, x, draw(64)[::2])
    assert result(fast.logits, draw(4, 32)) is None


def first(call, *arguments):
    return call(*arguments)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "table",
    [draw(8, 16).to(BF16), draw(8, 16).double(), draw(8, 32)[:, ::2], draw(8, 32), draw(8, 7)],
    ids=["bf16", "fp64", "strided", "wide", "odd"],
)
def test_a_table_of_angles_is_read_as_it_lies(table, dtype):
    x, positions = draw(4, 2, 16, dtype=dtype), torch.arange(4)
    agree(rope.apply_rope, nk.reference.apply_rope, x, positions, table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "positions",
    [[5, 6, 7, 8], [-1, 0, 1, 2], [0, 1], [0.0, 1.0, 2.0, 3.0], [2**40] * 4],
    ids=["past", "negative", "few", "floats", "far"],
)
def test_positions_without_angles_are_refused(positions, dtype):
    x, positions, table = draw(4, 2, 16, dtype=dtype), torch.tensor(positions), draw(8, 16)
    assert result(rope.apply_rope, x, positions, table) is None
    assert result(nk.reference.apply_rope, x, positions, table) is None


def cache(dtype):
    layout = nk.KVLayout(2, 16, 2, 16, dtype, "HND")
    return layout.allocate("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.tensor([0, 1, 2, 32])},
        {"slots": torch.tensor([0, 1])},
        {"positions": torch.tensor([5, 6, 7, 8])},
        {"positions": torch.tensor([-1, 0, 1, 2])},
        {"positions": torch.arange(2)},
        {"table": draw(8, 32)},
        {"table": draw(8, 7)},
        {"width": 96},
        {"width": 160},
        {"weights": (draw(8), draw(8))},
        {"weights": (draw(16), None)},
    ],
    ids="-".join,
)
def test_queries_and_keys_that_do_not_fit_are_refused(change, dtype):
    weights = [None if w is None else w.to(dtype) for w in change.get("weights", (None, None))]
    positions, slots = (change.get(name, torch.arange(4)) for name in ("positions", "slots"))
    qkv, kv = draw(4, change.get("width", 128), dtype=dtype), cache(dtype)
    given = (qkv, *weights, 1e-6, positions, change.get("table", draw(8, 16)), kv, slots, 4)
    assert result(rope.qk_norm_rope_store, *given) is None
    assert result(nk.reference.qk_norm_rope_store, *given) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_tables_and_weights_are_read_in_order(dtype):
    qkv, slots = draw(4, 128, dtype=dtype), torch.tensor([3, -1, 20, 31, 0, 0, 0, 0])[:4]
    weight, positions = draw(32, dtype=dtype)[::2], torch.tensor([0, 0, 3, 0, 5, 0, 7, 0])[::2]
    results = []
    for call in (rope.qk_norm_rope_store, nk.reference.qk_norm_rope_store):
        kv = cache(dtype)
        q = call(qkv, weight, weight, 1e-6, positions, draw(8, 32)[:, ::2], kv, slots, 4)
        results.append((q, kv.k, kv.v))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_experts_mix_tokens_of_their_width_by_any_routing():
    plain = nk.DenseExperts(draw(4, 64, 32), draw(4, 32, 32, seed=1))
    x, routing = draw(3, 32), nk.route(draw(3, 4), 2, True)
    fast = experts.dense_experts(plain)
    assert isinstance(fast, experts.CppExperts)
    want = fast.mix(x, routing)
    wide = nk.Routing(routing.experts.long(), routing.weights.double())
    torch.testing.assert_close(fast.mix(x, wide), want)
    assert result(fast.mix, draw(3, 16), routing) is None
    assert result(fast.mix, draw(5, 32), routing) is None
    for top_k in (5, 0):
        for got, want in zip(
            experts.route(draw(3, 4), top_k, False)[:2],
            nk.reference.route(draw(3, 4), top_k, False)[:2],
            strict=True,
        ):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 4, 16), (3, 2, 32), (12, 32)])
def test_attention_takes_the_shape_that_it_was_built_for(shape):
    attention = nk.attention_backend(
        "cpu",
        device="cpu",
        dtype=FP32,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        block_size=16,
    )
    kv = attention.kv_layout(2, FP32).allocate("cpu")
    step = nk.AttentionMetadata(
        query_start=torch.tensor([0, 3], dtype=torch.int32),
        context_lens=torch.tensor([3], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        max_query_len=3,
        max_context_len=3,
        num_decodes=0,
    )
    given = (kv, step, attention.plan(step)[None], nk.AttentionSpec(32**-0.5))
    assert attention.attend(draw(3, 4, 32), *given).shape == (3, 4, 32)
    with pytest.raises(ValueError, match=r"must be \[T, 4, 32\]"):
        attention.attend(draw(*shape), *given)
