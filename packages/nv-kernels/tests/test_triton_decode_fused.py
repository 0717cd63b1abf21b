"""Decode attention straight from the projection: against its two kernels, and its definition."""

from dataclasses import dataclass, replace

import nv_kernels as nk
import pytest
import torch
from attention_cases import assert_attends, step
from interpreter import DEVICE, INTERPRETING, on_device, outer_only, run_interpreted
from nv_kernels.attention.triton import TritonAttention
from nv_kernels.attention.triton_decode import Projected, launch_decode
from nv_kernels.metadata import AttentionShape
from nv_kernels.triton.rope_store import qk_norm_rope_store

EPS = 1e-6


@dataclass(frozen=True)
class Fused:
    """A decode step before its projection is cut up; `kv` lacks the newest tokens."""

    shape: AttentionShape
    qkv: torch.Tensor
    weights: tuple[torch.Tensor | None, torch.Tensor | None]
    cos_sin: torch.Tensor
    kv: nk.KVCache
    slots: torch.Tensor
    metadata: nk.AttentionMetadata
    scale: float

    def fresh(self) -> nk.KVCache:
        """A cache of its own, laid out alike."""
        return replace(self.kv, k=self.kv.k.clone(), v=self.kv.v.clone())


def table(length, head_dim):
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


def fused_step(lengths, *, partials=0, norm=True, unused=0, heads=(4, 2), **options) -> Fused:
    """Build a step of one token a row.

    Args:
        lengths: context lengths, the new token included.
        partials: split-K parts of the projection, in fp32; 0: none.
        norm: with weights of q/k norms.
        unused: columns past the projection's own, as a wider buffer has.
    """
    case = step([(1, length) for length in lengths], device=DEVICE, heads=heads, **options)
    shape, size = case.shape, case.shape.block_size
    dtype, head_dim = shape.dtype, shape.head_dim
    generator = torch.Generator().manual_seed(11)
    last = torch.tensor(lengths) - 1
    tables = case.metadata.block_tables.cpu().long()
    blocks = tables.gather(1, (last.clamp(min=0) // size)[:, None])[:, 0]
    slots = torch.where(last >= 0, blocks * size + last % size, -1)
    width = (heads[0] + 2 * heads[1]) * head_dim
    parts = torch.randn(max(partials, 1), len(lengths), width + unused, generator=generator)
    qkv = parts.to(DEVICE) if partials else parts[0].to(DEVICE, dtype)
    drawn = [(1 + 0.2 * torch.randn(head_dim, generator=generator)) for _ in range(2)]
    weights = [weight.to(DEVICE, dtype) if norm else None for weight in drawn]
    for cache in (case.kv.k, case.kv.v):  # the newest token is not there yet
        for slot in slots[slots >= 0].tolist():
            cache[slot // size, slot % size] = 0.0 if cache.dtype.itemsize == 1 else float("nan")
    return Fused(
        shape, qkv[..., :width], (weights[0], weights[1]), table(max(*lengths, 1), head_dim),
        case.kv, slots.to(DEVICE), case.metadata, case.scale,
    )  # fmt: skip


def attend(case, kv, early=None):
    backend = TritonAttention(case.shape, "a test")
    plan = backend.plan(case.metadata)
    torch.zeros(1, device=DEVICE)  # plans are written at least two kernels ahead
    if early is None:
        return backend.attend_decode(
            case.qkv, *case.weights, EPS, case.cos_sin, kv, case.slots, case.metadata, plan,
            case.scale,
        )  # fmt: skip
    x = Projected(case.qkv, *case.weights, EPS, case.cos_sin, case.slots, early=early)
    size = (case.qkv.shape[-2], case.shape.num_q_heads, case.shape.head_dim)
    out = torch.full(size, float("nan"), dtype=case.shape.dtype, device=DEVICE)
    launch_decode(case.shape, x, kv, case.metadata, plan.decode, scale=case.scale, out=out)
    return out


def two_kernels(case, kv):
    backend = TritonAttention(case.shape, "a test")
    plan = backend.plan(case.metadata)
    positions = (case.metadata.context_lens - 1).clamp(min=0)
    rest = EPS, positions, case.cos_sin, kv, case.slots, case.shape.num_q_heads
    q = qk_norm_rope_store(case.qkv, *case.weights, *rest)
    return backend.attend(q, kv, case.metadata, plan, case.scale)


def definition(case, kv):
    qkv = case.qkv
    if qkv.dim() == 3:
        whole = qkv[0].clone()
        for part in qkv[1:]:
            whole += part
        qkv = whole.to(case.shape.dtype)
    return nk.reference.attend_decode(
        qkv.contiguous(), *case.weights, EPS, case.cos_sin, kv, case.slots, case.metadata,
        case.scale,
    )  # fmt: skip


def assert_same_cache(actual, expected):
    """Equal, but keys' norms may be a unit off: squares are summed in another order."""
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(expected.k.dtype, 2**-3)
    close = {"rtol": 2 * unit, "atol": 4 * unit, "equal_nan": True}
    torch.testing.assert_close(actual.k.float(), expected.k.float(), **close)
    assert torch.equal(actual.v.float().nan_to_num(9e9), expected.v.float().nan_to_num(9e9))


def check(lengths, **options):
    case = fused_step(lengths, **options)
    ours, theirs, truth = case.fresh(), case.fresh(), case.fresh()
    out = attend(case, ours)
    expected = two_kernels(case, theirs)
    assert_same_cache(ours, theirs)
    assert_attends(out, expected)
    assert_attends(out, definition(case, truth))
    assert_same_cache(ours, truth)
    for early in () if INTERPRETING else (True, False):
        again = case.fresh()
        torch.testing.assert_close(attend(case, again, early), out, rtol=0.02, atol=0.01)
        assert_same_cache(again, ours)


@outer_only
def test_under_the_interpreter():
    run_interpreted(__file__)


SHORT = [65, 1, 0, 33] if INTERPRETING else [130, 1, 64, 0, 65, 2, 33, 700, 17]


@on_device
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 64] if INTERPRETING else [16, 32, 64, 256])
def test_pages(block_size, fp8):
    check(SHORT, fp8=fp8, block_size=block_size, order="HND" if fp8 else "NHD")


@on_device
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [80, 128] if INTERPRETING else [64, 80, 96, 128, 256])
def test_head_dims_without_a_norm(head_dim, fp8):
    check(SHORT[:2] if INTERPRETING else SHORT, head_dim=head_dim, fp8=fp8, norm=False)


