"""Which backend a name selects, and the error for a wrong name."""

import importlib

import nv_kernels as nk
import pytest
import torch
from nv_kernels.attention import cpp as cpu
from nv_kernels.attention import select
from nv_kernels.cpp.library import find_compiler

SHAPE = {
    "dtype": torch.float32,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "block_size": 16,
}


def on_a_cpu(name="auto", **change):
    return nk.attention_backend(name, device="cpu", **(SHAPE | change))


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_auto_on_a_cpu_takes_its_own_kernels():
    assert (on_a_cpu().name, on_a_cpu().reason) == ("cpu", "auto: the device is 'cpu'")
    half = on_a_cpu(dtype=torch.float16)
    assert half.name == "torch"
    assert "dtype is torch.float16: it must be" in half.reason
    odd = on_a_cpu(head_dim=72)
    assert odd.name == "batch_invariant"
    assert "head_dim is 72: attention backend 'cpu' needs a multiple of 16" in odd.reason
    with pytest.raises(ValueError, match=r"head_dim is 72: .* a multiple of 16; use 'torch'"):
        on_a_cpu("cpu", head_dim=72)
    with pytest.raises(
        ValueError, match=r"device is 'cuda': .*'cpu' needs a cpu device; use 'torch'"
    ):
        nk.attention_backend("cpu", device="cuda", **SHAPE)


def test_auto_without_a_compiler_gives_the_reason(monkeypatch):
    monkeypatch.setattr(cpu, "kernel", lambda *_: None)
    monkeypatch.setattr(cpu, "why_not", lambda: "no C++ compiler was found")
    assert on_a_cpu(dtype=torch.bfloat16).name == "torch"
    single = on_a_cpu()
    assert single.name == "batch_invariant"
    assert "no C++ compiler was found" in single.reason
    assert "name" in on_a_cpu("torch").reason


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"'flash'.*auto, triton, cpu, torch, flash_attn"):
        nk.attention_backend("flash", device="cpu", **SHAPE)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_cuda_only_backends_refuse_a_cpu(name):
    with pytest.raises(ValueError, match=f"'{name}' needs a cuda device.*use 'torch'"):
        nk.attention_backend(name, device="cpu", **SHAPE)


@pytest.mark.parametrize("what", ["num_q_heads", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("size", [0, -4])
def test_sizes_below_one_are_named(what, size):
    with pytest.raises(ValueError, match=rf"{what} is {size}: it must be at least 1"):
        on_a_cpu(**{what: size})


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"])
def test_queries_are_of_a_floating_point_dtype(dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype!r}: .* a floating-point torch.dtype"):
        on_a_cpu(dtype=dtype)


def test_heads_must_divide():
    with pytest.raises(ValueError, match=r"num_q_heads is 4: .* num_kv_heads, 3"):
        nk.attention_backend("auto", device="cpu", **(SHAPE | {"num_kv_heads": 3}))


def test_a_backend_that_is_not_built_is_an_error(monkeypatch):
    absent = ("nv_kernels.attention.absent", "Absent")
    monkeypatch.setitem(select.BACKENDS, "flash_attn", absent)
    with pytest.raises(NotImplementedError, match="flash_attn"):
        nk.attention_backend("flash_attn", device="cuda", **SHAPE)
    monkeypatch.setitem(select.BACKENDS, "triton", absent)
    backend = nk.attention_backend("auto", device="cuda", **SHAPE)
    assert backend.name == "torch"
    assert "not built" in backend.reason


@pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
def test_auto_passes_over_a_backend_that_lacks_a_feature(monkeypatch):
    specs = [nk.AttentionSpec(1.0), nk.AttentionSpec(1.0, window=4)]
    refusal = lambda _, spec: "'cpu' has no window" if spec.window else None  # noqa: E731
    monkeypatch.setattr(cpu.CPUAttention, "refusal", refusal)
    assert on_a_cpu(specs=specs[:1]).name == on_a_cpu("cpu", specs=specs[:1]).name == "cpu"
    backend = on_a_cpu(specs=specs, dtype=torch.bfloat16)
    assert (backend.name, backend.reason) == ("torch", "auto: 'cpu' has no window")
    with pytest.raises(ValueError, match=r"^'cpu' has no window$"):
        on_a_cpu("cpu", specs=specs)


@pytest.mark.parametrize(
    ("name", "is_capturable", "compiles"),
    [
        ("triton", True, True),
        ("batch_invariant", False, False),
        ("flash_attn", True, False),
        ("torch", False, False),
        ("cpu", False, False),
    ],
)
def test_is_capturable_and_compiles(name, is_capturable, compiles):
    module, cls = select.BACKENDS[name]
    backend = getattr(importlib.import_module(module), cls)
    assert (backend.is_capturable, backend.compiles) == (is_capturable, compiles)


def test_batch_invariant_on_a_card_is_captured_and_compiled_ahead():
    module, cls = select.BATCH_INVARIANT_ON_A_CARD
    backend = getattr(importlib.import_module(module), cls)
    assert (backend.is_capturable, backend.compiles) == (True, True)
