"""Adapters of a server: selected by name on every route, loaded and unloaded while it runs."""

import asyncio
import json
import re
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import nv_api
import nv_api.async_llm
import pytest
from nv_api import LLM, LoRARequest, SamplingParams
from nv_api.cli import app, spread
from nv_api.server import ServeOptions
from nv_api.server.batch.run import BatchJob
from nv_api.server.batch.run import run as run_batch
from nv_api.server.lora_modules import lora_modules, with_room
from pooling_models import OPTIONS as POOLING_OPTIONS
from pooling_models import save
from running_server import RunningServer
from scripted_device import HostThread
from typer.testing import CliRunner

OPTIONS = {
    "device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 64,
    "max_model_len": 256, "max_num_seqs": 8, "enable_lora": True, "max_loras": 2,
}  # fmt: skip
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def write(adapter_writer, folder, base, **options):
    return adapter_writer.write_adapter(folder, Path(base), scale=3.0, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, checkpoint, adapter_writer):
    """Adapters of the tiny model by name."""
    place = tmp_path_factory.mktemp("adapters")
    return {
        name: write(adapter_writer, place / name, checkpoint, seed=seed, r=rank)
        for name, seed, rank in (("poet", 1, 8), ("pirate", 2, 4), ("giant", 3, 24))
    }


@pytest.fixture(scope="module")
def modules(folders):
    return (
        LoRARequest("poet", 1, folders["poet"]),
        LoRARequest("pirate", 2, folders["pirate"], "another"),
    )


class AdapterServer(RunningServer):
    """A server over a model with room for adapters, whose host is a thread."""

    def __init__(self, folder, *, engine=OPTIONS, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nv_api.async_llm, "HostProcess", self._make_host)
            super().__init__(lambda: nv_api.AsyncLLM(str(folder), **engine), **options)

    def _make_host(self):
        self.host = HostThread(None)
        return self.host

    def post(self, path, body):
        return self.client.post(path, json=body)

    def text(self, model, prompt="hello", **more):
        found = self.post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY, **more})
        assert found.status_code == 200, found.text
        assert found.json()["model"] == model
        return found.json()["choices"][0]["text"]


@contextmanager
def closing(server):
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def served(checkpoint, modules):
    options = {"lora_modules": modules, "allow_runtime_lora_updating": True}
    with closing(AdapterServer(checkpoint, **options)) as server:
        yield server


@pytest.fixture(scope="module")
def expected(checkpoint, modules):
    """The texts that LLM generates with each, by name."""
    with LLM(checkpoint, **OPTIONS) as llm:
        params = SamplingParams(**GREEDY)
        names = {"m/tiny": None, **{each.lora_name: each for each in modules}}
        return {
            name: (
                llm.generate("hello", params, False, lora)[0]["text"],
                llm.chat([{"role": "user", "content": "hi"}], params, False, lora)[0]["text"],
            )
            for name, lora in names.items()
        }


def test_models_lists_each_adapter_with_its_base(served, folders):
    found = served.client.get("/v1/models").json()["data"]
    fields = [(each["id"], each["root"], each["parent"]) for each in found]
    assert fields == [
        ("m/tiny", "m/tiny", None),
        ("poet", str(folders["poet"]), "m/tiny"),
        ("pirate", str(folders["pirate"]), "another"),
    ]
    assert served.client.get("/v1/models/pirate").json() == found[2]
    assert served.client.get("/page/defaults").json()["models"] == ["m/tiny", "poet", "pirate"]


