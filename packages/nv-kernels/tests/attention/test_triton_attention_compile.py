"""Every attention kernel compiles for absent cards, fits, and spills few registers or none."""

import pytest
import torch
import triton
from ahead_of_time import assert_fits, compile_for
from interpreter import INTERPRETING
from nv_kernels.attention.metadata import AttentionShape
from nv_kernels.attention.triton import settings
from nv_kernels.attention.triton.decode import decode_attention_kernel
from nv_kernels.attention.triton.decode_plan import decode_plan_kernel
from nv_kernels.attention.triton.prefill import prefill_attention_kernel
from nv_kernels.attention.triton.prefill_plan import prefill_plan_kernel
from nv_kernels.cache.triton_copy import copy_blocks_kernel
from nv_kernels.cache.triton_rope import rope_store_kernel
from nv_kernels.cache.triton_write import store_kv_kernel

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")
KV_HEADS = 8
# head_dim, group, block_size, fp8, capability: each value occurs once, the usual ones often.
CASES = [
    (128, 2, 256, False, 80),
    (128, 2, 256, False, 90),
    (128, 2, 256, False, 100),
    (128, 2, 64, True, 80),
    (128, 2, 64, True, 90),
    (128, 8, 16, False, 90),
    (128, 16, 16, False, 90),
    (64, 3, 32, False, 90),
    (80, 1, 64, False, 90),
    (96, 4, 128, True, 100),
    (256, 16, 64, False, 90),
]
# gpt-oss and Gemma 2: with their window, softcap and sinks, all at once.
FEATURED = [
    (64, 8, 256, False, 80),
    (64, 8, 256, False, 90),
    (64, 8, 256, False, 100),
    (256, 2, 256, False, 90),
    (128, 2, 16, True, 90),
]
# 16 query columns, masked or wide with small blocks, need a few registers more: SPILLED bytes.
SPILLED = 80
WIDE = [(96, 12, 64, False, 90), (80, 16, 16, False, 90), (256, 9, 16, False, 90)]
# The decode kernel has a setting for each of these numbers of rows. They are all compiled for the
# usual shape and for those that use nearly all 255 registers; for another one, those that use most.
EVERY = (1, 8, 64, 512)
DECODE_ROWS = {
    **dict.fromkeys(((128, 2, 256), (128, 16, 16), (256, 16, 64)), EVERY),
    **dict.fromkeys(((80, 1, 64), (80, 16, 16)), (8, 64)),
    (256, 2, 256): (1,),
}


def decode_cases():
    """Cases with features or without, and rows: (head_dim, …, has_features, rows)."""
    for cases, has_features in ((CASES + WIDE, False), (FEATURED, True)):
        for case in cases:
            head_dim, group, block_size, _, capability = case
            shape = head_dim, group, block_size
            for rows in DECODE_ROWS.get(shape, (8,)) if capability == 90 else (512,):
                yield *case, has_features, rows


def shape_of(head_dim, group, block_size) -> AttentionShape:
    device, heads = torch.device("cpu"), (group * KV_HEADS, KV_HEADS)
    return AttentionShape(device, torch.bfloat16, *heads, head_dim, block_size)


def strides(head_dim, group, block_size, fp8):
    """Constants of q and the cache, as the backend gives them."""
    width = head_dim // 2 if fp8 else head_dim
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "Q_TOKEN": group * KV_HEADS * head_dim,
        "Q_HEAD": head_dim,
        "KV_BLOCK": block_size * KV_HEADS * width,
        "KV_TOKEN": KV_HEADS * width,
        "KV_HEAD": width,
        "FP8": fp8,
        "sinks_ptr": None,
        "WINDOW": 0,
        "SOFTCAP": 0.0,
    }


def featured(types, constants):
    """The arguments of a layer with all features."""
    constants = constants | {"WINDOW": 128, "SOFTCAP": 50.0}
    del constants["sinks_ptr"]
    return types | {"sinks_ptr": "*bf16"}, constants


def pointers(types):
    return [name for name, kind in types.items() if kind.startswith("*")]


