"""Products of few tokens by a weight, and the ops of a layer, against their definitions."""

from dataclasses import replace
from functools import partial

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from decoder_layer import RMS, Layer, after_attention, before_attention
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.linear.triton import logits
from nv_kernels.linear.triton import product as linear
from nv_kernels.linear.triton.dot import dot, dot_kernel
from nv_kernels.linear.triton.gemv import gemv, gemv_kernel
from nv_kernels.linear.triton.weight import TritonDense
from nv_kernels.linear.tuned import TUNED, Dot, Gemv, Library, Many, Slab, choose
from nv_kernels.linear.weight import Dense
from torch.nn import functional

card_only = pytest.mark.skipif(INTERPRETING, reason="needs a card")
HALVES = (torch.bfloat16, torch.float16)


def draw(*shape, dtype=torch.bfloat16, seed=0, scale=1.0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def pair(tokens, rows, columns, dtype=torch.bfloat16):
    return (draw(tokens, columns, dtype=dtype),
            draw(rows, columns, dtype=dtype, seed=1, scale=columns**-0.5))  # fmt: skip


def error(actual, expected):
    actual = actual.double()
    expected = expected.double()
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


def truth(x, weight, gated=False):
    y = x.double() @ weight.double().T
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    return y


def summed(y):
    return y.float().sum(0) if y.dim() == 3 else y


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("rows", "columns", "form"),
    [(12, 300, Gemv(8, 256, 4)), (16, 512, Gemv(4, 256, 2)), (7, 96, Gemv(1, 128, 1))],
)
def test_gemv(rows, columns, form, tokens, dtype):
    x, weight = pair(tokens, rows, columns, dtype)
    residual, bias = draw(tokens, rows, dtype=dtype, seed=2), draw(rows, dtype=dtype, seed=3)
    norm = draw(columns, dtype=dtype, seed=4)
    assert error(gemv(form, x, weight), truth(x, weight)) < 4e-3
    expected = truth(x, weight) + bias + residual
    assert error(gemv(form, x, weight, bias=bias, residual=residual), expected) < 4e-3
    normed = functional.rms_norm(x.double(), (columns,), norm.double(), 1e-6)
    assert error(gemv(form, x, weight, norm=(norm, 1e-6)), truth(normed, weight)) < 4e-3
    pairs = draw(2 * rows, columns, dtype=dtype, seed=5, scale=columns**-0.5)
    assert error(gemv(form, x, pairs, gated=True), truth(x, pairs, gated=True)) < 6e-3


@on_device
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "form"),
    [
        (5, 128, 256, Dot(16, 64, 64, 1, 3, True, 4)),
        (5, 192, 256, Dot(16, 64, 64, 4, 2, True, 4, prefetch=not INTERPRETING)),
        (33, 128, 128, Dot(32, 128, 64, 2, 2, False, 4, narrow=True)),
        (17, 100, 128, Dot(32, 64, 64, 1, 2, True, 4)),
    ],
)
def test_dot(tokens, rows, columns, form, dtype):
    x, weight = pair(tokens, rows, columns, dtype)
    y = dot(form, x, weight)
    assert y.dim() == (3 if form.split_k > 1 else 2)
    assert error(summed(y), truth(x, weight)) < 6e-3
    if form.split_k == 1 and rows % 64 == 0:
        assert error(dot(form, x, weight, gated=True), truth(x, weight, gated=True)) < 6e-3


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [3, 16, 29, 64])
@pytest.mark.parametrize(
    ("rows", "columns", "split_k"), [(256, 512, 2), (1024, 3072, 6), (4096, 1024, 1)]
)
def test_slab(tokens, rows, columns, split_k, dtype):
    module = linear.gluon_module("slab")
    if module is None or not linear.is_hopper(draw(1)):
        pytest.skip("needs Gluon and Hopper")
    x, weight = pair(tokens, rows, columns, dtype)
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    for trigger in (1, 2, 3):
        form = Slab(block_m, split_k, trigger=trigger)
        assert error(summed(module.slab(form, x, weight)), truth(x, weight)) < 4e-3
    pairs = draw(6144, 1024, dtype=dtype, seed=5, scale=2**-5)
    x = draw(tokens, 1024, dtype=dtype)
    for half in (24, 32):
        y = module.slab(Slab(block_m, 1, half), x, pairs, gated=True)
        assert error(y, truth(x, pairs, gated=True)) < 6e-3


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "form",
    [
        Many(32, 1, 2, 4, 8, trigger=3),
        Many(64, 1, 2, 2, 8, narrow=True),
        Many(64, 3, 3, 4, 4, narrow=True),
        Many(128, 1, 3, 1, 5, trigger=1),
        Many(128, 2, 2, 2, 4),
    ],
)
def test_many(form, dtype):
    module = linear.gluon_module("many")
    if module is None or not linear.is_hopper(draw(1)):
        pytest.skip("needs Gluon and Hopper")
    limit = 6e-3 if form.narrow else 4e-3
    for tokens in (1, form.piece, form.piece * form.pieces - 3, form.piece * form.pieces + 5):
        # 15 and 10 tiles of rows, the last of which is not whole
        x, weight = pair(tokens, 1856, 1024, dtype)
        y = module.many(form, x, weight)
        assert y.dim() == (3 if form.split_k > 1 else 2)
        assert error(summed(y), truth(x, weight)) < limit
        assert error(summed(y)[-1:], truth(x, weight)[-1:]) < 2 * limit
        assert torch.equal(module.many(form, x, weight), y)
        whole = replace(form, split_k=1)
        y = module.many(whole, x, weight, gated=True)
        assert error(y, truth(x, weight, gated=True)) < 6e-3
        y = module.many(whole, x, weight, dtype=torch.float32)
        assert error(y, truth(x, weight)) < 1e-5


