"""The surface of the package, and that a CPU needs no Triton."""

import inspect
import subprocess
import sys
import types

import nv_kernels as nk
import pytest
import torch
from nv_kernels.op import Op, op

OPS = [name for name, each in vars(nk).items() if isinstance(each, Op)]


def test_surface():
    assert set(nk.__all__) == {
        *OPS,
        "AttentionBackend",
        "AttentionMetadata",
        "AttentionShape",
        "AttentionSpec",
        "Arithmetic",
        "Blocks",
        "DenseExperts",
        "Experts",
        "FROM_SLOT",
        "Fp8",
        "Gate",
        "Grouped",
        "Int8",
        "KVCache",
        "KVLayout",
        "LogitControls",
        "LoraPlan",
        "LoraWeights",
        "NO_ADAPTER",
        "Norm",
        "PeerBuffers",
        "Quantized",
        "QuantizedExperts",
        "RankSum",
        "Routing",
        "RowTables",
        "SamplingTensors",
        "Scorer",
        "StepRows",
        "Stream",
        "TokenRing",
        "Weight",
        "add_pending",
        "arithmetic",
        "attention_backend",
        "cache_path",
        "compile_ahead",
        "lora_tile",
        "norm_pending",
        "normalise",
        "reference",
        "scale_pending",
    }
    assert all(hasattr(nk, name) for name in nk.__all__)


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_signature_and_docstring_of_its_definition(name):
    each, definition = getattr(nk, name), getattr(nk.reference, name)
    assert inspect.signature(each) == inspect.signature(definition)
    assert each.__doc__ == definition.__doc__


def test_reference_has_every_definition_and_attention():
    assert vars(nk.reference).keys() == {*OPS, "attention"}
    with pytest.raises(AttributeError, match="KVCache is not the name of an op"):
        _ = nk.reference.KVCache


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
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a dependency on Linux alone")
def test_every_version_exists_with_the_definition_s_parameters():
    code = """
import importlib, inspect
import nv_kernels as nk
from nv_kernels.op import Op
versions = 0
for name, op in list(vars(nk).items()):
    for module in op.modules.values() if isinstance(op, Op) else ():
        version = getattr(importlib.import_module(module), name)
        assert list(inspect.signature(version).parameters) == list(
            inspect.signature(op.definition).parameters
        ), (module, name)
        versions += 1
assert versions > 25
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class OnCuda(torch.Tensor):
    """A tensor whose device is a card."""

    @property
    def device(self):
        return torch.device("cuda")


def test_a_tensor_runs_its_device_s_version_or_the_definition(monkeypatch):
    def double(x):
        return "definition"

    on_cpu, on_card = torch.ones(1), torch.ones(1).as_subclass(OnCuda)
    plain = op()(double)
    assert (plain(on_cpu), plain(on_card)) == ("definition", "definition")

    made_up = types.ModuleType("nv_kernels.made_up")
    made_up.double = lambda x: "version"
    monkeypatch.setitem(sys.modules, "nv_kernels.made_up", made_up)
    triton, cpp = op(triton="nv_kernels.made_up")(double), op(cpp="nv_kernels.made_up")(double)
    assert (triton(on_cpu), triton(on_card)) == ("definition", "version")
    assert (cpp(on_cpu), cpp(on_card)) == ("version", "definition")
    assert cpp.definition(on_cpu) == "definition"
