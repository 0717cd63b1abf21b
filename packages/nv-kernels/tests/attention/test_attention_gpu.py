"""Every backend of a card on every shape that it supports, against the definition.

Marked gpu. Prompts of mixed lengths, decode rows and chunks. The compiled backends run each pair of
head_dim and group in one dtype only, because each pair compiles another kernel.
"""

import importlib.util
import re
from itertools import product

import nv_kernels as nk
import pytest
import torch
from attention_cases import FEATURES, assert_attends, step
from nv_kernels.attention.triton.settings import HEAD_DIMS

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
GROUPS = (1, 2, 3)
LENGTHS = (1, 300, 93, 96, 17, 128, 255, 64, 2, 201, 16, 150, 77)
PROMPTS = [(length, length) for length in LENGTHS]
DECODES = [(1, length) for length in LENGTHS]
CHUNKS = [(1 + length // 3, length) for length in LENGTHS] + [(300, 813)]
NUM_KV_HEADS = 2

ALL = list(product(DTYPES, DIMS, GROUPS))
EACH_PAIR_ONCE = [
    (dtype, head_dim, GROUPS[(i + j) % len(GROUPS)])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate(DIMS)
]
HALVES = [case for case in ALL if case[0] != "fp32"]
CASES = [
    *(("torch", *case) for case in ALL),
    *(("batch_invariant", *case) for case in EACH_PAIR_ONCE),
    *(("triton", *case) for case in HALVES if case[1] in HEAD_DIMS),
    *(("flash_attn", *case) for case in HALVES if case[1] % 32 == 0),
]


def needs_package(name):
    if name == "flash_attn" and not any(
        importlib.util.find_spec(package) for package in ("flash_attn_interface", "flash_attn")
    ):
        pytest.skip("no FlashAttention package is installed")


@pytest.mark.parametrize(("name", "dtype", "head_dim", "group"), CASES)
def test_a_cuda_context_survives_every_shape(name, dtype, head_dim, group):
    needs_package(name)
    backend = nk.attention_backend(
        name,
        device="cuda",
        dtype=DTYPES[dtype],
        num_q_heads=group * NUM_KV_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        block_size=256,
    )
    for rows in (PROMPTS, [(96, 96), (93, 93)], DECODES, DECODES + CHUNKS):
        case = step(
            rows,
            device="cuda",
            heads=(group * NUM_KV_HEADS, NUM_KV_HEADS),
            head_dim=head_dim,
            block_size=256,
            dtype=DTYPES[dtype],
            order=backend.kv_layout(1, DTYPES[dtype]).order,
        )
        if name == "flash_attn":  # it reads whole blocks; an engine's pool holds no NaN
            for part in (case.kv.k, case.kv.v):
                part.nan_to_num_()
        plan = backend.plan(case.metadata)[None]
        out = backend.attend(case.q, case.kv, case.metadata, plan, case.spec)
        assert_attends(out, case.expected())


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("name", ["torch", "triton", "batch_invariant", "flash_attn"])
def test_features(name, features):
    needs_package(name)
    shape = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 256}
    case = step(DECODES + CHUNKS, device="cuda", heads=(6, 2), block_size=256, padding=5)
    case = case.with_features(**features)
    options = {"device": "cuda", "dtype": torch.bfloat16, "specs": [case.spec]}
    if name == "flash_attn":
        for part in (case.kv.k, case.kv.v):
            part.nan_to_num_()
        plain = nk.attention_backend(name, **shape, **options | {"specs": [nk.AttentionSpec(1.0)]})
        refusal = plain.refusal(case.spec)
        assert refusal or not case.spec.sinks
        if refusal:  # sinks, and what the installed build was made without
            with pytest.raises(ValueError, match=re.escape(refusal)):
                nk.attention_backend(name, **shape, **options)
            return
    assert_attends(case.attend(nk.attention_backend(name, **shape, **options)), case.expected())
