"""The flash_attn backend's calls of its packages, with fakes that compute, and its errors."""

import re
import sys
from dataclasses import replace
from types import ModuleType

import flash_fakes
import nv_kernels as nk
import pytest
import torch
from attention_cases import assert_attends, step
from nv_kernels.attention.flash import FlashAttention
from nv_kernels.attention.metadata import AttentionShape

MODULES = {"flash_attn_interface": flash_fakes.flash3, "flash_attn": flash_fakes.flash2}
DECODES = [(1, 130), (1, 1), (1, 256), (1, 0), (1, 257)]
CHUNKS = [(5, 5), (3, 300), (1, 128), (0, 0), (70, 131), (2, 0), (256, 512)]
SHAPE = AttentionShape(torch.device("cpu"), torch.bfloat16, 4, 2, 64, 256)


@pytest.fixture
def only(monkeypatch):
    """Choose which of the packages can be imported, also those that are not installed."""

    def have(*names):
        for name, make in MODULES.items():
            monkeypatch.setitem(sys.modules, name, make() if name in names else None)

    return have


def attend(case):
    return case.attend(FlashAttention(case.shape, "a test"))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rows", [DECODES, CHUNKS, DECODES + CHUNKS, [(1, 0)], [(0, 0)]])
def test_every_kind_of_step(only, name, rows, padding):
    only(name)
    case = step(rows, device="cpu", block_size=256, padding=padding, bounds=(512, 700))
    assert_attends(attend(case), case.expected())


@pytest.mark.parametrize("name", MODULES)
def test_exact_bounds_and_the_other_dtype(only, name):
    only(name)
    case = step(DECODES + CHUNKS, device="cpu", block_size=256, dtype=torch.float16, heads=(6, 2))
    assert_attends(attend(case), case.expected())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "features",
    [
        {"window": 1},
        {"window": 75},
        {"window": 1000},
        {"softcap": 0.7},
        {"window": 9, "softcap": 2},
    ],
    ids=str,
)
def test_a_window_and_a_softcap_are_arguments(only, name, features):
    only(name)
    case = step(DECODES + CHUNKS, device="cpu", block_size=256, padding=3)
    case = case.with_features(**features)
    assert FlashAttention(case.shape, "a test").refusal(case.spec) is None
    assert_attends(attend(case), case.expected())


def test_sinks_are_refused_and_arguments_that_a_version_lacks(only, monkeypatch):
    only("flash_attn_interface")
    backend = FlashAttention(SHAPE, "a test")
    words = "attention backend 'flash_attn' has no sinks: use 'triton'"
    assert backend.refusal(nk.AttentionSpec(1.0, window=4, sinks=True)) == words
    monkeypatch.setattr(
        backend.package.module, "flash_attn_with_kvcache", lambda q, window_size=(-1, -1): q
    )
    assert backend.refusal(nk.AttentionSpec(1.0, window=4)) is None
    words = r"has no softcap: the installed FlashAttention-3 .* no argument 'softcap'; .* 'triton'"
    assert re.search(words, backend.refusal(nk.AttentionSpec(1.0, softcap=4.0)))


@pytest.fixture
def built(monkeypatch):
    """Choose the flags that FlashAttention-3 was built with."""

    def with_flags(**flags):
        config = ModuleType("flash_attn_config")
        config.CONFIG = {"build_flags": {f"FLASHATTENTION_{k}": v for k, v in flags.items()}}
        monkeypatch.setitem(sys.modules, "flash_attn_config", config)

    return with_flags


def test_features_that_a_build_leaves_out(only, built):
    only("flash_attn_interface")
    built(DISABLE_SOFTCAP=True, DISABLE_LOCAL=False, DISABLE_HDIM96=True)
    backend = FlashAttention(replace(SHAPE, head_dim=96), "a test")
    assert backend.refusal(nk.AttentionSpec(1.0, window=4)) is None
    words = r"has no softcap: the installed FlashAttention-3 .* was built without it; .* 'triton'"
    assert re.search(words, backend.refusal(nk.AttentionSpec(1.0, softcap=4.0)))


@pytest.mark.parametrize(
    ("flags", "changes", "words"),
    [
        ({"DISABLE_PAGEDKV": True}, {}, r"built without blocks \(paged KV\)"),
        ({"DISABLE_VARLEN": True}, {}, "built without sequences of different lengths"),
        ({"DISABLE_FP16": True}, {"dtype": torch.float16}, "built without float16"),
        (
            {"DISABLE_HDIM192": True, "DISABLE_HDIM256": True},
            {"head_dim": 136},
            "built without heads of 136 dimensions",
        ),
    ],
)
def test_a_build_that_lacks_what_a_shape_needs(only, built, flags, changes, words):
    shape = replace(SHAPE, **changes)
    built(**flags)
    only("flash_attn_interface", "flash_attn")
    assert "FlashAttention-2" in FlashAttention(shape, "a test").reason
    only("flash_attn_interface")
    with pytest.raises(ValueError, match=words):
        FlashAttention(shape, "a test")
    built()
    assert "FlashAttention-3" in FlashAttention(shape, "a test").reason