def test_a_name_selects_its_adapter_on_every_route_that_generates(served, expected):
    messages = [{"role": "user", "content": "hi"}]
    sampling = {"temperature": 0, "ignore_eos": True}
    assert len(set(expected.values())) == 3
    for name, (completed, chatted) in expected.items():
        assert served.text(name) == completed
        body = {"model": name, "messages": messages, **GREEDY}
        answer = served.post("/v1/chat/completions", body).json()
        assert answer["model"] == name
        assert answer["choices"][0]["message"]["content"] == chatted
        streamed = served.post("/v1/chat/completions", {**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line[:7] == "data: {"]
        assert {chunk["model"] for chunk in chunks} == {name}
        deltas = [each["choices"][0]["delta"].get("content") or "" for each in chunks]
        assert "".join(deltas) == chatted
        answer = served.post(
            "/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 8, **sampling}
        ).json()
        assert answer["model"] == name
        assert answer["output"][-1]["content"][0]["text"] == chatted
        answer = served.post(
            "/v1/messages", {"model": name, "messages": messages, "max_tokens": 8, **sampling}
        ).json()
        assert answer["model"] == name
        assert answer["content"][0]["text"] == chatted
    assert served.text("poet", ["hello", "hello"]) == expected["poet"][0]


def test_a_request_without_a_name_has_the_base_model(served, expected):
    body = {"prompt": "hello", **GREEDY}
    answer = served.post("/v1/completions", body).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("m/tiny", expected["m/tiny"][0])


def test_counts_and_tokens_take_the_name_too(served):
    messages = [{"role": "user", "content": "hi"}]
    count = served.post("/v1/messages/count_tokens", {"model": "poet", "messages": messages})
    assert count.json()["input_tokens"] > 0
    assert served.post("/tokenize", {"model": "poet", "prompt": "hi"}).status_code == 200
    assert served.post("/detokenize", {"model": "poet", "tokens": [1]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_wrong_name_is_a_404_with_the_names(served, path, body):
    found = served.post(path, {**body, "model": "sailor"})
    assert found.status_code == 404
    names = "'m/tiny', 'poet', 'pirate'"
    message = f"model is 'sailor', which this server does not have: give one of {names}"
    assert found.json()["error"]["message"] == message
    assert served.client.get("/v1/models/sailor").status_code == 404


def test_adapters_are_loaded_replaced_and_unloaded_while_it_runs(served, folders, expected):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "third", "lora_path": str(folders["poet"])}
    found = served.post(load, body)
    assert (found.status_code, found.text) == (
        200,
        "Success: LoRA adapter 'third' added successfully.",
    )
    assert served.text("third") == expected["poet"][0]
    for wrong, param, message in (
        (body, "lora_name", "lora_name is 'third', and that adapter is loaded already: give anoth"),
        ({**body, "lora_name": "m/tiny"}, "lora_name", "lora_name is 'm/tiny', a name of the base"),
        ({**body, "lora_name": ""}, "lora_name", "lora_name is '': it must be a text"),
        ({**body, "lora_name": 5}, "lora_name", "lora_name is 5"),
        ({"lora_name": "x"}, "lora_path", "lora_path is missing: give it"),
        ({"lora_name": "x", "lora_path": "/none/x"}, "lora_path", "/none/x is not a folder: give"),
        (
            {"lora_name": "x", "lora_path": str(folders["giant"])},
            "lora_path",
            f"{folders['giant']}/adapter_model.safetensors: the rank of model.layers",
        ),
    ):
        found = served.post(load, wrong)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert (error["param"], error["message"][: len(message)]) == (param, message)
    replaced = {**body, "lora_path": str(folders["pirate"]), "load_inplace": True}
    assert served.post(load, replaced).status_code == 200
    assert served.text("third") == expected["pirate"][0]
    assert [each["id"] for each in served.client.get("/v1/models").json()["data"]][3:] == ["third"]
    found = served.post(unload, {"lora_name": "third"})
    assert (found.status_code, found.text[-21:]) == (200, "removed successfully.")
    found = served.post(unload, {"lora_name": "third"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "adapter_not_found")
    message = "lora_name is 'third', which is not a loaded adapter: give one that /v1/models lists"
    assert found.json()["error"]["message"] == message
    found = served.post(unload, {"lora_name": "x" * 10_000})
    assert len(found.json()["error"]["message"]) < 400
    assert served.post("/v1/completions", {"prompt": "a", "model": "third"}).status_code == 404
    assert served.text("poet") == expected["poet"][0]
    assert served.service.adapters.names == ("poet", "pirate")


def test_two_changes_of_one_name_at_once_are_one(served, folders):
    body = {"lora_name": "twice", "lora_path": str(folders["poet"])}
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(served.post("/v1/load_lora_adapter", body)))
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert sorted(each.status_code for each in found) == [200, 400, 400, 400]
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "twice"}).status_code == 200


