"""Failures that a user must hear of: code of a checkpoint's own, a device that fails, no memory."""

import json
from pathlib import Path

import pytest
from nv_api import LLM, SamplingParams
from nv_api.cli import app
from nv_engine.executor.local import LocalExecutor
from typer.testing import CliRunner

REFUSAL = "code of its own, which is never run"


@pytest.fixture
def own_tokenizer(checkpoint: str, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer is a Python file that leaves a trace when it runs."""
    folder = tmp_path / "own"
    folder.mkdir()
    for file in Path(checkpoint).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenization_own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    config |= {"auto_map": auto_map, "tokenizer_class": "OwnTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("answer", ["y", "n"])
def test_code_of_a_checkpoint_never_runs(own_tokenizer, tmp_path, monkeypatch, answer):
    monkeypatch.setattr("builtins.input", lambda *_: answer)
    with LLM(str(own_tokenizer), device="cpu", num_kvcache_blocks=4) as llm:
        assert type(llm.get_tokenizer()).__name__ != "OwnTokenizer"  # tokenizer.json serves alone
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_is_code_alone_is_refused(own_tokenizer, monkeypatch):
    def ask(*_: object, **__: object) -> None:
        raise ValueError("contains custom code ... pass `trust_remote_code=True`")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    with pytest.raises(ValueError, match=REFUSAL):
        LLM(str(own_tokenizer), device="cpu", num_kvcache_blocks=4)


def test_an_unsupported_architecture_is_said_first(own_tokenizer):
    config = json.loads((own_tokenizer / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    (own_tokenizer / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="supported are Qwen3ForCausalLM"):
        LLM(str(own_tokenizer), device="cpu", num_kvcache_blocks=4)


def fail(*_: object) -> None:
    raise RuntimeError("CUDA out of memory")


def test_a_failed_step_is_an_error_and_a_warning(checkpoint, monkeypatch):
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(LocalExecutor, "submit", fail)
            with pytest.warns(UserWarning, match="2 completions .*CUDA out of memory"):
                outputs = llm.generate(["a", "b"], use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate("a", params, use_tqdm=False)[0]["token_ids"]) == 2


@pytest.mark.filterwarnings("ignore:.*finish_reason 'error'")
@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
def test_the_command_fails_with_a_sentence(checkpoint, monkeypatch, command):
    monkeypatch.setattr(LocalExecutor, "submit", fail)
    options = ["--model", str(checkpoint), "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, *options], input="hello\n")
    assert result.exit_code == 1
    assert "nv: " in result.stderr
    assert "CUDA out of memory" in result.stderr


def test_a_pool_larger_than_the_memory_says_how_much_fits(checkpoint):
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=1000000000 needs .*use at most"):
        LLM(str(checkpoint), device="cpu", num_kvcache_blocks=10**9)
