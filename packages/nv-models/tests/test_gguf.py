"""GGUF files: exact weights, the same logits, config, and the folder in the cache."""

import errno
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from nv_models import RopeConfig, TensorParallel, load_model, read_config, resolve
from nv_models.architectures import ARCHITECTURES
from nv_models.checkpoint.gguf.folder import source_of
from nv_models.checkpoint.gguf.header import read_header
from nv_models.checkpoint.gguf.metadata import rope_parameters
from nv_models.checkpoint.gguf.section import Section
from nv_models.rope import cos_sin_table, frequencies
from safetensors.torch import load_file, save_file

PROMPT = [(37 * i + 11) % 320 for i in range(60)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
def test_equals_the_dequantized_checkpoint(
    tiny_checkpoint, paged_runner, write_gguf, tmp_path, architecture, kind
):
    folder = tiny_checkpoint(architecture, tie_word_embeddings=kind == Kind.Q8_0)
    kept = write_gguf(folder, tmp_path / "model.gguf", kind)
    save_file(kept, folder / "model.safetensors")
    expected = load_model(folder, dtype="float32")
    model = load_model(tmp_path / "model.gguf", dtype="float32")
    wanted = dict(expected.named_parameters())
    is_quantized = kind in {Kind.Q8_0, Kind.Q4_1}
    assert wanted.keys() - dict(model.named_parameters()).keys() == (
        {"model.embed_tokens.weight"} if is_quantized else set()
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    logits, own = (paged_runner(each).step(PROMPT) for each in (model, expected))
    if is_quantized:  # sums of another order
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits, own)


KEYS = {
    "Qwen2": {},
    "SmolLM3": {"rope.freq_base": 2000000.0},
    "Granite": {
        "attention.scale": 0.4,
        "embedding_scale": 3.0,
        "residual_scale": 0.6,
        "logit_scale": 2.0,
    },
    "Olmo2": {},
    "Gemma2": {
        "attention.sliding_window": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3": {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    },
    "Glm4": {"rope.dimension_count": 16},
    "GptOss": {
        "attention.sliding_window": 16,
        "expert_feed_forward_length": 96,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "Exaone4": {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False, True, False],
    },
    "Phi3": {
        "attention.sliding_window": 48,
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": (1 + math.log(256 / 32) / math.log(32)) ** 0.5,
    },
}
"""The keys that llama.cpp's converter writes besides the usual ones."""
GEMMA = {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}
"""As published: the scale that llama.cpp derives from the head's length, and a tied embedding."""
CHANGES = {
    "Qwen2": {"use_sliding_window": False},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    "Olmo2": {"attention_bias": False},
    "Gemma2": GEMMA,
    "Gemma3": GEMMA,
}


@pytest.mark.parametrize("name", KEYS)
def test_other_architectures(tiny_models, paged_runner, write_gguf, tmp_path, name):
    folder = tiny_models.write_tiny_model(tmp_path / "source", name, **CHANGES.get(name, {}))
    kept = write_gguf(folder, tmp_path / "model.gguf", Kind.F32, metadata=KEYS[name])
    save_file(kept, folder / "model.safetensors")
    expected, model = load_model(folder), load_model(tmp_path / "model.gguf", dtype="float32")
    logits = paged_runner(model).step(PROMPT)
    torch.testing.assert_close(logits, paged_runner(expected).step(PROMPT), rtol=1e-5, atol=1e-5)


def test_longrope_has_both_lists(tiny_model, write_gguf, tmp_path):
    folder = tiny_model("Phi3")
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32, metadata=KEYS["Phi3"])
    found, expected = read_config(resolve(tmp_path / "m.gguf")), read_config(folder)
    assert found.ropes[0].attention_factor == pytest.approx(1.6**0.5)
    for longest in (32, 33):
        tables = [cos_sin_table(each.ropes[0], 16, longest) for each in (found, expected)]
        torch.testing.assert_close(*tables)


@pytest.mark.parametrize(
    ("keys", "windows"),
    [({}, (None,) * 4), ({"attention.sliding_window": 16}, (16, 16, 16, None))],
)
def test_windows_of_exaone_4(tiny_model, write_gguf, tmp_path, keys, windows):
    """Only layers with a window are rotated, or all of them if none has one."""
    write_gguf(tiny_model("Exaone4"), tmp_path / "m.gguf", Kind.F32, metadata=keys)
    config = read_config(resolve(tmp_path / "m.gguf"))
    assert tuple(layer.attention.window for layer in config.layers) == windows
    rotated = [bool(each) or not keys for each in windows]
    assert [layer.rope is not None for layer in config.layers] == rotated


def test_the_window_of_exaone_4_32b_without_a_key_for_it():
    derived = ARCHITECTURES["Exaone4ForCausalLM"].gguf_derived
    assert derived({"num_hidden_layers": 64}) == {"sliding_window": 4096}
    assert derived({"num_hidden_layers": 64, "sliding_window": 32}) == {"sliding_window": 32}
    assert derived({"num_hidden_layers": 30}) == {"sliding_window": None}


def test_phi_3_without_a_window(tiny_model, write_gguf, tmp_path):
    keys = KEYS["Phi3"] | {"attention.sliding_window": 0}
    write_gguf(tiny_model("Phi3"), tmp_path / "m.gguf", Kind.F32, metadata=keys)
    assert read_config(resolve(tmp_path / "m.gguf")).windows == (None,)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.factor": 2.0}, "scales its rope twice, by rope_factors_long.weight and by"),
        ({"rope.dimension_count": 16}, r"rope_factors_short.weight has shape \[6\] and type 0: it"),
        ({"rope.scaling.original_context_length": None}, "lacks the metadata phi3.rope.scaling.or"),
    ],
)
def test_longrope_that_does_not_fit(tiny_model, write_gguf, tmp_path, keys, message):
    write_gguf(tiny_model("Phi3"), tmp_path / "m.gguf", Kind.F32, metadata=KEYS["Phi3"] | keys)
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize("lost", ["rope_factors_short.weight", "rope_factors_long.weight"])
def test_b12_longrope_without_one_of_its_lists(tiny_model, write_gguf, tmp_path, lost):
    file = tmp_path / "m.gguf"
    write_gguf(tiny_model("Phi3"), file, Kind.F32, metadata=KEYS["Phi3"])
    header = read_header(file)
    tensors = {name: info for name, info in header.tensors.items() if name != lost}
    with pytest.raises(ValueError, match=f"{file} lacks the tensor {lost}; download or convert"):
        rope_parameters(Section(replace(header, tensors=tensors), "phi3"), 16)


