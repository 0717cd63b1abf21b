"""The surface of the package, and that a CPU needs no Triton."""

import inspect
import subprocess
import sys
import types

import nv_kernels as nk
import pytest
import torch
from nv_kernels import dispatch

OPS = [name for name in nk.reference.__all__ if name != "attention"]


def test_surface():
    assert set(nk.__all__) == {
        *OPS,
        "AttentionBackend",
        "AttentionMetadata",
        "AttentionShape",
        "DecodeRows",
        "FROM_SLOT",
        "KVCache",
        "KVLayout",
        "LayerWeights",
        "LogitControls",
        "PeerBuffers",
        "PromptRows",
        "RankSum",
        "RowTables",
        "SamplingTensors",
        "Stream",
        "TokenRing",
        "attention_backend",
        "attention_input",
        "attention_output",
        "compile_ahead",
        "normalise",
        "reference",
    }
    assert all(hasattr(nk, name) for name in nk.__all__)


@pytest.mark.parametrize("name", OPS)
def test_signature_and_document_are_the_definition_s(name):
    op, definition = getattr(nk, name), getattr(nk.reference, name)
    assert inspect.signature(op) == inspect.signature(definition)
    assert op.__doc__ == definition.__doc__


def test_ops_and_backend_on_a_cpu_import_no_triton():
    code = """
import sys, torch
before = {name for name in sys.modules if name.startswith("triton")}
import nv_kernels as nk
nk.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)
nk.attention_backend("auto", device="cpu", dtype=torch.float32, num_q_heads=1, num_kv_heads=1,
                     head_dim=64, block_size=16)
after = {name for name in sys.modules if name.startswith("triton")}
assert after == before, after - before
assert not any(name.startswith("nv_kernels.triton") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a dependency on Linux alone")
def test_listed_ops_are_there_with_the_definition_s_parameters():
    code = """
import importlib, inspect
from nv_kernels import dispatch, reference
for name, module in dispatch.TRITON_OPS.items():
    op = getattr(importlib.import_module(f"nv_kernels.triton.{module}"), name)
    assert list(inspect.signature(op).parameters) == list(
        inspect.signature(getattr(reference, name)).parameters
    ), name
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class OnCuda(torch.Tensor):
    """A tensor that says it lives on a card."""

    @property
    def device(self):
        return torch.device("cuda")


def test_cuda_tensors_take_the_listed_op_and_else_the_definition(monkeypatch):
    def definition(x):
        return "definition"

    op = dispatch.dispatched(definition)
    assert op(torch.ones(1)) == "definition"
    assert op(torch.ones(1).as_subclass(OnCuda)) == "definition"

    def listed(x):
        return "definition"

    monkeypatch.setitem(dispatch.TRITON_OPS, "listed", "made_up")
    made_up = types.ModuleType("nv_kernels.triton.made_up")
    made_up.listed = lambda x: "triton"
    monkeypatch.setitem(sys.modules, "nv_kernels.triton.made_up", made_up)
    op = dispatch.dispatched(listed)
    assert op(torch.ones(1)) == "definition"
    assert op(torch.ones(1).as_subclass(OnCuda)) == "triton"
