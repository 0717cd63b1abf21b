"""Attention from a projection: the two ops on a CPU, one launch on a Hopper card."""

import nv_kernels as nk
import pytest
import torch
from ahead_of_time import assert_fits, compile_for
from attention_cases import assert_attends
from nv_kernels.attention.metadata import AttentionShape
from nv_kernels.attention.triton import projected, settings
from nv_kernels.attention.triton.backend import TritonAttention
from nv_kernels.attention.triton.projected_kernel import projected_attention_kernel
from nv_kernels.cache.layout import KVLayout
from nv_kernels.launch.card import is_hopper

EPS = 1e-6
BF16 = torch.bfloat16


class Case:
    """One row with `context` tokens, of which the newest is in the projection."""

    def __init__(self, context, *, device, heads=(4, 2), head_dim=128, block_size=64, order="NHD",
                 normed=True, dtype=BF16, fp8=False):  # fmt: skip
        generator = torch.Generator().manual_seed(context)

        def draw(*shape):
            return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

        q_heads, kv_heads = heads
        blocks = context // block_size + 3
        self.shape = AttentionShape(torch.device(device), dtype, *heads, head_dim, block_size)
        kv_dtype = torch.float8_e4m3fn if fp8 else dtype
        self.kv = KVLayout(blocks, block_size, kv_heads, head_dim, kv_dtype, order).allocate(device)
        for cache in (self.kv.k, self.kv.v):
            cache.copy_((draw(*cache.shape) * 0.5).to(kv_dtype))
        table = torch.randperm(blocks, generator=generator).to(torch.int32)[None].to(device)
        place = context - 1
        slot = int(table[0, place // block_size]) * block_size + place % block_size
        weights = (draw(head_dim), draw(head_dim)) if normed else (None, None)
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.arange(4096)[:, None] * frequencies
        slots = torch.tensor([slot if context else -1], device=device)
        self.projection = nk.Projection(
            draw(1, (q_heads + 2 * kv_heads) * head_dim), *weights, EPS,
            torch.tensor([max(place, 0)], device=device),
            torch.cat((angles.cos(), angles.sin()), 1).to(device), slots, q_heads, dtype,
        )  # fmt: skip
        self.metadata = nk.AttentionMetadata(
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([context], dtype=torch.int32, device=device),
            table, 1, 2048, 1,
        )  # fmt: skip
        self.spec = nk.AttentionSpec(head_dim**-0.5)

    def attend(self, kv, backend=None, plan=None):
        backend = backend or TritonAttention(self.shape, "a test")
        plan = plan or backend.plan(self.metadata)[None]
        return nk.attend_projection(
            backend, self.projection, kv, self.metadata, plan, self.spec, sinks=None
        )

    def copy(self):
        return nk.KVCache(*(
            torch.empty_strided(c.shape, c.stride(), dtype=c.dtype, device=c.device).copy_(c)
            for c in (self.kv.k, self.kv.v)
        ))  # fmt: skip

    def expected(self):
        """The definition's output, and its cache."""
        qkv, q_weight, k_weight, eps, positions, table, slots, heads, dtype = self.projection
        kv = self.copy()
        q = nk.reference.qk_norm_rope_store(
            qkv, q_weight, k_weight, eps, positions, table, kv, slots, heads, dtype
        )
        return nk.reference.attention(q, kv, self.metadata, self.spec), kv


def agree(found, expected):
    """Equal, but for sums in another order before a rounding to bf16."""
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "order", "normed"),
    [
        ((16, 8), 128, 256, "NHD", True),
        ((4, 2), 128, 64, "HND", True),
        ((8, 2), 128, 16, "NHD", False),
        ((3, 1), 64, 32, "NHD", True),
        ((2, 2), 64, 256, "NHD", False),
        ((14, 2), 64, 64, "NHD", True),
    ],
)
def test_one_launch_is_the_definition(heads, head_dim, block_size, order, normed, monkeypatch):
    monkeypatch.setattr(settings, "PROJECTED_CONTEXT", 2048)
    calls, plain = [], projected.attend_one
    monkeypatch.setattr(projected, "attend_one", lambda *a: calls.append(1) or plain(*a))
    options = {"heads": heads, "head_dim": head_dim, "block_size": block_size, "order": order}
    contexts = (0, 1, 2, 3, 4, 8, 9, 16, 17, 64, 127, 128, 129, 200, 256, 384, 385, 700, 1500, 2047)
    for context in contexts:
        case = Case(context, device="cuda", normed=normed, **options)
        if not is_hopper(case.projection.qkv):
            pytest.skip("needs a Hopper card")
        kv, backend = case.copy(), TritonAttention(case.shape, "a test")
        plan = backend.plan(case.metadata)[None]
        found = case.attend(kv, backend, plan)
        assert plan.decode_part is not None
        assert "plan" not in vars(plan.decode_part), "no launch for a plan"
        again = case.attend(kv, backend, plan)  # a second layer finds the counters at 0
        assert torch.equal(found, again)
        expected, after = case.expected()
        assert_attends(found, expected)
        agree(kv.k, after.k)
        assert torch.equal(kv.v, after.v)
    assert len(calls) == 2 * len(contexts)