@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic", "llama3", "LINEAR"])
def test_b12_a_scaling_that_is_not_known_is_named(tiny_checkpoint, write_gguf, tmp_path, kind):
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": 1.0}
    write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", Kind.F32, metadata=keys)
    with pytest.raises(ValueError, match=f"scales its rope by {kind!r}, which is not supported"):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("keys", "windows", "thetas"),
    [
        ({}, (None,) * 4, {1e4}),
        ({"attention.sliding_window": 16}, (16,) * 4, {500.0}),  # the sixth layer would have none
        (
            {
                "attention.sliding_window": 16,
                "attention.sliding_window_pattern": [True, False, False, True],
            },
            (16, None, None, 16),
            {1e4, 500.0},
        ),
    ],
)
def test_windows_of_gemma_3(tiny_model, write_gguf, tmp_path, keys, windows, thetas):
    keys = {"rope.freq_base_swa": 500.0, **keys}
    write_gguf(tiny_model("Gemma3"), tmp_path / "m.gguf", Kind.F32, metadata=keys)
    config = read_config(resolve(tmp_path / "m.gguf"))
    assert tuple(layer.attention.window for layer in config.layers) == windows
    assert {layer.rope.rope_theta for layer in config.layers} == thetas


@pytest.mark.parametrize(
    ("architecture", "num_layers", "hidden_size", "num_heads", "head_dim", "scale"),
    [
        ("Gemma2ForCausalLM", 42, 3584, 16, 256, 256),
        ("Gemma2ForCausalLM", 46, 4608, 32, 128, 144),
        ("Gemma3ForCausalLM", 48, 3840, 16, 256, 256),
        ("Gemma3ForCausalLM", 62, 5376, 32, 128, 168),
    ],
)
def test_scale_of_gemma(architecture, num_layers, hidden_size, num_heads, head_dim, scale):
    """The published sizes, and the `query_pre_attn_scalar` of their config.json."""
    fields = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "sliding_window": 1024,
    }
    derived = ARCHITECTURES[architecture].gguf_derived(fields)
    assert derived["query_pre_attn_scalar"] == scale


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_shards(tiny_checkpoint, write_gguf, tmp_path, rank):
    folder = tiny_checkpoint("llama", attention_bias=True)
    save_file(write_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0), folder / "model.safetensors")
    parallel = TensorParallel(rank, 2)
    wanted = dict(load_model(folder, parallel=parallel, dtype="bfloat16").named_parameters())
    for name, parameter in load_model(
        tmp_path / "model.gguf", parallel=parallel
    ).named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wanted[name]), name