@pytest.mark.gpu
@card_only
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 31, 64, 100, 192, 256, 1000])
def test_every_tuned_shape(tokens):
    shapes = {(rows, columns, gated) for _, _, rows, columns, gated in TUNED}
    for rows, columns, gated in sorted(shapes):
        x, weight = pair(tokens, rows, columns)
        y = linear.gated_linear(x, weight) if gated else linear.linear_partials(x, weight)
        assert error(summed(y), truth(x, weight, gated)) < 8e-3, (rows, columns, gated)
        if not gated:
            again = linear.linear_partials(x, weight)
            assert torch.equal(again, y)
            assert error(linear.linear(x, weight), truth(x, weight)) < 4e-3


def assert_unrounded(logits, x, weight):
    """Assert fp32 logits with errors smaller than a rounding to 16 bits."""
    assert logits.dtype == torch.float32
    assert error(logits, truth(x, weight)) < 1e-5


@on_device
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 2] if INTERPRETING else [1, 2, 3, 16, 64, 65, 256, 300])
@pytest.mark.parametrize(
    ("vocabulary", "columns"), [(100, 72), (128, 128)] + [(151_936, 1024)] * (not INTERPRETING)
)
def test_logits_are_not_rounded(vocabulary, columns, tokens, dtype, monkeypatch):
    monkeypatch.setattr(logits, "is_rounded", lambda *_: False)
    x, weight = pair(tokens, vocabulary, columns, dtype)
    assert_unrounded(logits.logits(x, weight), x, weight)


@on_device
@pytest.mark.parametrize(
    ("vocabulary", "columns", "form"),
    [(128, 256, Dot(16, 64, 64, 1, 3, True, 4)), (100, 128, Dot(32, 64, 64, 1, 2, False, 4))],
)
def test_logits_by_dots_are_not_rounded(vocabulary, columns, form, monkeypatch):
    monkeypatch.setattr(logits, "form_for", lambda *_: form)
    x, weight = pair(5, vocabulary, columns)
    assert_unrounded(logits.logits(x, weight), x, weight)


@on_device
def test_logits_are_rounded_where_fp32_was_measured_to_cost_more(monkeypatch):
    assert [rows for rows in (1, 16, 17, 64, 65, 256) if logits.is_rounded(rows, 1024)] == [17, 64]
    assert not logits.is_rounded(64, 4096)
    monkeypatch.setattr(logits, "ROUNDED_ROWS", range(2, 3))
    x, weight = pair(2, 100, 72)
    assert logits.logits(x, weight).dtype == x.dtype
    assert logits.logits(x[:1], weight).dtype == torch.float32


@on_device
@pytest.mark.parametrize("tokens", [0, 1, 2] if INTERPRETING else [0, 1, 2, 9, 64, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(100, 72), (64, 128)])
def test_linear_of_any_shape(tokens, rows, columns, dtype):
    x, weight = pair(tokens, rows, columns, dtype)
    bias = draw(rows, dtype=dtype, seed=3)
    torch.testing.assert_close(
        linear.linear(x, weight, bias), reference.linear(x, weight, bias), rtol=2e-2, atol=2e-2
    )
    if tokens and not (INTERPRETING and dtype == torch.float32):
        norm = RMS(draw(columns, dtype=dtype, seed=4), 1e-6)
        expected = reference.linear(reference.rms_norm(x, *norm), weight)
        actual, _ = TritonDense(weight).norm_linear(nk.Stream(x), norm)
        torch.testing.assert_close(summed(actual).to(dtype), expected, rtol=3e-2, atol=3e-2)


