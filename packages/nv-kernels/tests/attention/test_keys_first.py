"""Keys that are loaded before the queries, and before the kernel that writes the newest ends."""

from dataclasses import replace

import nv_kernels as nk
import pytest
import torch
from attention_cases import assert_attends, step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.backend import TritonAttention

ROWS = (1, 70, 0, 64, 65, 128, 300)


def attend(case, keys_first, monkeypatch):
    plain = settings.decode_settings

    def chosen(shape, num_rows):
        return replace(plain(shape, num_rows), keys_first=keys_first)

    with monkeypatch.context() as patch:
        patch.setattr(settings, "decode_settings", chosen)
        backend = TritonAttention(case.shape, "a test")
        plan = backend.plan(case.metadata)[None]
        return backend.attend(case.q, case.kv, case.metadata, plan, case.spec)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


@on_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": (16, 8), "head_dim": 128, "block_size": 256},
        {"heads": (16, 2), "block_size": 16},
        {"head_dim": 80, "dtype": torch.float16},
        {"fp8": True, "order": "HND", "head_dim": 128},
        {"fp8": True, "head_dim": 80, "block_size": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 7] if INTERPRETING else [1, 7, 63, 210])
def test_the_order_changes_no_bit(options, count, monkeypatch):
    rows = [(1, ROWS[index % len(ROWS)] + index // 7) for index in range(count)]
    case = step(rows, device=DEVICE, **options)
    before, after = (attend(case, first, monkeypatch) for first in (False, True))
    assert torch.equal(before, after)
    assert_attends(after, case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("contexts", [(1, 64, 65, 300), (1000,) * 40], ids=len)
@pytest.mark.parametrize("fp8", [False, True])
def test_the_newest_key_is_waited_for(contexts, fp8, monkeypatch):
    """Layers in one stream write their newest keys and attend, as if each waited for the last."""
    case = step([(1, n) for n in contexts], device="cuda", heads=(16, 8), head_dim=128, fp8=fp8)
    shape, rows = case.shape, len(contexts)
    lengths = case.metadata.context_lens.long()
    blocks = case.metadata.block_tables.long().gather(1, ((lengths - 1) // 64)[:, None])[:, 0]
    slots = blocks * 64 + (lengths - 1) % 64
    generator = torch.Generator("cuda").manual_seed(1)
    layers = [
        torch.randn(rows, 32 * 128, device="cuda", generator=generator).to(shape.dtype)
        for _ in range(24)
    ]
    angles = torch.rand(2048, 128, device="cuda", generator=generator)
    backend = TritonAttention(shape, "a test")
    plan = backend.plan(case.metadata)[None]

    def run(wait):
        outs = []
        for qkv in layers:
            q = nk.qk_norm_rope_store(
                qkv, None, None, 1e-6, lengths - 1, angles, case.kv, slots, shape.num_q_heads
            )
            wait()
            outs.append(backend.attend(q, case.kv, case.metadata, plan, case.spec))
            wait()
        return outs

    one_by_one = run(torch.cuda.synchronize)
    together = run(lambda: None)
    torch.cuda.synchronize()
    for index, (mine, theirs) in enumerate(zip(together, one_by_one, strict=True)):
        assert torch.equal(mine, theirs), index
