"""Products whose rows do not depend on the others: on a CPU, on a card and in the interpreter."""

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.linear.heights import agreeing_heights, multiply_in_blocks
from nv_kernels.linear.triton import batch_invariant as invariant

TOKENS = (1, 2, 5, 16, 17, 33, 65, 100)
# The demo model's four, a tiny one, odd sizes, one with many columns, some with few outputs.
SHAPES = [(960, 576), (576, 1536), (192, 64), (7, 33), (100, 300), (2049, 128), (64, 3072),
          (7, 31), (11, 12), (5, 1024)]  # fmt: skip


def draw(*shape, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
@pytest.mark.parametrize("ops", [nk, nk.reference], ids=["compiled", "torch"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_on_a_cpu(rows, columns, dtype, packed, ops, num_threads):
    x = draw(160, columns, dtype=dtype)
    weight = draw(rows, columns, dtype=dtype, seed=1) * columns**-0.5
    bias = draw(rows, dtype=dtype, seed=2)
    truth = x.double() @ weight.double().T
    laid_out = ops.pack_weight(weight) if packed else weight
    whole = ops.batch_invariant_linear(x, laid_out)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(whole.double(), truth, rtol=rtol, atol=rtol)
    biased = ops.batch_invariant_linear(x, laid_out, bias)
    torch.testing.assert_close(biased.double(), truth + bias, rtol=rtol, atol=2 * rtol)
    for tokens in TOKENS:
        for start in (1, 160 - tokens):
            part = x[start : start + tokens]
            rows_of = slice(start, start + tokens)
            assert torch.equal(ops.batch_invariant_linear(part, laid_out), whole[rows_of])
            assert torch.equal(ops.batch_invariant_linear(part, laid_out, bias), biased[rows_of])
    assert ops.batch_invariant_linear(x[:0], laid_out).shape == (0, rows)
    assert torch.equal(ops.batch_invariant_partials(x, laid_out), whole)


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
def test_plain_linear_in_fp32_is_batch_invariant():
    x, weight = draw(70, 576), draw(960, 576, seed=1)
    whole = nk.linear(x, weight)
    assert all(torch.equal(nk.linear(x[:n], weight), whole[:n]) for n in (1, 2, 15, 69))


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
def test_heights_that_disagree_are_not_mixed():
    def product(block, out):
        """A library whose kernel changes above 8 rows."""
        out.copy_(block.sum(1, keepdim=True) if len(block) > 8 else block.flip(1).cumsum(1)[:, -1:])

    heights = agreeing_heights(product, 1000, 16)
    assert heights == (64, 32, 16)
    used = []

    def watched(block, out):
        used.append(len(block))
        product(block, out)

    x = draw(70, 1000)
    out = multiply_in_blocks(x, 16, watched, heights)
    assert used == [64, 16]
    assert torch.equal(multiply_in_blocks(x[69:], 16, watched, heights), out[69:])
    assert agreeing_heights(lambda block, out: out.zero_(), 10, 16) == (64, 32, 16, 8, 4, 2)
    assert agreeing_heights(lambda block, out: out.zero_(), 10, 15) == (1,)  # too few outputs


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
def test_rows_whose_place_matters_are_multiplied_alone():
    def product(block, out):
        """A library whose kernel computes pairs of rows, from the last row on."""
        out.copy_(block.sum(1, keepdim=True))
        out[1::2] = block[1::2].flip(1).cumsum(1)[:, -1:]

    heights = agreeing_heights(product, 1000, 16)
    assert heights == (1,)
    x = draw(70, 1000)
    out = multiply_in_blocks(x, 16, product, heights)
    assert torch.equal(out, x.sum(1, keepdim=True).expand(-1, 16))


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


ON_CARD = [(192, 160), (100, 1100)] if INTERPRETING else [
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (5000, 1024), (96, 200), (4096, 12288),
]  # fmt: skip


def summed(y, dtype):
    return y if y.dim() == 2 else y.sum(0) if y.shape[0] == 1 else in_order(y).to(dtype)


def in_order(partials):
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), ON_CARD)
def test_on_a_card(rows, columns, dtype):
    most = 70 if INTERPRETING else 1000
    x = draw(most, columns, dtype=dtype, device=DEVICE)
    weight = draw(rows, columns, dtype=dtype, seed=1, device=DEVICE) * columns**-0.5
    bias = draw(rows, dtype=dtype, seed=2, device=DEVICE)
    truth = x.double() @ weight.double().T
    whole = invariant.batch_invariant_linear(x, weight)
    rtol = {torch.float32: 3e-5, torch.bfloat16: 2**-7}[dtype]  # sums over 12,288 columns
    torch.testing.assert_close(whole.double(), truth, rtol=rtol, atol=rtol)
    biased = invariant.batch_invariant_linear(x, weight, bias)
    torch.testing.assert_close(biased.double(), truth + bias, rtol=rtol, atol=2 * rtol)
    logits = invariant.batch_invariant_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), truth, rtol=3e-5, atol=3e-5)
    if not INTERPRETING:  # the interpreter truncates
        assert torch.equal(logits.to(dtype), whole)
    for tokens in (1, 2, 17, 65) if INTERPRETING else (*TOKENS, 129, 256, 257, 600):
        for start in (0, most - tokens):
            part, want = x[start : start + tokens], whole[start : start + tokens]
            assert torch.equal(invariant.batch_invariant_linear(part, weight), want), tokens
            scores = invariant.batch_invariant_logits(part, weight)
            assert torch.equal(scores, logits[start : start + tokens]), tokens
            partials = invariant.batch_invariant_partials(part, weight)
            assert torch.equal(summed(partials, dtype), want), (tokens, partials.shape)


