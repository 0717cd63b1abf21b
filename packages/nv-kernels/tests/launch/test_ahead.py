"""Kernels compiled before they are launched, by other processes."""

import time

import pytest
import torch
from interpreter import outer_only
from nv_kernels import reference
from nv_kernels.elementwise import triton_norm as norm
from nv_kernels.elementwise.triton_norm import rms_norm
from nv_kernels.launch.ahead import Kernel, compile_ahead, compile_in_parallel
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


def kernel_for(columns):
    """A specialisation of the norm for a card that need not be present."""
    kernel, target = norm.rms_norm_kernel, GPUTarget("cuda", 90, 32)
    names = kernel.arg_names
    types = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"num_rows": "i32", "eps": "fp32"}
    constants = {"E": columns, "BLOCK": 1024, "ROWS": 1, "PDL": True}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return Kernel(source, target, CUDAOptions(arch="sm90"))


@outer_only
def test_other_processes_store_their_results_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [kernel_for(columns) for columns in (900, 901, 902)]
    assert not any(kernel.is_on_disk for kernel in kernels)
    compile_in_parallel(kernels)
    assert all(kernel.is_on_disk for kernel in kernels)
    assert len(list(tmp_path.glob("*/rms_norm_kernel.cubin"))) == 3


@outer_only
def test_a_kernel_that_fails_is_left_to_its_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    whole, broken = kernel_for(903), kernel_for(2000)._replace(target=GPUTarget("cuda", 1, 32))
    compile_in_parallel([whole, broken])  # LLVM aborts the process of the second
    assert whole.is_on_disk
    assert not broken.is_on_disk


@outer_only
def test_processes_that_take_too_long_are_stopped(tmp_path):
    class Slow:
        def compile(self):
            time.sleep(60)

    start = time.monotonic()
    compile_in_parallel([Slow(), Slow(), Slow()], time_limit=0.3)
    assert time.monotonic() - start < 30


@pytest.mark.gpu
def test_nothing_is_launched_and_later_launches_find_their_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.randn(3, 1111, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1111, device="cuda", dtype=torch.bfloat16)
    run = JITFunction.run
    with compile_ahead():
        out = rms_norm(x, weight, 1e-6)
        out.fill_(7)
    assert JITFunction.run is run
    assert (out == 7).all()
    made = sorted(path.parent.name for path in tmp_path.glob("*/rms_norm_kernel.cubin"))
    assert made
    assert list(tmp_path.glob("*/__triton_launcher*"))
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), rtol=0.02, atol=0.02
    )
    assert made == sorted(path.parent.name for path in tmp_path.glob("*/rms_norm_kernel.cubin"))
