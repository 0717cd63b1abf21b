"""The gated product of many tokens on Hopper against float64; it compiles without a spill."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import INTERPRETING
from nv_kernels.launch.card import is_hopper
from torch.nn import functional

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles, or needs a card")
gated = pytest.importorskip("nv_kernels.linear.triton.hopper_gated")

LIMITS = {torch.bfloat16: 3e-3, torch.float16: 4e-4}  # the result's rounding, with a margin
SETTINGS = [
    gated.GatedSettings(),
    gated.GatedSettings(block_n=64, stages=6, group=16),
    gated.GatedSettings(block_k=32, stages=8),
]


def draw(tokens, columns, features, dtype, device="cuda"):
    """Tokens, and a weight whose gates lie where silu is not linear."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator)
    weight = torch.randn(2 * features, columns, generator=generator) * (2 * columns**-0.5)
    return x.to(device, dtype), weight.to(device, dtype)


def truth(x, weight):
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    return functional.silu(gate) * up


def error(actual, expected):
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def needs_hopper():
    if not is_hopper(torch.empty(1, device="cuda")):
        pytest.skip("needs Hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [512, 1000, 4096 + 17])
@pytest.mark.parametrize(("columns", "features"), [(1024, 3072), (4096, 1536), (192, 128)])
def test_against_float64(columns, features, tokens, dtype):
    needs_hopper()
    x, weight = draw(tokens, columns, features, dtype)
    assert gated.gated_hopper_fits(x, weight)
    y = gated.gated_hopper(x, weight)
    expected = truth(x, weight)
    assert error(y, expected) < LIMITS[dtype]
    assert error(y[-1:], expected[-1:]) < 2 * LIMITS[dtype]
    assert torch.equal(gated.gated_hopper(x, weight), y)


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", SETTINGS)
def test_every_setting(chosen):
    needs_hopper()
    for columns in (64, 1024):
        x, weight = draw(1000, columns, 3072, torch.bfloat16)
        assert error(gated.gated_hopper(x, weight, chosen), truth(x, weight)) < 3e-3


@pytest.mark.gpu
def test_writes_no_row_past_the_last():
    needs_hopper()
    x, weight = draw(1000, 256, 256, torch.bfloat16)
    whole = torch.full((1000 + 128, 256), 7.0, dtype=x.dtype, device="cuda")
    gated.launch(x, weight, whole[:1000], gated.GatedSettings())
    assert error(whole[:1000], truth(x, weight)) < 3e-3
    assert bool((whole[1000:] == 7.0).all())


@pytest.mark.gpu
def test_gates_of_any_size():
    """Gates from -300 to 300: neither an overflow nor a NaN."""
    needs_hopper()
    x = torch.zeros(512, 64, dtype=torch.bfloat16, device="cuda")
    x[:, 0] = torch.linspace(-300, 300, 512)
    weight = torch.zeros(256, 64, dtype=torch.bfloat16, device="cuda")
    weight[:, 0] = 1.0
    for chosen in SETTINGS:
        y = gated.gated_hopper(x, weight, chosen)
        torch.testing.assert_close(y.double(), truth(x, weight), rtol=4e-3, atol=1e-12)


@pytest.mark.gpu
def test_shapes_that_it_does_not_support():
    needs_hopper()
    x, weight = draw(512, 128, 256, torch.bfloat16)
    assert gated.gated_hopper_fits(x, weight)
    assert not gated.gated_hopper_fits(x[:511], weight)
    assert not gated.gated_hopper_fits(x.float(), weight.float())
    assert not gated.gated_hopper_fits(x.half(), weight)
    assert not gated.gated_hopper_fits(x, weight[:384])
    assert not gated.gated_hopper_fits(x[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not gated.gated_hopper_fits(x[:, :64], weight[:, :64])


# Sizes are arguments of the kernel, so one compiled kernel runs every shape.
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("chosen", SETTINGS)
def test_compiles_ahead_of_time(chosen, dtype):
    x, weight = draw(512, 128, 256, dtype, device="cpu")
    kinds = gated.describe(x, weight, torch.empty(512, 256, dtype=dtype), chosen)
    types = dict(zip(("x_desc", "w_desc", "out_desc"), kinds, strict=True))
    types |= dict.fromkeys(("token_tiles", "feature_tiles", "num_chunks"), "i32")
    constants = {"BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k, "STAGES": chosen.stages}
    constants |= {"GROUP": chosen.group, "PDL": True}
    compiled = compile_for(gated.gated_hopper_kernel, types, constants, 90, num_warps=4)
    assert_fits(compiled, 90)
    assert f"wgmma.mma_async.sync.aligned.m64n{2 * chosen.block_n}k16" in compiled.ptx
    # The weight's loads start before the wait for the kernel that writes x.
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    assert "cp.async.bulk.tensor.3d" in before
    assert "cp.async.bulk.tensor.2d.shared" not in before
    assert "cp.async.bulk.tensor.2d.shared" in after
