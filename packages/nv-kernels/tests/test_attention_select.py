"""Which backend a name gives, and what a wrong name says."""

import nv_kernels as nk
import pytest
import torch
from nv_kernels.attention import select

SHAPE = {
    "dtype": torch.float32,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "block_size": 16,
}


def test_auto_on_a_cpu_says_why():
    backend = nk.attention_backend("auto", device="cpu", **(SHAPE | {"dtype": torch.bfloat16}))
    assert backend.name == "torch"
    assert "cpu" in backend.reason
    backend = nk.attention_backend("auto", device="cpu", **SHAPE)
    assert backend.name == "batch_invariant"
    assert "fp32 on 'cpu'" in backend.reason
    assert "name" in nk.attention_backend("torch", device="cpu", **SHAPE).reason


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"'flash'.*auto, triton, torch, flash_attn"):
        nk.attention_backend("flash", device="cpu", **SHAPE)


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_cuda_only_backends_refuse_a_cpu(name):
    with pytest.raises(ValueError, match=f"'{name}' needs a CUDA device.*use 'torch'"):
        nk.attention_backend(name, device="cpu", **SHAPE)


def test_heads_must_divide():
    with pytest.raises(ValueError, match=r"num_q_heads 4 .* num_kv_heads 3"):
        nk.attention_backend("auto", device="cpu", **(SHAPE | {"num_kv_heads": 3}))


def test_a_backend_that_is_not_there_says_so(monkeypatch):
    absent = ("nv_kernels.attention.absent", "Absent")
    monkeypatch.setitem(select.BACKENDS, "flash_attn", absent)
    with pytest.raises(NotImplementedError, match="flash_attn"):
        nk.attention_backend("flash_attn", device="cuda", **SHAPE)
    monkeypatch.setitem(select.BACKENDS, "triton", absent)
    backend = nk.attention_backend("auto", device="cuda", **SHAPE)
    assert backend.name == "torch"
    assert "not built" in backend.reason
