"""Norms and the gated activation against their definitions."""

import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels import reference
from nv_kernels.elementwise import triton_gate as activation
from nv_kernels.elementwise import triton_norm as norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 64), (3, 100), (5, 576)) if INTERPRETING else (
    (1, 1024), (3, 100), (256, 1024), (4097, 128), (17, 4096), (5, 8192), (2, 5120), (0, 64)
)  # fmt: skip


def close(actual, expected, largest=1.0, steps=1.0):
    """Assert equality up to `steps` units in the last place, of the largest addend at most."""
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=steps * step, atol=step * largest)


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    close(
        norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), largest=0.05, steps=1.5
    )


@on_device
def test_rms_norm_of_heads():
    x, weight = draw(3, 5, 64, dtype=torch.float32), draw(64, dtype=torch.float32, seed=1)
    close(
        norm.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), largest=0.05, steps=1.5
    )


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [0, 1, 3, 8])
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm(shape, dtype, parts, has_residual):
    x = draw(parts, *shape, dtype=torch.float32) if parts else draw(*shape, dtype=dtype)
    residual = draw(*shape, dtype=dtype, seed=2) if has_residual else None
    weight = draw(shape[-1], dtype=dtype, seed=1)
    before = None if residual is None else residual.clone()
    out, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    if parts:  # the definition does not fix the order of the sum
        ordered = x[0]
        for part in x[1:]:
            ordered = ordered + part
        ordered = ordered.to(dtype)
        close(total, expected_total, largest=16.0)
        expected_total = ordered if residual is None else ordered + residual
    assert torch.equal(total, expected_total)
    # Two roundings: one unit before the weight multiplies, half a unit after.
    close(out, reference.rms_norm(total, weight, 1e-6), largest=0.05, steps=1.5)
    assert out.shape == expected.shape
    if before is not None:
        assert torch.equal(residual, before)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2 * 100), (2, 2 * 1536), (1, 2 * 3072)])
def test_silu_and_mul(shape, dtype):
    x = draw(*shape, dtype=dtype)
    close(activation.silu_and_mul(x), reference.silu_and_mul(x))
    close(activation.gelu_tanh_and_mul(x), reference.gelu_tanh_and_mul(x))


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_by_an_fp32_weight_rounds_once(dtype):
    x, weight = draw(5, 100, dtype=dtype), draw(100, dtype=torch.float32, seed=1)
    residual, parts = draw(5, 100, dtype=dtype, seed=2), draw(3, 5, 100, dtype=torch.float32)
    for part, stream in ((x, None), (x, residual), (parts, residual), (parts, None)):
        ours = norm.add_rms_norm(part, stream, weight, 1e-6, dtype)
        theirs = reference.add_rms_norm(part, stream, weight, 1e-6, dtype)
        close(ours[1], theirs[1], largest=16.0)
        exact = ours[1].float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        for out in (ours[0], reference.rms_norm(ours[1], weight, 1e-6)):
            close(out, exact.to(dtype), largest=0.01, steps=0.6 if dtype != torch.float32 else 1)


@outer_only
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [128, 1024, 8192])
def test_compiles_ahead_of_time(capability, width):
    dependent = capability >= 90
    block, rows, warps = norm._tile(width)
    sizes = {"E": width, "BLOCK": block, "ROWS": rows, "PDL": dependent}
    pointers = ("x", "residual", "weight", "out", "total")
    compiled = compile_for(
        norm.add_rms_norm_kernel,
        dict.fromkeys(pointers, "*bf16") | {"x": "*fp32", "num_rows": "i32", "eps": "fp32"},
        sizes | {"PARTIALS": 8, "HAS_RESIDUAL": True},
        capability,
        divisible=pointers,
        num_warps=warps,
    )
    assert_fits(compiled, capability)
    assert ("griddepcontrol.wait" in compiled.ptx) == dependent
    compiled = compile_for(
        norm.rms_norm_kernel,
        dict.fromkeys(("x", "weight", "out"), "*bf16") | {"num_rows": "i32", "eps": "fp32"},
        sizes,
        capability,
        divisible=("x", "weight", "out"),
        num_warps=warps,
    )
    assert_fits(compiled, capability)