def test_folder_holds_config_tokenizer_and_link(tiny_checkpoint, write_gguf, tmp_path):
    file = tmp_path / "tiny.gguf"
    source = tiny_checkpoint("llama")
    write_gguf(source, file, Kind.F16)
    folder = resolve(file)
    assert folder.is_relative_to(tmp_path / "cache" / "nv")
    assert (folder / "model.gguf").resolve() == file
    assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    config, original = read_config(folder), read_config(source)
    assert config.dtype == torch.float16
    assert config.eos_token_ids == (0, 1)  # end of text, end of turn
    for name in ("vocab_size", "hidden_size", "head_dim", "num_kv_heads", "ropes", "num_layers"):
        assert getattr(config, name) == getattr(original, name)

    written = (folder / "config.json").stat().st_mtime_ns
    assert resolve(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    os.utime(file, ns=(1, 1))  # another file of that name
    assert resolve(file) != folder
    assert not list(folder.parent.glob(".draft*"))


def test_a_folder_knows_its_file(tiny_checkpoint, write_gguf, tmp_path, monkeypatch):
    source = tiny_checkpoint("llama")
    write_gguf(source, tmp_path / "tiny.gguf", Kind.F16)
    monkeypatch.chdir(tmp_path)
    assert source_of(resolve("tiny.gguf")) == tmp_path / "tiny.gguf"
    assert source_of(source) == source


def test_link_to_a_file_that_is_gone(tiny_checkpoint, write_gguf, tmp_path):
    write_gguf(tiny_checkpoint(), tmp_path / "model.gguf", Kind.F32)
    folder = resolve(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="which is gone"):
        load_model(folder)


def test_several_files_in_a_folder(tiny_checkpoint):
    folder = tiny_checkpoint()
    (folder / "model.safetensors").unlink()
    (folder / "a.gguf").touch()
    (folder / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeConfig(1e4)),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            RopeConfig(1e4, "linear", factor=4.0),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            RopeConfig(1e4, "yarn", factor=4.0, original_max_position_embeddings=64),
        ),
    ],
)
def test_rope(tiny_checkpoint, write_gguf, tmp_path, metadata, expected):
    write_gguf(tiny_checkpoint("llama"), tmp_path / "model.gguf", Kind.F32, metadata=metadata)
    rope = read_config(resolve(tmp_path / "model.gguf")).ropes[0]
    for got, wanted in zip(frequencies(rope, 64), frequencies(expected, 64), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))


