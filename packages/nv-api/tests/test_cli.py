import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import nv_api.start
import pytest
import torch
from nv_api.cli import DEMO_SENTENCE, ENGINE_OPTIONS, app, main
from nv_engine import EngineConfig
from safetensors.torch import save_file
from typer.testing import CliRunner


@pytest.fixture
def nv(monkeypatch, engine, folder):
    """Run the command over the scripted engine; the demo model is the test's folder."""

    def start_engine(config):
        engine.closed = False
        return engine

    monkeypatch.setattr(nv_api.start, "Engine", start_engine)
    monkeypatch.setattr(nv_api.start, "resolve", lambda model, revision: folder)
    return lambda *args, **options: CliRunner().invoke(app, args, **options)


def test_generate_prints_each_prompt_with_its_completion(nv, engine):
    result = nv("generate", "ab", "cd", "--model", "m")
    shown = "--- prompt {} of 2 ---\n{}\n--- completion ---\n{}\n\n"
    assert result.exit_code == 0
    assert result.stdout == shown.format(1, "ab", "ab") + shown.format(2, "cd", "cd")
    assert DEMO_SENTENCE not in result.stderr
    assert engine.closed


def test_without_a_model_the_demo_answers_and_stderr_reports_it(nv):
    result = nv("generate", "ab", "--max-tokens", "1")
    assert (result.exit_code, result.stdout) == (0, "aba\n")
    assert DEMO_SENTENCE in result.stderr


def test_options_become_parameters(nv, engine, monkeypatch):
    seen = []
    add = type(engine).add

    def note(self, request):
        seen.append(request.params)
        return add(self, request)

    monkeypatch.setattr(type(engine), "add", note)
    given = ["--temperature", "0.5", "--top-p", "0.9", "--seed", "3", "--max-tokens", "2"]
    for options in [], ["--model", "demo"], ["--model", "m"], given:
        nv("generate", "a", *options)
    assert [(p.temperature, p.top_p, p.seed, p.max_tokens) for p in seen] == [
        (0.0, 1.0, None, 64),
        (0.0, 1.0, None, 64),
        (1.0, 1.0, None, 64),
        (0.5, 0.9, 3, 2),
    ]


def write_adapter(folder, rank):
    config = '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": {"q_proj": %d}}'
    (folder / "adapter_config.json").write_text(config % rank)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.zeros(rank, 4), name.format("B"): torch.zeros(4, rank)}
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_adapter_is_loaded_for_its_rank(nv, monkeypatch, tmp_path):
    seen = []
    start, generate = nv_api.llm.start, nv_api.LLM.generate
    monkeypatch.setattr(nv_api.llm, "start", lambda m, o: seen.append(o) or start(m, o))

    def note(self, prompts, params, lora_request=None):
        seen.append(lora_request)
        return generate(self, prompts, params)

    monkeypatch.setattr(nv_api.LLM, "generate", note)
    write_adapter(tmp_path, 24)
    result = nv("generate", "ab", "--model", "m", "--lora", f"poet={tmp_path}")
    assert result.exit_code == 0, result.stderr
    assert (seen[0]["enable_lora"], seen[0]["max_lora_rank"]) == (True, 24)
    assert (seen[1].lora_name, seen[1].lora_path) == ("poet", str(tmp_path))
    for wrong, message in (
        ("poet", "--lora is 'poet': it must be NAME=PATH"),
        ("poet=/nowhere", "/nowhere is not a folder"),
    ):
        result = nv("generate", "ab", "--model", "m", "--lora", wrong)
        assert result.exit_code == 1
        assert message in result.stderr


def test_a_chat_with_an_adapter(nv, monkeypatch, tmp_path):
    seen = []
    start, stream = nv_api.llm.start, nv_api.LLM.stream_chat
    monkeypatch.setattr(nv_api.llm, "start", lambda m, o: seen.append(o) or start(m, o))

    def note(self, messages, params, lora_request):
        seen.append(lora_request)
        return stream(self, messages, params)

    monkeypatch.setattr(nv_api.LLM, "stream_chat", note)
    write_adapter(tmp_path, 8)
    result = nv("chat", "--lora", f"poet={tmp_path}", input="a\n")
    assert result.exit_code == 0, result.stderr
    assert (seen[0]["enable_lora"], seen[0]["max_lora_rank"]) == (True, 8)
    assert (seen[1].lora_name, seen[1].lora_path) == ("poet", str(tmp_path))
    result = nv("chat", "--lora", "poet", input="a\n")
    assert (result.exit_code, result.stderr[:26]) == (1, "nv: --lora is 'poet': it m")


def test_the_demo_chats_as_its_authors_recommend(nv, monkeypatch):
    seen = []
    stream = nv_api.LLM.stream_chat

    def note(self, messages, params, lora_request):
        assert lora_request is None
        seen.append((params.temperature, params.top_p, params.max_tokens))
        return stream(self, messages, params)

    monkeypatch.setattr(nv_api.LLM, "stream_chat", note)
    given = ["--temperature", "0.7"], ["--top-p", "0.5", "--max-tokens", "3"], ["--model", "m"]
    for options in [], *given:
        nv("chat", *options, input="a\n")
    assert seen == [(0.2, 0.9, 512), (0.7, 0.9, 512), (0.2, 0.5, 3), (1.0, 1.0, 512)]