def compiled(kernel, types, constants, capability, **options):
    constants = constants | {"PDL": capability >= 90}
    return compile_for(kernel, types, constants, capability, pointers(types), **options)


def attention_types(fp8):
    kv = "*i16" if fp8 else "*bf16"
    return {
        "q_ptr": "*bf16", "k_ptr": kv, "v_ptr": kv, "block_tables_ptr": "*i32", "out_ptr": "*bf16",
        "records_ptr": "*i32", "table_stride": "i32", "qk_scale": "fp32", "v_scale": "fp32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "fp8", "capability", "has_features", "rows"),
    [*decode_cases()],
)
def test_decode(head_dim, group, block_size, fp8, capability, has_features, rows, monkeypatch):
    monkeypatch.setattr(settings, "num_multiprocessors", lambda device: 132)
    chosen = settings.decode_settings(shape_of(head_dim, group, block_size), rows)
    types = attention_types(fp8) | {"partials_ptr": "*fp32", "sums_ptr": "*fp32"}
    warps, stages = chosen.pipeline(fp8=fp8)
    constants = strides(head_dim, group, block_size, fp8) | {
        "NUM_KV_HEADS": KV_HEADS,
        "TILE": chosen.tile,
        "STAGES": stages,
        "MERGE": chosen.merge,
        "PREFETCH": chosen.prefetch,
        "KEYS_FIRST": chosen.keys_first,
        "CONVERT": fp8 and capability >= 90,
    }
    types |= {"counters_ptr": "*i32"}
    options = {"num_warps": warps, "num_stages": stages}
    if has_features:
        types, constants = featured(types, constants)
    kernel = compiled(decode_attention_kernel, types, constants, capability, **options)
    is_wide = (head_dim, group, block_size, fp8, capability) in WIDE
    assert_fits(kernel, capability, spilled=SPILLED if is_wide else 0)
    # If Triton silently does not pipeline the loop, there is one buffer less.
    width = 2 * (triton.next_power_of_2(head_dim) // (2 if fp8 else 1))
    assert kernel.shared >= 2 * (stages - 1) * chosen.tile * width
    assert ("griddepcontrol.wait" in kernel.ptx) == (capability >= 90)


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "fp8", "capability", "has_features"),
    [*((*case, False) for case in CASES), *((*case, True) for case in FEATURED)],
)
def test_prefill(head_dim, group, block_size, fp8, capability, has_features):
    chosen = settings.prefill_settings(shape_of(head_dim, group, block_size))
    types = attention_types(fp8) | {"num_records": "i32", "num_tokens": "i32"}
    constants = strides(head_dim, group, block_size, fp8) | {
        "BLOCK_M": settings.PREFILL_ROWS,
        "BLOCK_N": chosen.block_n,
        "STAGES": chosen.stages,
    }
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    if has_features:
        types, constants = featured(types, constants)
    kernel = compiled(prefill_attention_kernel, types, constants, capability, **options)
    assert_fits(kernel, capability)


@pytest.mark.parametrize(("head_dim", "group", "block_size"), [(128, 2, 256), (64, 3, 64)])
def test_hopper_prefill(head_dim, group, block_size):
    from nv_kernels.attention.triton.hopper import prefill_hopper_kernel  # noqa: PLC0415
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16  # noqa: PLC0415

    chosen = settings.hopper_prefill_settings(shape_of(head_dim, group, block_size))
    assert chosen is not None
    box = [1, 1, chosen.block_n, head_dim]
    described = f"tensordesc<bf16{box},{NVMMASharedLayout.get_default_for(box, bfloat16)!r}>"
    types = attention_types(fp8=False) | {"num_records": "i32", "num_tokens": "i32"}
    types |= {"k_desc": described, "v_desc": described}
    del types["k_ptr"], types["v_ptr"]
    full = strides(head_dim, group, block_size, fp8=False)
    constants = {
        name: full[name] for name in ("GROUP", "HEAD_DIM", "BLOCK_SIZE", "Q_TOKEN", "Q_HEAD")
    }
    constants |= {"NUM_KV_HEADS": KV_HEADS, "BLOCK_N": chosen.block_n, "STAGES": chosen.stages}
    kernel = compiled(prefill_hopper_kernel, types, constants, 90, num_warps=chosen.warps)
    assert_fits(kernel, 90)
    assert "wgmma" in kernel.ptx