@on_device
def test_a_norm_that_sums_partials_sees_the_same_product():
    dtype = torch.bfloat16
    x, residual = (
        draw(9, 1100, dtype=dtype, device=DEVICE),
        draw(9, 100, dtype=dtype, device=DEVICE),
    )
    weight = draw(100, 1100, dtype=dtype, seed=1, device=DEVICE)
    scale = draw(100, dtype=dtype, seed=2, device=DEVICE)
    partials = invariant.batch_invariant_partials(x, weight)
    assert partials.dim() == 3
    whole = invariant.batch_invariant_linear(x, weight)
    from nv_kernels.elementwise.triton_norm import add_rms_norm  # noqa: PLC0415  # Triton

    for a, b in zip(
        add_rms_norm(partials, residual, scale, 1e-6),
        add_rms_norm(whole, residual, scale, 1e-6),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.skipif(INTERPRETING, reason="needs no kernel")
def test_parts_depend_on_the_weight_alone():
    cut = invariant.HALF
    assert invariant.num_parts(151_936, 1024, cut) == 1
    assert invariant.num_parts(1024, 3072, cut) == 6
    assert invariant.num_parts(64, 300, cut) == 1


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("kind", "cut"), [("*bf16", invariant.HALF), ("*fp32", invariant.SINGLE)])
@pytest.mark.parametrize("fp32_out", [False, True], ids=["product", "partials, logits"])
def test_compiles_ahead_of_time(fp32_out, kind, cut, capability):
    types = {"x": kind, "weight": kind, "bias": kind, "out": "*fp32" if fp32_out else kind}
    counts = dict.fromkeys(("M", "N", "parts_each"), "i32")
    constants = {
        "K": 3072, "COLUMNS": 512, "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k, "GROUP": 8, "STAGES": cut.stages, "BIAS": False, "EVEN": True,
        "PDL": capability >= 90,
    }  # fmt: skip
    kernel = compile_for(
        invariant.batch_invariant_linear_kernel, types | counts, constants, capability,
        (*types, "N"), num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    assert_fits(kernel, capability)
    if capability == 90 and kind == "*bf16":
        assert "wgmma" in kernel.ptx
