"""One token times a weight, from memory to the tensor cores: on a card, and compiled ahead."""

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from nv_kernels.launch.card import is_hopper
from nv_kernels.linear.triton.product import gluon_module
from nv_kernels.linear.triton.weight import TritonDense
from nv_kernels.linear.tuned import DIRECT, Direct
from torch.nn import functional

EPS = 1e-6
SHAPES = [
    *((rows, columns, gated, form) for (rows, columns, gated), form in DIRECT.items()),
    (48, 256, False, Direct(4, 16)),
    (24, 128, False, Direct(2, 8, chains=1)),
    (32, 512, True, Direct(8, 8, chains=4)),
]


class Norm:
    def __init__(self, weight):
        self.weight, self.eps = weight, EPS


def draw(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().cuda()


def error(actual, expected):
    assert actual.shape == expected.shape
    return float((actual.double() - expected).norm() / expected.norm())


def truth(x, weight, norm=None, gated=False):
    x = x.double()
    if norm is not None:
        x = functional.rms_norm(x, x.shape[1:], norm.double(), EPS)
    y = x @ weight.double().T
    if gated:
        gate, up = y.chunk(2, 1)
        y = functional.silu(gate) * up
    return y


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "gated", "form"), SHAPES)
def test_a_product_is_that_of_the_definition(rows, columns, gated, form):
    x = draw(1, columns, seed=0)
    module = gluon_module("direct")
    if not is_hopper(x) or module is None:
        pytest.skip("needs a Hopper card and this version of Gluon")
    weight, norm = draw(rows, columns, seed=1, scale=columns**-0.5), draw(columns, seed=2)
    assert module.direct_fits(form, x, weight, norm=(norm, EPS), gated=gated)
    assert error(module.direct(form, x, weight, gated=gated), truth(x, weight, gated=gated)) < 6e-3
    normed = module.direct(form, x, weight, norm=(norm, EPS), gated=gated)
    assert error(normed, truth(x, weight, norm, gated)) < 8e-3
    assert torch.equal(normed, module.direct(form, x, weight, norm=(norm, EPS), gated=gated))
    if not gated:
        residual = draw(1, rows, seed=3)
        added = module.direct(form, x, weight, residual=residual)
        assert error(added, truth(x, weight) + residual.double()) < 6e-3


@pytest.mark.gpu
def test_methods_take_it_for_one_token_alone(monkeypatch):
    x = draw(2, 1024, seed=0)
    module = gluon_module("direct")
    if not is_hopper(x) or module is None:
        pytest.skip("needs a Hopper card and this version of Gluon")
    calls, plain = [], module.direct
    monkeypatch.setattr(module, "direct", lambda *a, **k: calls.append(1) or plain(*a, **k))
    norm = Norm(draw(1024, seed=2))
    qkv, gate_up = (TritonDense(draw(rows, 1024, seed=1, scale=1 / 32)) for rows in (4096, 6144))
    output = TritonDense(draw(1024, 2048, seed=4, scale=1 / 45))
    for tokens in (1, 2):
        stream = nk.Stream(x[:tokens].contiguous())
        out, _ = qkv.norm_linear(stream, norm)
        assert error(out, truth(stream.hidden, qkv.values, norm.weight)) < 8e-3
        out, _ = gate_up.norm_gated_linear(stream, norm)
        assert error(out, truth(stream.hidden, gate_up.values, norm.weight, gated=True)) < 8e-3
        attended = draw(tokens, 2048, seed=5)
        total = output.linear_add(attended, stream).hidden
        assert error(total, truth(attended, output.values) + stream.hidden.double()) < 6e-3
        assert len(calls) == 3
    bias = draw(4096, seed=6)
    out, _ = qkv.norm_linear(nk.Stream(x[:1].contiguous()), norm, bias)
    assert error(out, truth(x[:1], qkv.values, norm.weight) + bias.double()) < 8e-3
    assert len(calls) == 3


def test_what_does_not_fit():
    module = pytest.importorskip("nv_kernels.linear.triton.direct")
    x, weight = torch.zeros(1, 1024).bfloat16(), torch.zeros(4096, 1024).bfloat16()
    assert not module.direct_fits(Direct(4, 16), x, weight)  # on a CPU


@pytest.mark.parametrize(("key", "form"), DIRECT.items())
def test_weights_are_loaded_before_the_wait(key, form):
    kernel = pytest.importorskip("nv_kernels.linear.triton.direct").direct_kernel
    _, columns, gated = key
    pointers = {"x": "*i32", "weight": "*i32", "norm_weight": "*i32", "residual": "*bf16",
                "out": "*bf16"}  # fmt: skip
    normed = columns == 1024
    compiled = compile_for(
        kernel, pointers | {"eps": "fp32", "N": "i32"},
        {"K": columns, "WARPS": form.warps, "ROWS": form.rows, "CHAINS": form.chains,
         "NORM": normed, "GATED": gated, "RESIDUAL": not normed},
        90, divisible=(*pointers, "N"), num_warps=form.warps,
    )  # fmt: skip
    assert_fits(compiled, 90)
    before, after = compiled.ptx.split("griddepcontrol.wait", 1)
    loads = columns // form.warps // 32 * (2 if gated or form.rows == 16 else 1)
    assert before.count("L1::evict_first") == loads
    assert "L1::evict_first" not in after
    assert compiled.ptx.count("bar.sync") == 1