def test_llama3_rope_is_read_from_its_factors(tiny_checkpoint, write_gguf, tmp_path):
    expected = RopeConfig(1e4, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled, plain = frequencies(expected, 64)[0], frequencies(RopeConfig(1e4), 64)[0]
    factors = (plain / scaled).numpy()
    folder = tiny_checkpoint("llama")
    write_gguf(folder, tmp_path / "model.gguf", Kind.F32, rope_factors=factors)
    model = load_model(tmp_path / "model.gguf")
    torch.testing.assert_close(frequencies(model.config.ropes[0], 64)[0], scaled)

    other = np.linspace(1, 5, 32, dtype=np.float32)
    write_gguf(folder, tmp_path / "other.gguf", Kind.F32, rope_factors=other)
    with pytest.raises(ValueError, match="not Llama 3's"):
        resolve(tmp_path / "other.gguf")


def test_unsupported_architecture(write_header, tmp_path):
    write_header(tmp_path / "model.gguf", "gemma", {})
    with pytest.raises(
        ValueError,
        match=r"'gemma', which is not supported; .* llama, olmo2, phi3, qwen2, qwen3, qwen3moe",
    ):
        resolve(tmp_path / "model.gguf")
    assert not list((tmp_path / "cache" / "nv" / "gguf").iterdir())


def test_lacks_what_it_needs(tiny_checkpoint, write_gguf, write_header, tmp_path):
    write_header(tmp_path / "empty.gguf", "llama", {})
    with pytest.raises(ValueError, match=r"lacks the tensor token_embd.weight"):
        resolve(tmp_path / "empty.gguf")
    folder = tiny_checkpoint("llama")
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32, metadata={"rope.scaling.type": "linear"})
    with pytest.raises(ValueError, match=r"lacks the metadata llama.rope.scaling.factor"):
        resolve(tmp_path / "m.gguf")
    write_gguf(folder, tmp_path / "r.gguf", Kind.F32, metadata={"rope.dimension_count": 32})
    with pytest.raises(ValueError, match=r"rope.dimension_count is 32, .* not supported"):
        resolve(tmp_path / "r.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count": 0}, "head_count is 0: it must be a positive integer"),
        ({"attention.head_count": [4, 4]}, r"head_count is \[4, 4\] \(2 values\): it must be"),
        ({"attention.head_count_kv": "2"}, "head_count_kv is '2': it must be"),
        ({"attention.key_length": 0}, "key_length is 0: it must be"),
        ({"block_count": None}, "lacks the metadata llama.block_count"),
        ({"rope.freq_base": 0.0}, "freq_base is 0.0: it must be a positive number"),
        (
            {
                "rope.freq_base": 1.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            "freq_base is 1.0: it must be more than 1 with yarn",
        ),
    ],
)
def test_damaged_sizes(tiny_checkpoint, write_gguf, tmp_path, metadata, message):
    file = tmp_path / "m.gguf"
    write_gguf(tiny_checkpoint("llama"), file, Kind.F32, metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        resolve(file)
    assert str(file) in str(error.value)
    assert str(error.value).endswith("download or convert the file again")


def test_an_embedding_that_is_no_matrix(tiny_checkpoint, write_gguf, tmp_path):
    folder = tiny_checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(320)
    save_file(tensors, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32)
    with pytest.raises(
        ValueError, match=r"token_embd.weight has shape \[320\]: it must be a matrix"
    ):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "shape", [(319, 128), (321, 128), (320, 64), (128, 320), (320,), (1, 128), (320, 1, 128)]
)
def test_a_head_unlike_the_embedding(tiny_checkpoint, write_gguf, tmp_path, shape):
    folder = tiny_checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32)
    with pytest.raises(ValueError, match="shape") as error:
        resolve(tmp_path / "m.gguf")
    assert str(error.value) == (
        f"{tmp_path / 'm.gguf'}: output.weight has shape {list(shape)}: it must have that of "
        "token_embd.weight, [320, 128]; download or convert the file again"
    )


@pytest.mark.parametrize("alignment", [0, 7])
def test_an_alignment_that_is_no_power_of_two(write_header, tmp_path, alignment):
    write_header(tmp_path / "m.gguf", "llama", {"general.alignment": alignment})
    sentence = f"general.alignment is {alignment}: it must be a power of two; download or convert"
    with pytest.raises(ValueError, match=sentence):
        resolve(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.gguf"])
def test_a_folder_that_lost_a_file_is_written_anew(tiny_checkpoint, write_gguf, tmp_path, name):
    file = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint("llama"), file, Kind.F16)
    folder = resolve(file)
    before = {path.name for path in folder.iterdir()}
    (folder / name).unlink()
    assert resolve(file) == folder
    assert {path.name for path in folder.iterdir()} == before
    assert not list(folder.parent.glob(".draft*"))


def test_upper_case_and_a_folder_around_the_file(tiny_checkpoint, write_gguf, tmp_path):
    folder = tmp_path / "around"
    folder.mkdir()
    write_gguf(tiny_checkpoint("llama"), folder / "X.GGUF", Kind.F16)
    assert load_model(folder / "X.GGUF").config.dtype == torch.float16
    with pytest.raises(ValueError, match=r"has no config.json: give the GGUF file itself") as error:
        resolve(folder)
    assert str(folder / "X.GGUF") in str(error.value)


def test_not_gguf_and_cut_off(tiny_checkpoint, write_gguf, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML and more")
    with pytest.raises(ValueError, match="is not a little-endian GGUF file"):
        resolve(file)
    write_gguf(tiny_checkpoint("llama"), file, Kind.F32)
    whole = file.read_bytes()
    file.write_bytes(whole[:2000])
    with pytest.raises(ValueError, match="corrupt or truncated in its header"):
        resolve(file)
    file.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=rf"\n  {file} is truncated: .* ends at byte"):
        load_model(file)


