"""B07's siblings: an error about a config that was made of a GGUF file names the file and its keys.

The user has never seen the config.json in the cache.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from nv_models import load_model, read_config, resolve
from nv_models.checkpoint.gguf.header import read_header
from nv_models.checkpoint.gguf.keys import KEYS, OF_ROPE, naming_keys
from nv_models.checkpoint.gguf.metadata import config_json

YARN = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 128}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def error_of(tiny_checkpoint, write_gguf, tmp_path):
    """The error for metadata, without the file's name, which it begins with."""

    def error(architecture, metadata, **options):
        file = tmp_path / "m.gguf"
        write_gguf(tiny_checkpoint(architecture), file, Kind.F32, metadata=metadata, **options)
        with pytest.raises(ValueError, match=r"m\.gguf: ") as caught:
            read_config(resolve(file))
        message = str(caught.value)
        assert message.startswith(f"{file}: ")
        assert not {name for name in KEYS.keys() | OF_ROPE.keys() if name in message.split()}
        return message.removeprefix(f"{file}: ")

    return error


AGAIN = ": correct the file, or download it again"
EVEN = ": it must be even, as the rotary embedding turns pairs; use another checkpoint"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"attention.head_count": 3},
            "A.attention.head_count 3 is not a multiple of A.attention.head_count_kv 2" + AGAIN,
        ),
        (
            {"attention.head_count_kv": 3},
            "A.attention.head_count 4 is not a multiple of A.attention.head_count_kv 3" + AGAIN,
        ),
        ({"attention.key_length": 5}, "A.attention.key_length is 5" + EVEN),
        ({"rope.freq_base": 1e30}, "A.rope.freq_base is 1.0000000150474662e+30: it must be a"),
        ({"rope.scaling.factor": 1e9}, "A.rope.scaling.factor is 1000000000.0: it must be a"),
        (
            YARN | {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1e9},
            "A.rope.scaling.attn_factor is 1138629436.11",
        ),
        (
            YARN | {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2**32 - 1},
            "A.rope.scaling.original_context_length is 4294967295: it must be a number",
        ),
        *(
            ({key: 2**32 - 1}, f"A.{key} is 4294967295: it must be at most {most}")
            for key, most in {
                "context_length": 2147483647,
                "block_count": 2048,
                "feed_forward_length": 2147483647,
            }.items()
        ),
        (
            {"embedding_length": 64},
            "A.embedding_length is 64: it must be 128, the columns of token_embd.weight; download",
        ),
        (
            {"attention.head_count": 3, "attention.head_count_kv": 1, "attention.key_length": None},
            "A.attention.head_count is 3: it must be a number of heads of an equal, even length in "
            "A.embedding_length, 128, where there is no A.attention.key_length; download or",
        ),
    ],
)
def test_B07_an_error_names_the_file_and_its_key(error_of, metadata, message):
    assert error_of("llama", metadata).startswith(message.replace("A.", "llama."))


def test_B07_a_key_begins_with_the_file_s_architecture(error_of):
    message = error_of("qwen3", {"attention.head_count": 3})
    assert message.startswith("qwen3.attention.head_count 3 is not a multiple of qwen3.attention")


@pytest.mark.parametrize("factor", [1e30, float("inf"), float("nan"), -1.0])
def test_B07_factors_of_the_rope_that_cannot_be_name_the_file(error_of, factor):
    factors = np.full(32, factor, np.float32)
    message = error_of("llama", {"attention.key_length": 64}, rope_factors=factors)
    assert message.startswith("rope_freqs.weight has divisors from ")


def test_B07_every_field_of_a_converted_config_has_its_key(tiny_checkpoint, write_gguf, tmp_path):
    """Sizes and numbers, whose values a user may correct; other fields have no wrong values."""
    write_gguf(
        tiny_checkpoint("llama"),
        tmp_path / "m.gguf",
        Kind.F32,
        metadata=YARN | {"rope.scaling.factor": 4.0},
    )
    config = config_json(read_header(tmp_path / "m.gguf"))
    sizes = {name for name, value in config.items() if type(value) in {int, float}}
    assert sizes - {"vocab_size", "bos_token_id"} <= KEYS.keys()
    named = {name for name, value in config["rope_parameters"].items() if value != "yarn"}
    assert named <= OF_ROPE.keys()


def test_B07_an_empty_file_of_the_cache_is_written_anew(tiny_checkpoint, write_gguf, tmp_path):
    """As after a power cut: no error about a config.json that the user has never seen."""
    file = tmp_path / "m.gguf"
    write_gguf(tiny_checkpoint("llama"), file, Kind.F32)
    folder = resolve(file)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("")
        assert resolve(file) == folder
        assert json.loads((folder / name).read_text())
    assert load_model(file).config.hidden_size == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None},
            "num_attention_heads 3 does not divide hidden_size 128, and there is no head_dim",
        ),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_h"),
    ],
)
def test_B07_of_a_folder_the_fields_are_those_of_its_config_json(tiny_checkpoint, change, message):
    folder = tiny_checkpoint("llama")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message) as caught:
        read_config(folder)
    assert str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("architecture", "key"),
    [("granite", "granite.attention.scale"), ("nothing", "attention_multiplier")],
)
def test_B07_an_architecture_s_own_fields_have_their_keys_too(architecture, key):
    error = ValueError("attention_multiplier is 3: it must be less")
    match = f"^m.gguf: {key} is 3: it must be less$"
    with pytest.raises(ValueError, match=match), naming_keys(Path("m.gguf"), architecture):
        raise error