def test_metrics_name_the_adapters_of_requests_in_flight(served):
    def info():
        lines = served.client.get("/metrics").text.splitlines()
        (line,) = [each for each in lines if each.startswith("vllm:lora_requests_info{")]
        return line.rpartition(" ")[0]

    idle = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
    assert info() == idle
    with served.client.stream(
        "POST",
        "/v1/completions",
        json={**GREEDY, "model": "poet", "prompt": "a", "max_tokens": 240, "stream": True},
    ) as streamed:
        lines = streamed.iter_lines()
        next(lines)
        assert info() == idle.replace('running_lora_adapters=""', 'running_lora_adapters="poet"')
    served.until(lambda: info() == idle)


def test_without_the_option_the_adapters_are_those_of_the_start(checkpoint, modules, folders):
    with closing(AdapterServer(checkpoint, lora_modules=modules[:1])) as server:
        body = {"lora_name": "x", "lora_path": str(folders["poet"])}
        for path in "/v1/load_lora_adapter", "/v1/unload_lora_adapter":
            error = server.post(path, body).json()["error"]
            assert error["code"] == "unsupported"
            assert "adapters are those of its start: restart it with" in error["message"]


def test_without_room_an_adapter_is_refused_and_no_metric_names_any(checkpoint, folders):
    engine = {**OPTIONS, "enable_lora": False}
    options = {"engine": engine, "allow_runtime_lora_updating": True}
    with closing(AdapterServer(checkpoint, **options)) as server:
        body = {"lora_name": "x", "lora_path": str(folders["poet"])}
        error = server.post("/v1/load_lora_adapter", body).json()["error"]
        assert error["message"].endswith("load it with enable_lora=True")
        assert "lora_requests_info" not in server.client.get("/metrics").text


def test_an_adapter_that_fails_later_fails_its_own_requests_alone(
    checkpoint, modules, adapter_writer, tmp_path, expected
):
    """One has values that are not finite; one is gone when a request needs it."""
    corrupt = write(adapter_writer, tmp_path / "corrupt", checkpoint)
    file = corrupt / "adapter_model.safetensors"
    tensors = adapter_writer.load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    adapter_writer.save_file(tensors, file)
    gone = write(adapter_writer, tmp_path / "gone", checkpoint)
    served = (
        modules[0], LoRARequest("corrupt", 2, str(corrupt)), LoRARequest("gone", 3, str(gone))
    )  # fmt: skip
    with closing(AdapterServer(checkpoint, lora_modules=served)) as server:
        forgotten = server.llm.remove_lora(3)
        assert asyncio.run_coroutine_threadsafe(forgotten, server.loop).result(10)
        shutil.rmtree(gone)
        for name, status, message in (
            ("corrupt", 500, "the engine failed on this request: adapter corrupt: .* NaN or infin"),
            ("gone", 400, "gone is not a folder: give the one that peft's save_pretrained wrote"),
        ):
            found = server.post("/v1/completions", {"model": name, "prompt": "hello", **GREEDY})
            assert found.status_code == status, found.text
            assert re.search(message, found.json()["error"]["message"])
        for name in "poet", "m/tiny":
            assert server.text(name) == expected[name][0]


def test_an_adapter_that_does_not_fit_ends_the_start(checkpoint, folders, capfd):
    """Its files are those of LoRA, and only the loaded model shows that they do not fit."""
    wrong = (LoRARequest("giant", 1, str(folders["giant"])),)
    served = AdapterServer(checkpoint, lora_modules=wrong)
    served.until(lambda: served.server.exit_code == 1, 30)
    served.close()
    message = "nv: lora_modules giant: .*: the rank of .* is 24 and max_lora_rank is 16: load the"
    assert re.search(message, capfd.readouterr().err)