@pytest.mark.parametrize("block_size", [16, 64])
def test_flash_attention_3_takes_small_blocks(only, block_size):
    only("flash_attn_interface", "flash_attn")
    case = step(DECODES + CHUNKS, device="cpu", block_size=block_size)
    assert_attends(attend(case), case.expected())


def test_no_sequences_at_all(only):
    only("flash_attn_interface")
    case = step([(1, 5)], device="cpu")
    none = nk.AttentionMetadata(
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, 1, dtype=torch.int32),
        1,
        1,
        0,
    )
    out = attend(replace(case, metadata=none))
    assert out.shape == case.q.shape
    assert not out.any()


def test_queries_that_are_a_view_of_more(only):
    """The engine's queries are a view of a wider tensor: only D is contiguous."""
    only("flash_attn_interface")
    case = step(DECODES + CHUNKS, device="cpu")
    wider = torch.cat([case.q, case.q], 1)[:, : case.q.shape[1]]
    assert not wider.is_contiguous()
    out = attend(replace(case, q=wider))
    assert out.is_contiguous()
    assert_attends(out, case.expected())


def test_reason_names_the_package(only):
    only("flash_attn_interface", "flash_attn")
    assert (
        FlashAttention(SHAPE, "a test").reason == "a test; FlashAttention-3 (flash_attn_interface)"
    )
    only("flash_attn")
    backend = FlashAttention(SHAPE, "a test")
    assert backend.reason == "a test; FlashAttention-2 (flash_attn)"
    assert backend.name == "flash_attn"


@pytest.mark.parametrize(
    ("capability", "title"),
    [((9, 0), "Attention-3"), ((8, 9), "Attention-2"), ((10, 0), "Attention-2")],
)
def test_the_card_decides_which_version(only, monkeypatch, capability, title):
    only("flash_attn_interface", "flash_attn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    shape = replace(SHAPE, device=torch.device("cuda"))
    assert title in FlashAttention(shape, "a test").reason


def test_selected_by_name_on_a_card(only, monkeypatch):
    only("flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    options = {"dtype": torch.bfloat16, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    backend = nk.attention_backend("flash_attn", device="cuda", block_size=16, **options)
    assert backend.reason == "asked for by name; FlashAttention-3 (flash_attn_interface)"
    layout = backend.kv_layout(3, torch.bfloat16)
    assert (layout.order, layout.block_size, layout.num_blocks) == ("NHD", 16, 3)


def test_without_a_package_the_error_names_what_to_install(only):
    only()
    with pytest.raises(ValueError, match="flash_attn") as caught:
        FlashAttention(SHAPE, "a test")
    text = str(caught.value)
    for words in (
        "flash_attn_interface cannot be imported",
        "flash_attn cannot be imported",
        'pip install "nv-kernels[flash-attn]"',
        "wheel of FlashAttention-3",
        "'triton'",
    ):
        assert words in text


def test_flash_attention_3_alone_does_not_run_on_other_cards(only, monkeypatch):
    only("flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(ValueError, match=r"for Hopper cards \(9.x\), not 8.x; flash_attn cannot"):
        FlashAttention(replace(SHAPE, device=torch.device("cuda")), "a test")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32: .* takes bfloat16 or float16"),
        ({"head_dim": 68}, "head_dim is 68"),
        ({"head_dim": 264}, "head_dim is 264"),
        ({"block_size": 64}, "block_size is 64: FlashAttention-2 needs a multiple of 256"),
    ],
)
def test_refuses_what_it_cannot_do(only, change, words):
    only("flash_attn")
    with pytest.raises(ValueError, match=words):
        FlashAttention(replace(SHAPE, **change), "a test")


def test_refuses_an_old_card(only, monkeypatch):
    only("flash_attn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    with pytest.raises(ValueError, match=r"is 7.5: .* needs 8.0 or more; use 'triton'"):
        FlashAttention(replace(SHAPE, device=torch.device("cuda")), "a test")


def test_refuses_an_fp8_cache(only):
    only("flash_attn_interface")
    with pytest.raises(
        ValueError, match=r"is torch.float8_e4m3fn: .* torch.bfloat16; use 'triton'"
    ):
        FlashAttention(SHAPE, "a test").kv_layout(2, torch.float8_e4m3fn)
