"""The length of a sequence: what a scaled rope gives, and which setting binds."""

import json
import re
import warnings
from pathlib import Path

import pytest
from nv_api import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def scaled(tmp_path, checkpoint):
    """A function that starts the tiny model, of 64 positions, with a scaled rope."""

    def start(rope, **options):
        for file in Path(checkpoint).iterdir():
            if not (tmp_path / file.name).exists():
                (tmp_path / file.name).symlink_to(file)
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"max_position_embeddings": 64, "rope_parameters": None, "rope_scaling": rope}
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
        return LLM(str(tmp_path), device="cpu", num_kvcache_blocks=64, block_size=16, **options)

    return start


@pytest.mark.parametrize(("rope", "own"), [(LINEAR, 256), (YARN, 128)])
@pytest.mark.parametrize("asked", [None, "as much"])
def test_b13_a_scaled_rope_takes_prompts_of_its_length(scaled, rope, own, asked):
    with scaled(rope, max_model_len=asked and own) as llm:
        (output,) = llm.generate([list(range(3, own + 1))], GREEDY, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(output["token_ids"]) == 2
        with pytest.raises(ValueError, match=rf"the model's own length is {own} \(max_position_em"):
            llm.generate([[5] * own], GREEDY, use_tqdm=False)


def test_b13_a_length_that_is_cut_is_reported(scaled):
    match = r"max_model_len is 300 and the model's own length is 256"
    with pytest.warns(UserWarning, match=match) as warned:
        llm = scaled(LINEAR, max_model_len=300)
    llm.close()
    assert warned[0].filename == __file__  # the line that calls LLM


def test_b13_the_default_is_cut_without_a_word(scaled):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled(LINEAR).close()


def test_b13_an_option_that_binds_is_named(scaled):
    with (
        scaled(LINEAR, max_model_len=100) as llm,
        pytest.raises(
            ValueError, match=r"max_model_len is 100, .* raise max_model_len \(up to 256"
        ),
    ):
        llm.generate([[5] * 100], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("overrides", [None, {"rms_norm_eps": 1e-6}])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_16_the_file_and_the_field_that_bind_are_named(scaled, tmp_path, overrides, is_gguf):
    file, field = tmp_path / "config.json", "max_position_embeddings"
    if is_gguf:
        file, field = Path("/models/m.gguf"), "qwen3.context_length"
        record = {"file": str(file), "warnings": []}
        (tmp_path / "from_gguf.json").write_text(json.dumps(record))
    place = f"({field} and the scaling of its rope, in {file}"
    place += " with hf_overrides)" if overrides else ")"
    with pytest.warns(UserWarning, match=re.escape(f"own length is 256 {place}: 256 is used")):
        llm = scaled(LINEAR, max_model_len=300, hf_overrides=overrides)
    with llm, pytest.raises(ValueError, match=re.escape(f"own length is 256 {place}, so there")):
        llm.generate([[5] * 256], GREEDY, use_tqdm=False)
