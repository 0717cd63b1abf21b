"""`nv serve`: options, and the whole of it in processes of their own."""

import builtins
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from nv_api import LLM, LoRARequest, SamplingParams
from nv_api.cli import app, options_of
from nv_api.options import parse
from typer.testing import CliRunner


def test_other_options_are_those_of_llm():
    words = [
        "--max-num-seqs",
        "64",
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len",
        "none",
        "--hf-overrides",
        '{"rope_parameters": {"rope_theta": 5.0}}',
    ]
    assert options_of(words) == {
        "max_num_seqs": 64,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": None,
        "hf_overrides": {"rope_parameters": {"rope_theta": 5.0}},
    }
    with pytest.raises(ValueError, match="'64' belongs to no option"):
        options_of(["64"])
    words = ["--no-enable-prefix-caching", "--revision", "1.0", "--tokenizer=2"]
    assert options_of(words) == {
        "enable_prefix_caching": False, "revision": "1.0", "tokenizer": "2"
    }  # fmt: skip


def test_the_command_hands_its_options_on(monkeypatch):
    seen = []
    monkeypatch.setattr("nv_api.server.run.run", lambda *given: seen.append(given) or 3)
    monkeypatch.setenv("NV_API_KEY", "from-the-environment")
    words = ["serve", "some/model", "--port", "0", "--max-body-bytes", "1M", "--max-num-seqs", "4"]
    words += ["--served-model-name", "a", "--served-model-name", "b", "--root-path", "/nv"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3
    ((model, llm_options, options, listening),) = seen
    assert (model, llm_options) == ("some/model", {"max_num_seqs": 4})
    assert (options.names, options.max_body_bytes) == (("a", "b"), 1 << 20)
    assert options.api_key == ("from-the-environment",)
    assert (listening.port, listening.root_path) == (0, "/nv")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-queue", "0"], "max_queue is 0"),
        (["--max-body-bytes", "x"], "a size is 'x'"),
        (["--port", "99999"], "port is 99999"),
        (["--ssl-keyfile", "x"], "ssl_keyfile and ssl_certfile"),
        (
            ["--override-generation-config", "x"],
            "override_generation_config is 'x': it must be a JSON",
        ),
        (["--override-generation-config", "{" * 10**5], "override_generation_config is '{{{"),
        (["--max-body-bytes", "9" * 5000], "a size is '999"),
        (["--allowed-origins", '["*"]'], "allowed_origins has '[\"*\"]': each must be * or an or"),
        (["--allowed-origins", "http://a/b"], "allowed_origins has 'http://a/b': each must be"),
        (["--ssl-ca-certs", __file__], "ssl_ca_certs is given without ssl_certfile, so the serv"),
        (["--ssl-keyfile-password", "x"], "ssl_keyfile_password is given without ssl_certfile"),
        (["--model", "other"], "the model is given without --model, as in nv serve MODEL"),
    ],
)
def test_a_wrong_option_is_one_sentence(words, sentence):
    result = CliRunner().invoke(app, ["serve", "m", *words])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"nv: {sentence}")


def test_16_the_model_as_an_option_is_one_sentence():
    result = CliRunner().invoke(app, ["serve", "--model", "m", "--port", "0"])
    assert result.stderr.startswith("nv: model is '--model': give the model before the options")


@pytest.fixture
def made(monkeypatch):
    """The options of the engines that are made; none is started, and nothing listens."""
    made = []

    class Engine:
        def __init__(self, model, **options):
            parse(model, options)
            made.append(options)

        async def close(self):
            pass

    async def serve(llm, options, listening):
        return 0

    monkeypatch.setattr("nv_api.AsyncLLM", Engine)
    monkeypatch.setattr("nv_api.server.run.serve", serve)
    monkeypatch.setenv("NV_LOG", "warning")
    return made


def test_flags_of_vllm_that_make_no_difference_are_taken(made):
    words = ["--enable-auto-tool-choice", "--uvicorn-log-level", "warning", "--max-num-seqs", "4"]
    with pytest.warns(match="without effect: enable_auto_tool_choice, uvicorn_log_level"):
        result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *words])
    assert result.exit_code == 0, result.output
    assert made == [{"max_num_seqs": 4}]


def test_flags_of_vllm_may_have_the_value_that_asks_for_nothing(made):
    words = ["--response-role", "assistant", "--api-server-count", "1", "--middleware", "none"]
    words += ["--allowed-methods", '["*"]', "--allow-credentials", "false"]
    names = "allow_credentials, allowed_methods, api_server_count, middleware, response_role$"
    with pytest.warns(match=f"without effect: {names}"):
        result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *words])
    assert result.exit_code == 0, result.output
    assert made == [{}]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--block-size", "16", "--kvcache-block-size", "16"], "kvcache_block_size and block_size"),
        (["--max-num-seq", "4"], "unknown option 'max_num_seq': did you mean 'max_num_seqs'?"),
        (
            ["--middleware", "m.M"],
            "middleware='m.M' is not built yet: mount nv_api.server.make_app",
        ),
        (
            ["--enable-force-include-usage"],
            "enable_force_include_usage=True is not built yet: send stream_options=",
        ),
        (
            ["--disable-fastapi-docs"],
            "disable_fastapi_docs=True is not built yet: the schema is always at /openapi.json",
        ),
        (
            ["--enable-log-requests"],
            "enable_log_requests=True is not built yet: use --log-requests ids",
        ),
    ],
)
def test_an_unknown_option_is_one_sentence(made, words, sentence):
    result = CliRunner().invoke(app, ["serve", "m", "--port", "0", *words])
    assert result.exit_code == 1, result.exception
    assert result.stderr.startswith(f"nv: {sentence}")
    assert not made