@pytest.mark.gpu
@pytest.mark.parametrize("why", ["fp8", "fp16", "group", "dim", "softcap", "table"])
def test_what_has_no_such_launch_takes_two(why, monkeypatch):
    monkeypatch.setattr(settings, "PROJECTED_CONTEXT", 2048)
    monkeypatch.setattr(projected, "attend_one", None)  # not called
    heads, head_dim = ((16, 2) if why == "group" else (4, 2)), (256 if why == "dim" else 128)
    case = Case(
        100, device="cuda", heads=heads, head_dim=head_dim, fp8=why == "fp8",
        dtype=torch.float16 if why == "fp16" else BF16, order="HND" if why == "fp8" else "NHD",
    )  # fmt: skip
    if why == "softcap":
        case.spec = nk.AttentionSpec(head_dim**-0.5, softcap=30.0)
    if why == "table":
        half = case.projection.cos_sin[:, 32:96].contiguous()
        case.projection = case.projection._replace(cos_sin=half)
    found = case.attend(case.copy())
    expected, _ = case.expected()
    assert_attends(found, expected)


def test_a_backend_without_it_takes_two_ops():
    case = Case(9, device="cpu", dtype=torch.float32)
    backend = nk.attention_backend(
        "torch", device="cpu", dtype=torch.float32, num_q_heads=4, num_kv_heads=2, head_dim=128,
        block_size=64,
    )  # fmt: skip
    kv = case.copy()
    found = case.attend(kv, backend)
    expected, after = case.expected()
    torch.testing.assert_close(found, expected)
    assert torch.equal(kv.k, after.k)
    assert torch.equal(kv.v, after.v)


@pytest.mark.parametrize(
    ("group", "head_dim", "normed"), [(2, 128, True), (4, 128, True), (7, 64, True), (1, 64, False)]
)
def test_it_compiles_ahead_of_time(group, head_dim, normed):
    pointers = {
        **dict.fromkeys(("qkv", "q_weight", "k_weight", "k", "v", "out"), "*bf16"),
        **dict.fromkeys(("positions", "slots"), "*i64"),
        **dict.fromkeys(("context_lens", "block_tables", "counters"), "*i32"),
        **dict.fromkeys(("cos_sin", "partials", "sums"), "*fp32"),
    }
    members = 1 << (group - 1).bit_length()
    compiled = compile_for(
        projected_attention_kernel,
        pointers | {"table_stride": "i32", "eps": "fp32", "qk_scale": "fp32"},
        {"NUM_KV_HEADS": 8, "GROUP": group, "MEMBERS": members, "HEAD_DIM": head_dim,
         "BLOCK_SIZE": 256, "KV_BLOCK": 2048 * head_dim, "KV_TOKEN": 8 * head_dim,
         "KV_HEAD": head_dim, "PIECES": projected.PIECES,
         "WARPS": projected.WARPS, "NORM": normed},
        90, divisible=tuple(pointers), num_warps=projected.WARPS,
    )  # fmt: skip
    assert_fits(compiled, 90)
    before, _, after = compiled.ptx.partition("griddepcontrol.wait")
    # Keys, values and the norm's weights before the wait, the projection after it.
    assert before.count("v4.b32") > 4 * head_dim // 32
    assert after.count("mma.sync") == 4 * head_dim // 32 + head_dim // 8
