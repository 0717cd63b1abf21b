"""Ops on tensors that start at odd elements, and whose rows have odd lengths or are slices.

A kernel or a library that reads 16 bytes at once must check alignment first. On a CPU the compiled
kernels run, on a card Triton's: there an unaligned read destroys the process's CUDA context.
"""

import nv_kernels as nk
import pytest
import torch
from nv_kernels import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
on_devices = pytest.mark.parametrize("device", DEVICES)
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def draw(*shape, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)


def odd(tensor):
    """The same values, contiguous, one element off an aligned address."""
    memory = tensor.new_empty(tensor.numel() + 1)
    shifted = memory[1:].view(tensor.shape)
    assert shifted.data_ptr() % 16
    return shifted.copy_(tensor)


def sliced(tensor):
    """The same values as columns of a wider tensor whose rows start at odd elements."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 2)
    return wide[..., 1:-1].copy_(tensor)


def close(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=tolerance, atol=tolerance)


@on_devices
@in_dtypes
@pytest.mark.parametrize("view", [odd, sliced])
@pytest.mark.parametrize("width", [64, 99, 1024])
def test_norms_and_gate(width, view, dtype, device):
    x, residual = (view(draw(5, width, dtype=dtype, device=device, seed=i)) for i in range(2))
    weight = odd(draw(width, dtype=dtype, device=device, seed=2))
    close(nk.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
    for got, want in zip(
        nk.add_rms_norm(x, residual, weight, 1e-6),
        reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    ):
        close(got, want, dtype)
    pairs = view(draw(5, 2 * width, dtype=dtype, device=device))
    close(nk.silu_and_mul(pairs), reference.silu_and_mul(pairs), dtype)


# On a Hopper card 3 to 64 rows of the larger weights use the bulk copy, if addresses are aligned.
@on_devices
@in_dtypes
@pytest.mark.parametrize("view", [odd, sliced])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 300])
@pytest.mark.parametrize(("outputs", "columns"), [(299, 77), (256, 512), (1024, 2048)])
def test_products(outputs, columns, rows, view, dtype, device):
    x = view(draw(rows, columns, dtype=dtype, device=device))
    weight = odd(draw(outputs, columns, dtype=dtype, device=device, seed=1, scale=columns**-0.5))
    truth = x.double() @ weight.double().T
    for product in (nk.linear, nk.batch_invariant_linear):
        close(product(x, weight).double(), truth, dtype)
    for head in (nk.logits, nk.batch_invariant_logits):
        found = head(x, weight)
        close(found.double(), truth, found.dtype)


@on_devices
@in_dtypes
@pytest.mark.parametrize("view", [odd, sliced])
@pytest.mark.parametrize("vocabulary", [299, 1027])
def test_logits_of_odd_vocabularies(vocabulary, view, dtype, device):
    logits = view(draw(6, vocabulary, dtype=dtype, device=device, scale=3.0))
    ids = torch.arange(6, device=device)
    for top_p, temperature in ((1.0, 0.0), (1.0, 0.8), (0.9, 0.8)):
        sampling = nk.SamplingTensors(
            temperature=torch.full((6,), temperature, device=device),
            top_k=torch.zeros(6, dtype=torch.int32, device=device),
            top_p=torch.full((6,), top_p, device=device),
            min_p=torch.zeros(6, device=device),
            seeds=ids * 7919,
            positions=ids,
            any_filter=top_p < 1,
        )
        assert torch.equal(nk.sample(logits, sampling), nk.sample(logits.clone(), sampling))
    for got, want in zip(
        nk.top_logprobs(logits, ids, 5), reference.top_logprobs(logits, ids, 5), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@on_devices
@in_dtypes
@pytest.mark.parametrize("view", [odd, sliced])
def test_rope_and_store(view, dtype, device):
    heads, dim = (4, 2), 64
    qkv = view(draw(7, 8 * dim, dtype=dtype, device=device))
    norms = [odd(draw(dim, dtype=dtype, device=device, seed=i)) for i in (1, 2)]
    angles = torch.arange(50)[:, None] * torch.linspace(1, 0.01, dim // 2)
    table = odd(torch.cat((angles.cos(), angles.sin()), dim=1).to(device))
    positions = odd(torch.tensor([0, 49, 3, 7, 7, 20, 1], device=device))
    slots = odd(torch.tensor([5, 40, -1, 17, 0, 63, 31], device=device))
    found = []
    for op in (nk.qk_norm_rope_store, reference.qk_norm_rope_store):
        kv = nk.KVLayout(4, 16, heads[1], dim, dtype, "NHD").allocate(device)
        q = op(qkv, *norms, 1e-6, positions, table, kv, slots, heads[0])
        found.append((q, kv.k, kv.v))
    for got, want in zip(*found, strict=True):
        close(got, want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton", "batch_invariant"])
@pytest.mark.parametrize("view", [odd, sliced])
def test_queries_of_attention(view, name):
    backend = nk.attention_backend(
        name,
        device="cuda",
        dtype=torch.bfloat16,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=256,
    )
    layout = backend.kv_layout(3, torch.bfloat16)
    kv = layout.allocate("cuda")
    for part in (kv.k, kv.v):
        part.copy_(draw(*part.shape, device="cuda", dtype=torch.bfloat16))
    lengths = [1, 33, 130]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    metadata = nk.AttentionMetadata(
        query_start=starts,
        context_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_tables=torch.arange(3, dtype=torch.int32, device="cuda")[:, None],
        max_query_len=130,
        max_context_len=130,
        num_decodes=1,
    )
    q = draw(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16)
    got = backend.attend(
        view(q), kv, metadata, backend.plan(metadata)[None], nk.AttentionSpec(0.125)
    )
    close(got, reference.attention(q, kv, metadata, nk.AttentionSpec(0.125)), torch.bfloat16)