def test_a_template_that_cannot_be_read_is_named(made, tmp_path):
    result = CliRunner().invoke(app, ["serve", "m", "--chat-template", "/none"])
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
    file = tmp_path / "t.jinja"
    file.write_bytes(b"\xff")
    result = CliRunner().invoke(app, ["serve", "m", "--chat-template", str(file)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"nv: chat_template {file} is not UTF-8: write it anew")
    file.write_text("{% if %}")
    result = CliRunner().invoke(app, ["serve", "m", "--chat-template", str(file)])
    assert result.exit_code == 1
    assert result.stderr.startswith("nv: the chat template of the option chat_template is not a")
    assert result.stderr.endswith(": correct it, or leave the option out for the model's own\n")


def test_without_the_extra_the_command_names_it(monkeypatch):
    find = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "fastapi":
            raise ModuleNotFoundError("no fastapi", name="fastapi")
        return find(name, *rest)

    for name in [*sys.modules]:
        if name.startswith("nv_api.server"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 1
    assert result.stderr == 'nv: nv serve needs fastapi: pip install "nv-api[server]"\n'


def test_neither_the_package_nor_the_command_imports_a_web_framework():
    code = (
        "import sys, nv_api, nv_api.cli; "
        "found = {'fastapi', 'uvicorn', 'starlette', 'msgspec', 'orjson'} & sys.modules.keys(); "
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Command:
    """`nv serve` in a process: where it listens, once the model is loaded."""

    def __init__(self, model, *words):
        self.lines, self.is_ready, self.url = [], threading.Event(), None
        command = [sys.executable, "-m", "nv_api", "serve", model, "--port", "0", *words]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.reader.join(10)
        self.process.stderr.close()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listening on (http://\S+);", line):
                self.url = found[1]
            if "ready: " in line:
                self.is_ready.set()
        self.is_ready.set()


@pytest.mark.slow
def test_s04_the_whole_of_it_answers_as_llm_does_and_ends_with_a_signal(checkpoint):
    options = {"max_model_len": 128, "dtype": "float32", "kvcache_block_size": 16}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with Command(checkpoint, *words, "--device=cpu", "--api-key", "sesame") as command:
        assert command.is_ready.wait(120)
        assert command.url, "".join(command.lines)
        with httpx.Client(
            base_url=command.url, timeout=60, headers={"x-api-key": "sesame"}
        ) as client:
            body = {"prompt": "hello world", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            plain = client.post("/v1/completions", json=body).json()
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
            texts = re.findall(r'"text":"((?:[^"\\]|\\.)*)"', streamed)
            wrong = client.post("/v1/completions", json={**body, "prompt": [10**6]})
            metrics = client.get("/metrics").text
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(30) == 0
    with LLM(checkpoint, device="cpu", **options) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = llm.generate(["hello world"], params, use_tqdm=False)
    assert plain["choices"][0]["text"] == output["text"]
    assert len(texts) > 1
    assert wrong.status_code == 400
    assert 'finished_reason="length"' in metrics
    assert "temperature=0.6, top_k=20" in "".join(command.lines)
    assert "sesame" not in "".join(command.lines)


@pytest.mark.slow
def test_the_whole_of_it_offers_adapters_by_name(checkpoint, adapter_writer, tmp_path):
    folders = [
        adapter_writer.write_adapter(tmp_path / name, Path(checkpoint), r=rank, scale=3.0)
        for name, rank in (("poet", 8), ("pirate", 24))
    ]
    modules = [f"poet={folders[0]}", json.dumps({"name": "pirate", "path": str(folders[1])})]
    words = ["--lora-modules", *modules, "--max-loras", "2", "--device=cpu", "--dtype=float32"]
    with Command(checkpoint, *words, "--max-model-len=128", "--max-num-seqs=4") as command:
        assert command.is_ready.wait(120)
        assert command.url, "".join(command.lines)
        with httpx.Client(base_url=command.url, timeout=60) as client:
            names = [each["id"] for each in client.get("/v1/models").json()["data"]]
            body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answers = [client.post("/v1/completions", json={**body, "model": n}) for n in names]
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(30) == 0
    assert names == [checkpoint, "poet", "pirate"]
    requests = [None, *(LoRARequest(f.name, n, f) for n, f in enumerate(folders, 1))]
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
    room = {"enable_lora": True, "max_lora_rank": 24, "max_loras": 2}
    with LLM(checkpoint, **options, **room) as llm:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        outputs = llm.generate(["hello"] * 3, params, False, requests)
    assert [each.json()["choices"][0]["text"] for each in answers] == [o["text"] for o in outputs]
    assert len({output["text"] for output in outputs}) == 3


@pytest.mark.slow
def test_a_model_that_is_not_there_is_one_sentence(tmp_path):
    with Command(str(tmp_path / "none"), "--device=cpu") as command:
        assert command.process.wait(60) == 1
    assert command.lines[-1].startswith("nv: ")
    assert str(tmp_path / "none") in command.lines[-1]
    assert "Traceback" not in "".join(command.lines)
