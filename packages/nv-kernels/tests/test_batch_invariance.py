"""The other ops on a CPU compute rows one by one, for any number of rows and threads."""

import nv_kernels as nk
import pytest
import torch

WIDTH = 96 * 7


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rms_norm(x):
    return nk.rms_norm(x, weight(x), 1e-6)


def add_rms_norm(x):
    return nk.add_rms_norm(x, x.flip(1), weight(x), 1e-6)[0]


def fp32_norm(x):
    return nk.add_rms_norm(x, x.flip(1), weight(x).float(), 1e-6)[0]


def head_norm(x):
    return nk.rms_norm(x.view(len(x), -1, 32), weight(x)[:32], 1e-6).flatten(1)


def rope(x):
    angles = torch.arange(300)[:, None] * torch.tensor([1.0, 0.37, 0.11, 0.01])
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.full((len(x),), 211)
    return nk.apply_rope(x.view(len(x), -1, 8), positions, table).flatten(1)


def log_softmax(x):
    return torch.log_softmax(x, dim=-1, dtype=torch.float32)


def weight(x):
    return torch.linspace(0.5, 2, x.shape[1]).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    [
        *(rms_norm, add_rms_norm, fp32_norm, head_norm, rope, log_softmax),
        *(nk.batch_invariant_silu_and_mul, nk.gelu_tanh_and_mul),
    ],
)
def test_rows_do_not_depend_on_each_other(op, dtype, num_threads):
    x = torch.randn(301, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = op(x)
    for rows in (1, 2, 3, 7, 64, 100, 300):
        for start in (0, 1, 301 - rows):
            assert torch.equal(op(x[start : start + rows]), whole[start : start + rows]), rows


def test_the_gate_is_the_definition_s():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    torch.testing.assert_close(
        nk.batch_invariant_silu_and_mul(x), nk.silu_and_mul(x), rtol=2**-7, atol=0
    )
    single = x.float()
    gate, up = single.chunk(2, dim=-1)
    torch.testing.assert_close(nk.silu_and_mul(single), torch.nn.functional.silu(gate) * up)