@on_device
@pytest.mark.parametrize("group", [1, 3, 16] if INTERPRETING else [1, 2, 3, 4, 7, 8, 16])
def test_groups(group):
    check(SHORT[:2] if INTERPRETING else SHORT, heads=(2 * group, 2), unused=8)


@on_device
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("partials", [1, 3])
def test_split_k_partials(partials, fp8):
    check(SHORT[:2] if INTERPRETING else SHORT, partials=partials, fp8=fp8, unused=8)


@on_device
def test_more_items_than_processors():
    check([17 * i for i in range(10)], heads=(2, 1), block_size=16)


@on_device
@pytest.mark.parametrize("last", [0, 1, 2, 63])
def test_the_new_token_opens_or_ends_a_tile(last):
    """Pieces of one tile each: the last one may hold the new token alone."""
    check([64 * 4 + last], heads=(2, 1), bounds=(1, 4096))


@on_device
def test_a_slot_of_minus_one_is_not_stored():
    case = fused_step([40, 1, 0])
    case = replace(case, slots=torch.full_like(case.slots, -1))
    ours, theirs = case.fresh(), case.fresh()
    assert attend(case, ours).isfinite().all()
    assert_same_cache(ours, theirs)


@on_device
@pytest.mark.parametrize("early", [True, False])
def test_an_empty_row_stores_nothing(early):
    """A padding row's slot may be anything."""
    case = fused_step([0, 40])
    case = replace(case, slots=torch.where(case.slots < 0, 1, case.slots))
    ours, theirs = case.fresh(), case.fresh()
    out = attend(case, ours, early)
    assert not out[0].any()
    two_kernels(replace(case, slots=torch.where(case.slots == 1, -1, case.slots)), theirs)
    assert_same_cache(ours, theirs)


@on_device
def test_an_fp8_token_counts_as_it_is_stored():
    """A row of one token gives back its value as the cache holds it."""
    case = fused_step([1, 1], fp8=True, order="HND")
    kv = case.fresh()
    out = attend(case, kv)
    size = case.shape.block_size
    held = kv.v[case.slots // size, case.slots % size].to(out.dtype) * kv.v_scale  # [S, Hkv, D]
    assert torch.equal(out, held.repeat_interleave(2, dim=1))


on_card = pytest.mark.gpu
LONG = [3000, 517, 4000, 1, 2049, 17, 0, 1024, 1025]


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("heads", [(16, 8), (14, 2), (9, 3), (64, 8), (2, 2)])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_long_rows(block_size, fp8, heads):
    options = {"block_size": block_size, "fp8": fp8, "order": "HND" if fp8 else "NHD"}
    check(LONG, heads=heads, head_dim=128, partials=2, **options)


@on_card
@pytest.mark.skipif(INTERPRETING, reason="too large for the interpreter")
@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("fp8", [False, True])
def test_every_setting(fp8, rows):
    lengths = [1 + (i * 379 + 150) % 1500 for i in range(rows)]
    check(lengths, heads=(16, 8), head_dim=128, block_size=256, fp8=fp8)


@on_card
@pytest.mark.skipif(INTERPRETING, reason="graphs need a card")
def test_a_captured_step_goes_on_by_a_token():
    """One graph over two layers of one cache each, replayed as the context grows."""
    options = {"heads": (8, 4), "head_dim": 128, "block_size": 256, "bounds": (1, 4096)}
    case = fused_step([900, 63, 200, 1], **options)  # room in each last block
    ours, theirs = [case.fresh(), case.fresh()], [case.fresh(), case.fresh()]
    backend = TritonAttention(case.shape, "a test")
    doubled = torch.empty_like(case.qkv)

    def run():
        plan = backend.plan(case.metadata)
        torch.add(case.qkv, case.qkv, out=doubled)  # plans are written two kernels ahead
        for kv, qkv in zip(ours, (doubled, case.qkv), strict=True):
            yield backend.attend_decode(
                qkv, *case.weights, EPS, case.cos_sin, kv, case.slots, case.metadata, plan,
                case.scale,
            )  # fmt: skip

    list(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = list(run())
    for _ in range(3):
        graph.replay()
        for out, kv, qkv in zip(outputs, theirs, (case.qkv * 2, case.qkv), strict=True):
            assert_attends(out, two_kernels(replace(case, qkv=qkv), kv))
        for mine, other in zip(ours, theirs, strict=True):
            assert_same_cache(mine, other)
        case.metadata.context_lens += 1
        last = case.metadata.context_lens.long() - 1
        size = case.shape.block_size
        blocks = case.metadata.block_tables.long().gather(1, (last // size)[:, None])[:, 0]
        case.slots.copy_(blocks * size + last % size)
        case.qkv.neg_()