def test_routes_that_pool_select_an_adapter(tmp_path, byte_level, adapter_writer):
    base = save("embedder", tmp_path / "base", byte_level)
    tensors = adapter_writer.load_file(base / "model.safetensors")
    adapter_writer.save_file(
        {f"model.{name}" if not name.startswith("model.") else name: each
         for name, each in tensors.items()},
        tmp_path / "model.safetensors",
    )  # fmt: skip
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    folder = write(adapter_writer, tmp_path / "adapter", tmp_path, seed=4)
    request = LoRARequest("poet", 1, str(folder))
    engine = {**POOLING_OPTIONS, "enable_lora": True, "dtype": "float32"}
    bodies = {
        "/v1/embeddings": {"input": "hello"},
        "/pooling": {"input": "hello", "task": "embed"},
        "/v1/score": {"text_1": "hello", "text_2": "world"},
        "/v1/rerank": {"query": "hello", "documents": ["world", "hell"]},
    }
    with closing(AdapterServer(base, engine=engine, lora_modules=(request,))) as server:
        for path, body in bodies.items():
            found = [server.post(path, {**body, "model": name}) for name in ("m/tiny", "poet")]
            assert [each.status_code for each in found] == [200, 200], found[1].text
            assert found[1].json()["model"] == "poet"
            key = "results" if "rerank" in path else "data"
            assert found[0].json()[key] != found[1].json()[key]
            assert server.post(path, {**body, "model": "sailor"}).status_code == 404
        embedding = server.post("/v1/embeddings", {"input": "hello", "model": "poet"}).json()
    with LLM(str(base), **engine) as llm:
        (output,) = llm.embed("hello", use_tqdm=False, lora_request=request)
    found = embedding["data"][0]["embedding"]
    assert found == pytest.approx(output.outputs.embedding, abs=1e-6)


def test_lines_of_a_batch_select_an_adapter(checkpoint, modules, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(nv_api.async_llm, "HostProcess", lambda: HostThread(None))
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [*expected, "sailor"]
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions",
         "body": {"model": name, "prompt": "hello", **GREEDY}}
        for name in names
    ]  # fmt: skip
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = {name: value for name, value in OPTIONS.items() if name != "enable_lora"}
    batch = BatchJob(input_file=given, output_file=out)
    options = ServeOptions(model="m/tiny", lora_modules=modules)
    counts, code = run_batch(checkpoint, engine, options, batch)
    assert (code, counts.answered, counts.refused) == (0, 3, 1)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    found = {each["custom_id"]: each["response"] for each in results}
    assert found.pop("sailor")["status_code"] == 404
    texts = {name: each["body"]["choices"][0]["text"] for name, each in found.items()}
    assert texts == {name: completed for name, (completed, _) in expected.items()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("m --lora-modules a=1 b=2 --port 1", "m --lora-modules a=1 --lora-modules b=2 --port 1"),
        ("--lora-modules=a=1 b=2 m", "--lora-modules=a=1 --lora-modules b=2 m"),
        ("--lora-modules a=1 m b=2", "--lora-modules a=1 m b=2"),
        ("--lora-modules poet m", "--lora-modules poet m"),
        ('--lora-modules {"a"} {"b"}', '--lora-modules {"a"} --lora-modules {"b"}'),
        ("--hf-overrides {} a=1", "--hf-overrides {} a=1"),
        ("--lora-modules", "--lora-modules"),
    ],
)
def test_the_option_takes_several_values(words, expected):
    assert spread(words.split()) == expected.split()


def test_both_forms_of_a_module():
    form = '{"name": "pirate", "path": "q", "base_model_name": "m"}'
    assert lora_modules(["poet=p=x", form]) == (
        LoRARequest("poet", 1, "p=x"),
        LoRARequest("pirate", 2, "q", "m"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poet", r"lora_modules has 'poet': each must be NAME=PATH, or JSON such as"),
        ("=p", "lora_modules has '=p': each must be NAME=PATH"),
        ("poet=", "lora_modules has 'poet=': each must be"),
        ("", "lora_modules has '': each must be"),
        ("{", "which is not JSON: each must be NAME=PATH"),
        ("{" + '"a":[' * 5000, "which is not JSON: each must be NAME=PATH"),
        ('{"name": "a"}', r"path is None: it must be a text"),
        ('{"path": "a"}', r"name is None: it must be a text"),
        ('{"name": "", "path": "p"}', r"name is '': it must be a text"),
        ('{"name": "a", "path": "p", "rank": 3}', r"with 'rank': leave it out, the fields are n"),
        ('{"name": "a", "path": ["p"]}', r"path is \['p'\]: it must be a text"),
        ('{"name": "a", "path": "p", "base_model_name": 5}', "base_model_name is 5"),
    ],
)
def test_a_module_of_neither_form_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        lora_modules([text])