def test_missing_tensor(tiny_checkpoint, write_gguf, tmp_path):
    folder = tiny_checkpoint("qwen3", num_hidden_layers=1)
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32, metadata={"block_count": 2})
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj.weight .* is missing"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "own", "shape"),
    [
        ("model.norm.weight", "output_norm.weight", (64,)),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", (256, 64)),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight", (64, 192)),
    ],
)
def test_a_tensor_of_another_shape_by_its_name_in_the_user_s_file(
    tiny_checkpoint, write_gguf, tmp_path, name, own, shape
):
    folder = tiny_checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "m.gguf", Kind.F32)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        load_model(tmp_path / "m.gguf")
    first, second, *_ = str(error.value).splitlines()
    assert first == f"the checkpoint {tmp_path / 'm.gguf'} cannot be loaded:"
    assert second.startswith(f"  {name} ({own} in the file) has shape {list(shape)}, expected ")


def test_without_the_extra(tiny_checkpoint, write_gguf, tmp_path, monkeypatch):
    write_gguf(tiny_checkpoint(), tmp_path / "model.gguf", Kind.F32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'nv-models\[gguf\]'"):
        resolve(tmp_path / "model.gguf")


def test_tensors_begin_at_the_next_aligned_byte(tmp_path):
    """Also where the header ends at one, as one of 32 lengths in a row does."""
    expected = np.arange(8, dtype=np.float32)
    for length in range(32):
        file = tmp_path / f"{length}.gguf"
        writer = GGUFWriter(file, "llama")
        writer.add_string("llama.note", "x" * length)
        writer.add_tensor("t", expected)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        info = read_header(file).tensors["t"]
        assert np.array_equal(np.fromfile(file, np.float32, 8, offset=info.offset), expected)


def test_b10_a_full_disk_is_reported_with_the_folder_and_the_fix(
    tiny_checkpoint, write_gguf, tmp_path, monkeypatch
):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_gguf(tiny_checkpoint("llama"), tmp_path / "m.gguf", Kind.F16)
    monkeypatch.setattr(Path, "symlink_to", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left .* set XDG_CACHE_HOME"):
        resolve(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache/nv/gguf").iterdir())


@pytest.mark.parametrize("kind", [4, 36, 10**6])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "token_embd.weight", "output_norm.weight"])
def test_16_a_tensor_of_an_unknown_type_is_named(tiny_checkpoint, write_gguf, tmp_path, name, kind):
    file = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint("llama"), file, Kind.F16)
    content = bytearray(file.read_bytes())
    text = len(name).to_bytes(8, "little") + name.encode()
    place = content.index(text) + len(text)
    place += 4 + 8 * int.from_bytes(content[place : place + 4], "little")
    content[place : place + 4] = kind.to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} in {file} has the unknown type {kind}"):
        load_model(file)


def named_alike(file: Path, old: str, new: str) -> None:
    """Rename a key or a tensor to the name of another, which is as long."""
    assert len(old) == len(new)
    content = file.read_bytes()
    assert content.count(old.encode()) == 1
    file.write_bytes(content.replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blk.1.attn_q.weight", "blk.0.attn_q.weight", "the tensor blk.0.attn_q.weight twice"),
        ("blk.1.ffn_up.weight", "blk.1.attn_k.weight", "the tensor blk.1.attn_k.weight twice"),
        ("llama.context_length", "llama.rope.freq_base", "the key llama.rope.freq_base twice"),
    ],
)
def test_16_a_name_that_comes_twice_in_a_file(
    tiny_checkpoint, write_gguf, tmp_path, old, new, message
):
    """llama.cpp refuses it: either of the two may be the wrong one."""
    file = tmp_path / "m.gguf"
    write_gguf(tiny_checkpoint("llama", num_hidden_layers=2), file, Kind.F32)
    named_alike(file, old, new)
    with pytest.raises(ValueError, match=message):
        load_model(file)


@pytest.mark.parametrize("shift", [-32, 32, -(10**6), 0])
def test_16_tensors_that_lie_over_one_another(tiny_checkpoint, write_gguf, tmp_path, shift):
    file = tmp_path / "m.gguf"
    write_gguf(tiny_checkpoint("llama"), file, Kind.F32)
    name = "blk.0.attn_k.weight"
    before, at = read_header(file).tensors["blk.0.attn_q.weight"], read_header(file).tensors[name]
    content = bytearray(file.read_bytes())
    place = content.index(name.encode()) + len(name) + 4 + 2 * 8 + 4
    known = int.from_bytes(content[place : place + 8], "little")
    moved = known + shift if shift else known + before.offset - at.offset
    content[place : place + 8] = max(moved, 0).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"{file}: \S+ begins at byte \d+, within \S+, which ends"
    ):
        load_model(file)
