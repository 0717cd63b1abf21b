"""Failures that a user must hear of: code of a checkpoint's own, a device that fails, no memory."""

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
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

    (own_tokenizer / "tokenizer.json").rename(own_tokenizer / "vocab.txt")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", ask)
    with pytest.raises(ValueError, match=REFUSAL):
        LLM(str(own_tokenizer), device="cpu", num_kvcache_blocks=4)


def test_an_unsupported_architecture_is_reported_first(own_tokenizer):
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
            with pytest.warns(UserWarning, match="2 completions .*CUDA out of memory") as seen:
                outputs = llm.generate(["a", "b"], use_tqdm=False)
            assert seen[0].filename == __file__
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate("a", params, use_tqdm=False)[0]["token_ids"]) == 2


@pytest.mark.parametrize("own", [True, False])
def test_a_manual_loop_hears_of_a_failed_step(checkpoint, monkeypatch, own):
    """Its pairs have no place for the reason; also of a request that failed beside another's."""
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4) as llm:
        assert llm.add_request("a", SamplingParams(max_tokens=2)) == 0
        with monkeypatch.context() as patched:
            patched.setattr(LocalExecutor, "submit", fail)
            if not own:
                with pytest.warns(UserWarning, match="1 completion ended .*, request 1 first"):
                    llm.generate(["b"], use_tqdm=False)
            with pytest.warns(UserWarning, match="request 0 first: .*out of memory") as seen:
                assert llm.step() == ([(0, [])], 0)
            assert seen[0].filename == __file__
        assert llm.is_finished()


@pytest.mark.filterwarnings("ignore:.*finish_reason 'error'")
@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
def test_the_command_fails_with_a_sentence(checkpoint, monkeypatch, command):
    monkeypatch.setattr(LocalExecutor, "submit", fail)
    options = ["--model", str(checkpoint), "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, *options], input="hello\n")
    assert result.exit_code == 1
    assert "nv: " in result.stderr
    assert "CUDA out of memory" in result.stderr


def test_a_pool_larger_than_the_memory_is_refused_with_what_fits(checkpoint):
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=1000000000 needs .*use at most"):
        LLM(str(checkpoint), device="cpu", num_kvcache_blocks=10**9)


def test_ctrl_c_waits_until_the_step_has_reached_every_request(checkpoint, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=8) as llm:
        (expected,) = llm.generate("bystander", params, use_tqdm=False)
        request = llm.add_request("bystander", params)
        process, steps = llm._session._processor.process, []

        def interrupt_before(updates):
            steps.append(len(updates))
            if len(steps) % 3 == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return process(updates)

        monkeypatch.setattr(llm._session._processor, "process", interrupt_before)
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                llm.generate("other", params, use_tqdm=False)
        monkeypatch.undo()
        results = []
        for _ in range(60):
            results += llm.step()[0]
        assert llm.is_finished()
        assert results == [(request, expected["token_ids"])]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-30])
def test_a_tiny_top_p_keeps_the_likeliest_token(checkpoint, top_p):
    tiny = SamplingParams(top_p=top_p, max_tokens=8, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4) as llm:
        drawn, likeliest = llm.generate(["hello", "hello"], [tiny, greedy], use_tqdm=False)
    assert drawn["token_ids"] == likeliest["token_ids"]


def test_a_top_k_beyond_the_vocabulary_keeps_all(checkpoint):
    params = [SamplingParams(top_k=k, seed=1, max_tokens=6) for k in (-1, 2**31 - 1)]
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4) as llm:
        all_, beyond = llm.generate(["hello", "hello"], params, use_tqdm=False)
    assert all_["token_ids"] == beyond["token_ids"]


def test_arrays_are_token_ids_and_bad_text_is_refused(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4, dtype="float") as llm:
        (plain,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        for prompts in (np.array([5, 6, 7]), [np.array([5, 6, 7])], [torch.tensor([5, 6, 7])]):
            (output,) = llm.generate(prompts, params, use_tqdm=False)
            assert output["token_ids"] == plain["token_ids"]
        with pytest.raises(ValueError, match="not valid Unicode at position 1"):
            llm.generate("a\ud800", params, use_tqdm=False)


def test_a_step_of_a_closed_llm_is_refused_while_a_request_waits(checkpoint):
    llm = LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4)
    llm.add_request([5], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.step()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.step()


@pytest.mark.parametrize("call", ["generate", "add_request"])
def test_a_second_thread_is_refused_and_harms_nothing(checkpoint, monkeypatch, call):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    refused = []
    with LLM(str(checkpoint), device="cpu", num_kvcache_blocks=4) as llm:
        executor = llm._session._engine.executor

        def ask():
            with pytest.raises(RuntimeError, match="another thread is using this LLM"):
                getattr(llm, call)([6], params)
            refused.append(call)

        def interfere(batch):
            monkeypatch.undo()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return executor.submit(batch)

        monkeypatch.setattr(executor, "submit", interfere)
        disturbed = llm.generate([5], params, use_tqdm=False)
        assert refused
        assert llm.is_finished()
        assert disturbed == llm.generate([5], params, use_tqdm=False)