def test_an_answer_that_repeats_itself_is_stopped(nv, engine, monkeypatch):
    seen = []
    stream = nv_api.LLM.stream_chat

    def note(self, messages, params, lora_request):
        assert lora_request is None
        seen.append([message["content"] for message in messages])
        return stream(self, messages, params)

    monkeypatch.setattr(nv_api.LLM, "stream_chat", note)
    engine.answers = [[40, *[39, 41] * 400], [39, 256]]
    result = nv("chat", "--max-tokens", "900", input="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "I" + "HJ" * 200 + "\nH\n")
    assert result.stderr.count("(stopped: the answer repeats itself)") == 1
    assert seen == [["one"], ["one", "IHJ", "two"]]
    assert engine.running == []


def test_chat_keeps_the_conversation_and_ends_with_its_input(nv, engine):
    hello = [72 - 33, 73 - 33, 256]
    engine.answers = [hello, hello]
    result = nv("chat", "--system", "be brief", input="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "HI\nHI\n")
    assert engine.num_added == 2
    assert engine.running == []


def test_a_blank_line_of_a_pipe_is_no_end(nv, engine):
    hello = [72 - 33, 73 - 33, 256]
    engine.answers = [hello, hello]
    result = nv("chat", input="one\n\n  \ntwo\n\n")
    assert (result.exit_code, result.stdout) == (0, "HI\nHI\n")


def test_a_chat_without_an_input_ends(nv, engine, monkeypatch):
    monkeypatch.setattr("nv_api.cli.sys", SimpleNamespace(stdin=None))
    assert nv("chat").exit_code == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(nv, engine):
    engine.answers = [[39, 40, 41, 256], [41, 256]]
    engine.interrupt_at_step = 2
    result = nv("chat", input="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "H\nJ\n")
    assert "stopped" in result.stderr


def test_a_full_context_does_not_end_the_chat(nv, engine):
    engine.max_model_len = 60
    engine.answers = [[39, 256], [40, 256]]
    result = nv("chat", input="one\n" + "two " * 20 + "\n/clear\nthree\n")
    assert (result.exit_code, result.stdout) == (0, "H\nI\n")
    assert "the prompt has" in result.stderr
    assert "/clear forgets the conversation" in result.stderr
    assert engine.num_added == 2


def test_clear_forgets_all_but_the_system_message(nv, engine, monkeypatch):
    seen = []
    stream = nv_api.LLM.stream_chat

    def note(self, messages, params, lora_request):
        assert lora_request is None
        seen.append([message["content"] for message in messages])
        return stream(self, messages, params)

    monkeypatch.setattr(nv_api.LLM, "stream_chat", note)
    engine.answers = [[39, 256]] * 3
    nv("chat", "--system", "s", input="one\ntwo\n/clear\nthree\n")
    assert seen == [["s", "one"], ["s", "one", "H", "two"], ["s", "three"]]


def test_a_chat_that_ends_without_an_answer_fails(nv, engine):
    engine.max_model_len = 8
    result = nv("chat", input="a line that is too long\n")
    assert (result.exit_code, result.stdout) == (1, "")


def test_every_command_has_the_shared_options():
    for command in "generate", "chat":
        result = CliRunner().invoke(app, [command, "--help"], terminal_width=200)
        for name in "model", "max-tokens", "temperature", "top-p", "seed", "dtype", "device":
            assert f"--{name}" in result.stdout
        for name in ENGINE_OPTIONS:
            assert f"--{name.replace('_', '-')}" in result.stdout


def test_options_of_the_engine_reach_it(nv, engine, monkeypatch):
    configs = []

    def start_engine(config):
        configs.append(config)
        return engine

    monkeypatch.setattr(nv_api.start, "Engine", start_engine)
    nv("generate", "a", "--dtype", "float32", "--device", "cpu", "--tensor-parallel-size", "2")
    assert [(c.dtype, c.device, c.tensor_parallel_size) for c in configs] == [("float32", "cpu", 2)]
    more = ["--max-model-len", "99", "--gpu-memory-utilization", "0.5", "--kv-cache-dtype", "fp8"]
    more += ["--quantization", "fp8"]
    nv("generate", "a", *more, "--enforce-eager")
    last = configs[-1]
    assert (last.max_model_len, last.gpu_memory_utilization) == (99, 0.5)
    assert (last.kv_cache_dtype, last.enforce_eager) == ("fp8", True)
    assert last.quantization == "fp8"


def test_options_left_out_are_the_engine_s_own(nv, engine, monkeypatch):
    configs = []
    monkeypatch.setattr(nv_api.start, "Engine", lambda c: configs.append(c) or engine)
    nv("generate", "a")
    plain = EngineConfig(model="a")
    for name in ENGINE_OPTIONS:
        assert getattr(configs[0], name) == getattr(plain, name), name


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "a", "--top-p", "7"], "top_p is 7"),
        (["generate", "a", "--dtype", "int3"], "dtype is 'int3'"),
        (["chat", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "a", "--gpu-memory-utilization", "2"], "gpu_memory_utilization is 2.0"),
    ],
)
def test_errors_are_one_sentence_and_exit_with_1(nv, args, sentence):
    result = nv(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith(f"nv: {sentence}")


def test_a_missing_model_is_one_sentence(tmp_path):
    result = CliRunner().invoke(app, ["generate", "a", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert result.stderr.startswith("nv: ")
    assert str(tmp_path / "none") in result.stderr


def test_version_and_the_two_ways_to_start():
    run = [sys.executable, "-m", "nv_api", "--version"]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert shown == f"nv {version('nv-api')}\n"
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"nv": f"{main.__module__}:{main.__name__}"}


def test_help_names_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "generate" in result.stdout
    assert "chat" in result.stdout