def assert_holds(kernel, capability):
    """Attention reads this kernel's writes before its wait, so it must not start early."""
    assert_fits(kernel, capability)
    assert ("griddepcontrol.wait" in kernel.ptx) == (capability >= 90)
    assert "launch_dependents" not in kernel.ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("rows", [16, 1024])
def test_plans(rows, capability):
    types = {"context_lens_ptr": "*i32", "records_ptr": "*i32", "num_rows": "i32"}
    decode = types | {
        "block_tables_ptr": "*i32", "counters_ptr": "*i32", "table_stride": "i32",
        "num_pieces": "i32", "num_resident": "i32",
    }  # fmt: skip
    constants = {"ROWS": rows, "TILE": 64, "BLOCK_SIZE": 256, "NUM_KV_HEADS": KV_HEADS}
    constants |= {"MERGE": 8, "MAX_TILES": 32, "CHUNK": 128, "CUT_UNEVEN": True, "WINDOW": 0}
    assert_holds(compiled(decode_plan_kernel, decode, constants, capability), capability)
    prefill = types | {"query_start_ptr": "*i32", "first_row": "i32"}
    constants = {"ROWS": rows, "TOKENS": 64, "CHUNK": 4}
    assert_fits(compiled(prefill_plan_kernel, prefill, constants, capability), capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("fp8", "rotated", "norm"), [(False, 128, "*bf16"), (True, 64, "*bf16"), (False, 0, "*fp32")]
)
def test_writes(fp8, rotated, norm, capability):
    cache = "*u8" if fp8 else "*bf16"
    place = {"BLOCK_SIZE": 256, "KV_BLOCK": 256 * 1024, "KV_TOKEN": 1024, "KV_HEAD": 128}
    types = dict.fromkeys(("x_ptr", "q_weight_ptr", "k_weight_ptr", "out_ptr"), "*bf16")
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_sin_ptr": "*fp32"}
    types |= {"q_weight_ptr": norm, "k_weight_ptr": norm}
    types |= {"k_ptr": cache, "v_ptr": cache, "num_tokens": "i32", "plane": "i32"}
    types |= dict.fromkeys(("eps", "k_inverse_scale", "v_inverse_scale"), "fp32")
    constants = place | {
        "NUM_HEADS": 32, "NUM_Q_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF": 64,
        "X_TOKEN": 4096, "NUM_PARTIALS": 3, "NORM_Q": True, "NORM_K": True, "FP8": fp8, "HEADS": 16,
        "ROTATED": rotated,
    }  # fmt: skip
    assert_fits(compiled(rope_store_kernel, types, constants, capability), capability)
    types = {"k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i64"}
    types |= {"k_cache_ptr": cache, "v_cache_ptr": cache}
    types |= dict.fromkeys(("k_inverse_scale", "v_inverse_scale"), "fp32")
    constants = place | {
        "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "FP8": fp8, "HEADS": 8,
        "K_TOKEN": 1024, "K_HEAD": 128, "V_TOKEN": 1024, "V_HEAD": 128,
    }  # fmt: skip
    assert_holds(compiled(store_kv_kernel, types, constants, capability), capability)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_copies(capability):
    types = {"k_ptr": "*i16", "v_ptr": "*i16", "sources_ptr": "*i64"}
    types |= {"destinations_ptr": "*i64", "num_tokens_ptr": "*i64"}
    constants = {"WIDTH": 128, "WIDE": 128, "BLOCK_SIZE": 256, "TOKENS": 16}
    constants |= {"KV_BLOCK": 256 * 1024, "KV_TOKEN": 1024, "KV_HEAD": 128}
    assert_holds(compiled(copy_blocks_kernel, types, constants, capability), capability)