def layer_of(hidden, heads, features, bias=False, device=DEVICE):
    make = partial(draw, device=device)
    return Layer(
        attention_norm=make(hidden, seed=11),
        qkv=make(2 * heads, hidden, seed=12, scale=hidden**-0.5),
        output=make(hidden, heads, seed=13, scale=heads**-0.5),
        mlp_norm=make(hidden, seed=14),
        gate_up=make(2 * features, hidden, seed=15, scale=hidden**-0.5),
        down=make(hidden, features, seed=16, scale=features**-0.5),
        eps=1e-6,
        qkv_bias=make(2 * heads, seed=17) if bias else None,
        output_bias=make(hidden, seed=18) if bias else None,
    )


def plain(layer, hidden):
    """A layer in float64; instead of attention it copies the first half of qkv."""
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value
            for name, value in vars(layer).items()}  # fmt: skip
    x = hidden.double()
    size = (x.shape[1],)
    qkv = functional.linear(
        functional.rms_norm(x, size, wide["attention_norm"], layer.eps),
        wide["qkv"], wide["qkv_bias"],
    )  # fmt: skip
    x = x + functional.linear(qkv[:, : qkv.shape[1] // 2], wide["output"], wide["output_bias"])
    normed = functional.rms_norm(x, size, wide["mlp_norm"], layer.eps)
    return x + truth(normed, wide["gate_up"], gated=True) @ wide["down"].T


def run(weight, layer, hidden, reduce=None):
    stream = nk.Stream(hidden.clone())  # linear_add may overwrite it
    qkv, stream = before_attention(layer, stream, weight)
    qkv = summed(qkv).to(hidden.dtype)
    attended = qkv[:, : qkv.shape[1] // 2].contiguous()
    stream = after_attention(layer, attended, stream, weight, reduce)
    if stream.pending is None:
        return stream.hidden
    return stream.hidden + summed(stream.pending).to(hidden.dtype)


@on_device
@pytest.mark.parametrize("tokens", [1, 2] if INTERPRETING else [1, 2, 3, 16, 17, 64, 65, 256, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_layer(tokens, bias, parallel):
    hidden, heads, features = (64, 96, 80) if INTERPRETING else (1024, 2048, 3072)
    layer = layer_of(hidden, heads, features, bias)
    x = draw(tokens, hidden, seed=19)
    reduce = nk.RankSum(lambda y: y.clone()) if parallel else None
    assert error(run(TritonDense, layer, x, reduce), plain(layer, x)) < 8e-3


@outer_only
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_layer_in_plain_torch(tokens):
    layer = layer_of(64, 96, 80, bias=True, device="cpu")
    x = draw(tokens, 64, seed=19, device="cpu")
    assert error(run(Dense, layer, x), plain(layer, x)) < 8e-3


def test_forms_of_unknown_shapes():
    assert choose(1, 5120, 5120) == Gemv(4, 2048, 8)
    assert choose(40, 1536, 4096) == Slab(64, 8)
    assert choose(16, 2 * 8192, 1024, gated=True) == Slab(16, 1)
    assert choose(300, 4096, 1024) == Library()
    assert choose(16, 100, 1024) == Library()


KINDS = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "norm_weight": "*bf16", "bias": "*bf16",
         "residual": "*bf16", "eps": "fp32", "N": "i32", "M": "i32", "hidden": "*fp32",
         "lora_b": "*bf16", "adapters": "*i32", "lora_stride": "i32"}  # fmt: skip
VOCABULARY = 151_936  # outputs of a head in fp32
POINTERS = ("x", "weight", "out", "norm_weight", "residual", "bias", "N")


def compiled_forms(kind):
    """(key, capability): every tuned shape for sm_90; for the others each form, as a gate or not.

    There only shared memory is compared, which does not depend on the shape.
    """
    keys = [key for key, form in TUNED.items() if isinstance(form, kind)]
    once = {(TUNED[key], key[-1], key[2] == VOCABULARY): key for key in keys}.values()
    return [*((key, 90) for key in keys), *((key, other) for other in (80, 100) for key in once)]


@outer_only
@pytest.mark.parametrize(("key", "capability"), compiled_forms(Gemv))
def test_gemv_compiles_ahead_of_time(key, capability):
    tokens, _, rows, columns, gated = key
    form = TUNED[key]
    types = {name: KINDS[name] for name in gemv_kernel.arg_names if name in KINDS}
    if rows == VOCABULARY:
        types["out"] = "*fp32"
    compiled = compile_for(
        gemv_kernel, types,
        {"K": columns, "BLOCK_K": form.block_k, "ROWS": form.rows, "TOKENS": tokens,
         "NORM": True, "GATED": gated, "RESIDUAL": not gated, "BIAS": False, "EVEN": True,
         "RANK": 0, "PARTS": 0, "SPLITS": 0, "N0": 0, "N1": 0, "PDL": capability >= 90},
        capability, divisible=POINTERS, num_warps=form.warps,
    )  # fmt: skip
    assert_fits(compiled, capability)
    if capability == 90:
        # The kernel must load weights before the wait.
        before, after = compiled.ptx.split("griddepcontrol.wait", 1)
        assert before.count("ld.global") > after.count("ld.global.L1::evict_first")


@outer_only
@pytest.mark.parametrize(("key", "capability"), compiled_forms(Dot))
def test_dot_compiles_ahead_of_time(key, capability):
    _, _, rows, columns, gated = key
    form = TUNED[key]
    types = {name: KINDS[name] for name in dot_kernel.arg_names if name in KINDS}
    if form.split_k > 1 or rows == VOCABULARY:
        types["out"] = "*fp32"
    compiled = compile_for(
        dot_kernel, types,
        {"K": columns, "BLOCK_M": form.block_m, "BLOCK_N": form.block_n,
         "BLOCK_K": form.block_k, "SPLIT_K": form.split_k, "STAGES": form.stages, "GATED": gated,
         "SWAP": form.swap, "EVEN": rows % form.block_n == 0,
         "TRIGGER": form.trigger if capability >= 90 else 0,
         "PREFETCH": form.prefetch and capability >= 90, "RANK": 0, "PARTS": 0, "N0": 0,
         "N1": 0, "BLOCK_S": 0, "BLOCK_W": 0},
        capability, divisible=("x", "weight", "out", "N"), num_warps=form.warps,
    )  # fmt: skip
    assert_fits(compiled, capability)
    if capability == 90:
        assert "wgmma.mma_async" in compiled.ptx


@outer_only
@pytest.mark.parametrize("key", [key for key, form in TUNED.items() if isinstance(form, Slab)])
def test_slab_compiles_ahead_of_time(key):
    slab = pytest.importorskip("nv_kernels.linear.triton.slab")
    _, _, rows, columns, gated = key
    form = TUNED[key]
    share = columns // form.split_k
    x = torch.empty(form.block_m, columns, dtype=torch.bfloat16)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    main = 64 if not gated else 32 if form.half == 32 else 16
    boxes = {"x_desc": (x, form.block_m), "w_desc": (weight, main), "tail_desc": (weight, 8)}
    compiled = compile_for(
        slab.slab_kernel,
        {name: slab.describe(tensor, [size, 64]) for name, (tensor, size) in boxes.items()} |
        {"out": "*fp32" if form.split_k > 1 else "*bf16",
         "M": "i32", "N": "i32", "num_chunks": "i32"},
        {"COLUMNS": share, "BLOCK_M": form.block_m, "GATED": gated, "HALF": form.half,
         "STAGES": slab.num_stages(share, form.block_m), "TRIGGER": form.trigger},
        90, divisible=("out", "N"), num_warps=4,
    )  # fmt: skip
    assert_fits(compiled, 90)
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert "cp.async.bulk.tensor" in before
    assert "wgmma.mma_async" in after


@outer_only
@pytest.mark.parametrize("key", [key for key, form in TUNED.items() if isinstance(form, Many)])
def test_many_compiles_ahead_of_time(key):
    many = pytest.importorskip("nv_kernels.linear.triton.many")
    _, most, rows, columns, gated = key
    form = TUNED[key]
    dtype = torch.float32 if form.split_k > 1 and not form.narrow else torch.bfloat16
    x = torch.empty(most, columns, dtype=torch.bfloat16)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    out = torch.empty(form.split_k, most, rows // 2 if gated else rows, dtype=dtype)
    described = many.describe_all(form, x, weight, out, gated)
    compiled = compile_for(
        many.many_kernel,
        dict(zip(("x_desc", "w_desc", "out_desc"), described, strict=True)) |
        {"out": "*fp32" if dtype == torch.float32 else "*bf16", "M": "i32", "N": "i32"},
        {"COLUMNS": columns // form.split_k, "PIECES": form.pieces, "GROUPS": form.groups,
         "GATED": gated, "STAGES": form.stages, "TRIGGER": form.trigger,
         "REGISTERS": form.group_registers(many.LOADS.value)},
        90, divisible=("out", "N"), num_warps=4, maxnreg=form.registers,
    )  # fmt: skip
    assert_fits(compiled, 90)
    assert compiled.registers <= form.registers  # all programs' threads can start
    # The loop has no first chunk of its own: see the kernel.
    assert compiled.ptx.count("wgmma.mma_async") == 4 * form.pieces * form.groups
    # The weight's loads start before the wait for the kernel that writes x.
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert f"cp.async.bulk.tensor.{4 if gated else 2}d.shared" in before
    assert after.count("cp.async.bulk.tensor.2d.shared") >= form.pieces