def test_the_engine_gets_room_for_the_modules(folders):
    def room(given, *names, **options):
        modules = [LoRARequest(name, n, folders[name]) for n, name in enumerate(names, 1)]
        return with_room(given, ServeOptions(model="m", lora_modules=modules, **options))

    assert room({"max_loras": 2}) == {"max_loras": 2}
    assert room({}, "poet") == {"enable_lora": True}
    assert room({}, "poet", "giant") == {"enable_lora": True, "max_lora_rank": 24}
    for given in ({"max_lora_rank": 64}, {"max_lora_rank": "x"}):  # which the engine refuses
        assert room(given, "giant") == {"enable_lora": True, **given}
    given = {"enable_lora": True}
    assert room(given, allow_runtime_lora_updating=True) == given
    for given, names, more, message in (
        ({"max_lora_rank": 8}, ["poet", "giant"], {}, "giant: its largest rank is 24 and max_lora"),
        ({"enable_lora": False}, ["poet"], {}, "enable_lora is False and lora_modules needs it: l"),
        ({}, [], {"allow_runtime_lora_updating": True}, "no room for adapters: give --enable-lora"),
    ):
        with pytest.raises(ValueError, match=message):
            room(given, *names, **more)


@pytest.mark.parametrize("given", [{}, {"max_lora_rank": 512}])
def test_a_rank_for_which_no_option_has_room_is_named(tmp_path, checkpoint, adapter_writer, given):
    folder = write(adapter_writer, tmp_path / "huge", checkpoint, r=520)
    options = ServeOptions(model="m", lora_modules=[LoRARequest("huge", 1, folder)])
    message = r"^lora_modules huge: the largest rank of .* is 520: it can be at most 512; merge it"
    with pytest.raises(ValueError, match=message):
        with_room(given, options)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([LoRARequest("m", 1, "p")], "lora_modules has 'm', a name of the model"),
        ([LoRARequest("a", 1, "p"), LoRARequest("a", 2, "q")], "lora_modules has 'a' twice"),
        ([LoRARequest("a", 1, "p"), LoRARequest("b", 1, "q")], "the lora_int_id 1 twice, of 'a' a"),
        (["a=p"], "lora_modules has 'a=p': each must be a LoRARequest"),
    ],
)
def test_modules_of_a_server_have_names_and_ids_of_their_own(modules, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(model="m", lora_modules=modules)
    with pytest.raises(ValueError, match="allow_runtime_lora_updating is 'yes'"):
        ServeOptions(model="m", allow_runtime_lora_updating="yes")


def broken(folder, kind):
    """A folder in which one thing is wrong."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if kind == "no config":
        config.unlink()
    elif kind == "no weights":
        weights.unlink()
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif kind == "dora":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    elif kind == "a folder":
        weights.unlink()
        weights.mkdir()
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", "has no adapter_config.json: give the folder that peft's save_pretrained"),
        ("no weights", "has no adapter_model.safetensors: give the folder"),
        ("cut", "is corrupt or truncated"),
        ("dora", "use_dora is True, which is not computed: merge it"),
        ("a folder", "adapter_model.safetensors is a folder, not a file: give the folder"),
        ("nothing", "is not a folder: give the one that peft's save_pretrained wrote"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_a_path_is_checked_before_the_model_loads(
    tmp_path, checkpoint, adapter_writer, monkeypatch, command, kind, message
):
    def loads(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(nv_api, "AsyncLLM", loads)
    folder = tmp_path / "poet"
    if kind != "nothing":
        broken(write(adapter_writer, folder, checkpoint), kind)
    words = [command, checkpoint, "--lora-modules", f"poet={folder}"]
    if command == "serve":
        words += ["--port", "0"]
    else:
        (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n')
        words += ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.exception
    assert result.stderr.startswith("nv: lora_modules poet: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
