"""`nv run-batch`: every line has one result, whatever ends a run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import nv_api.async_llm
import pytest
from nv_api import PoolingParams
from nv_api.cli import app
from nv_api.server.batch.results import Results
from nv_api.server.batch.run import BatchJob, run
from nv_api.server.options import ServeOptions
from pooling_models import OPTIONS
from scripted_device import HostThread
from typer.testing import CliRunner

CHAT = "/v1/chat/completions"


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def chat(name, content="ab", **fields):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def write(path, lines):
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))


def results(path):
    content = path.read_text()
    assert content.endswith("\n")
    return [json.loads(line) for line in content.splitlines()]


def batch(files, concurrency=8):
    given, out = files
    options = ServeOptions(model="m/tiny", max_queue=2**31 - 1)
    what = BatchJob(input_file=given, output_file=out, concurrency=concurrency)
    return run("m/tiny", {"max_num_seqs": 2}, options, what)


def test_lines_of_a_model_that_pools(files, pooling, monkeypatch):
    served, llm = pooling("embedder")
    given, out = files
    bodies = {
        "/v1/embeddings": {"input": ["a", "b"], "dimensions": 3},
        "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
        "/v1/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
        "/pooling": {"input": "a", "task": "embed"},
        "/v1/completions": {"prompt": "a"},
        "/classify": {"input": "a"},
    }
    write(given, [
        {"custom_id": url, "method": "POST", "url": url, "body": body}
        for url, body in bodies.items()
    ])  # fmt: skip
    monkeypatch.setattr(nv_api.async_llm, "HostProcess", lambda: HostThread(None))
    options = ServeOptions(model="m/tiny")
    counts, code = run(
        served.folder, OPTIONS, options, BatchJob(input_file=given, output_file=out, concurrency=8)
    )
    assert (str(counts)[:24], code) == ("4 answered, 2 refused, 0", 0)
    found = {each["custom_id"]: each["response"]["body"] for each in results(out)}
    assert found.keys() == bodies.keys()
    want = llm.embed(["a", "b"], PoolingParams(dimensions=3), use_tqdm=False)
    embeddings = [each["embedding"] for each in found["/v1/embeddings"]["data"]]
    assert embeddings == [pytest.approx(each.outputs.embedding, abs=1e-6) for each in want]
    scores = [each.outputs.score for each in llm.score("a", ["b", "c"], use_tqdm=False)]
    assert [each["score"] for each in found["/v1/score"]["data"]] == pytest.approx(scores, abs=1e-6)
    (best,) = found["/v1/rerank"]["results"]
    assert best["index"] == scores.index(max(scores))
    assert "generates no text" in found["/v1/completions"]["error"]["message"]


def test_16_files_that_cannot_be_are_named(files, tmp_path):
    given, out = files
    for name, changed in (
        ("input_file", {"input_file": given}),
        ("input_file", {"input_file": tmp_path}),
        ("output_file", {"output_file": tmp_path}),
        ("output_file", {"output_file": tmp_path / "none" / "out"}),
    ):
        write(tmp_path / "lines", [])
        with pytest.raises(FileNotFoundError, match=f"{name} is '"):
            BatchJob(**{"input_file": tmp_path / "lines", "output_file": out} | changed)


def test_each_line_has_its_answer(llms, files):
    given, out = files
    schema = {"type": "object"}
    tool = {"name": "f", "input_schema": schema}
    write(given, [
        chat("a"),
        "",
        {**chat("b"), "url": "/v1/completions", "body": {"prompt": "xy", "max_tokens": 2}},
        {**chat("c"), "url": "/v1/responses", "body": {"input": "xy", "max_output_tokens": 2}},
        {**chat("d"), "url": "/v1/messages", "body": {
            "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": [tool]}},
        chat("ü", temperature=-1),
        chat("f", model="other"),
    ])  # fmt: skip
    counts, code = batch(files)
    assert code == 0
    assert str(counts) == "4 answered, 2 refused, 0 wrong, 0 done before, 0 left"
    by_name = {result["custom_id"]: result for result in results(out)}
    assert by_name.keys() == {"a", "b", "c", "d", "ü", "f"}
    assert len({result["id"] for result in by_name.values()}) == 6
    assert all(result["error"] is None for result in by_name.values())
    responses = {name: result["response"] for name, result in by_name.items()}
    assert {name: r["status_code"] for name, r in responses.items()} == {
        "a": 200, "b": 200, "c": 200, "d": 200, "ü": 400, "f": 404,
    }  # fmt: skip
    assert responses["a"]["body"]["object"] == "chat.completion"
    assert responses["a"]["body"]["id"] == f"chatcmpl-{responses['a']['request_id']}"
    assert responses["b"]["body"]["choices"][0]["text"] == "xy"
    assert responses["c"]["body"]["object"] == "response"
    assert responses["d"]["body"]["stop_reason"] == "max_tokens"
    assert responses["ü"]["body"]["error"]["param"] == "temperature"
    (llm,) = llms.made
    assert llm.options == {"max_num_seqs": 2}


WRONG = [
    ("{", "line 2 is not JSON"),
    ("[1]", "line 2 is [1]"),
    ({"method": "POST"}, "line 2: custom_id is None"),
    ({**chat("x"), "custom_id": 5}, "line 2: custom_id is 5"),
    ({**chat("x"), "method": "GET"}, "line 2: method is 'GET'"),
    ({**chat("x"), "url": "/v1/none"}, "line 2: url is '/v1/none'"),
    ({**chat("x"), "url": ["a"]}, "line 2: url is ['a']"),
    ({**chat("x"), "body": [1]}, "line 2: body is [1]"),
    (chat("x", stream=True), "line 2: body.stream is true"),
]


@pytest.mark.parametrize(("line", "problem"), WRONG, ids=lambda v: str(v)[:30])
def test_a_wrong_line_is_an_error_that_names_it(llms, files, line, problem):
    given, out = files
    write(given, [chat("a"), line, chat("b")])
    counts, code = batch(files)
    assert (code, counts.answered, counts.wrong) == (0, 2, 1)
    (wrong,) = [result for result in results(out) if result["error"]]
    assert wrong["response"] is None
    assert wrong["error"]["code"] == "invalid_line"
    assert wrong["error"]["message"].startswith(problem)
    assert wrong["custom_id"] == ("x" if isinstance(line, dict) and line.get("url") and
                                  line.get("custom_id") == "x" else None)  # fmt: skip
    before = out.read_bytes()
    counts, _ = batch(files)
    assert (counts.skipped, out.read_bytes()) == (3, before)
    assert len(llms.made) == 1, "nothing to do: no model is loaded"


def test_two_lines_with_one_name_are_refused_before_any_work(llms, files):
    given, out = files
    write(given, [chat("a"), chat("b"), "", chat("a")])
    with pytest.raises(ValueError, match="the custom_id 'a' on the lines 1 and 4"):
        batch(files)
    assert not llms.made
    assert not out.exists()


def test_a_second_run_answers_what_is_left(llms, files):
    given, out = files
    write(given, [chat(f"r{i}") for i in range(5)])
    batch(files)
    whole = out.read_bytes()
    write(given, [chat(f"r{i}") for i in range(9)])
    counts, _ = batch(files)
    assert (counts.skipped, counts.answered) == (5, 4)
    assert out.read_bytes().startswith(whole)
    assert sorted(result["custom_id"] for result in results(out)) == [f"r{i}" for i in range(9)]


def test_a_last_line_that_is_cut_is_answered_again(llms, files):
    given, out = files
    write(given, [chat("r0"), chat("r1")])
    batch(files)
    whole = out.read_bytes()
    second = whole.index(b"\n") + 1
    first_name = json.loads(whole[:second])["custom_id"]
    for cut in second + 1, second + 9, second + 40, len(whole) - 2, len(whole) - 1:
        out.write_bytes(whole[:cut])
        counts, _ = batch(files)
        assert counts.skipped == (2 if cut == len(whole) - 1 else 1)
        assert [r["custom_id"] for r in results(out)] == [
            first_name, {"r0": "r1", "r1": "r0"}[first_name]
        ]  # fmt: skip


def test_a_file_with_something_else_stays_as_it_is(llms, files):
    given, out = files
    write(given, [chat("a")])
    for other in b"my notes", b"my notes\n", b'{"id": 1}\n', b"[1]\n\n":
        out.write_bytes(other)
        with pytest.raises(ValueError, match=r"line 1 of .* is not a result"):
            batch(files)
        assert out.read_bytes() == other
    with pytest.raises(ValueError, match="input and output are both"):
        batch((given, given))
    assert not llms.made


def test_one_run_at_a_time_writes_a_file(llms, files):
    given, out = files
    write(given, [chat("a")])
    with closing(Results(out)), pytest.raises(ValueError, match="another run writes"):
        batch(files)
    assert batch(files)[1] == 0


def test_lines_in_flight_are_bounded(llms, files):
    given, out = files
    llms.script = {"pace": 0.001}
    write(given, [chat(f"r{i}") for i in range(40)])
    batch(files, concurrency=3)
    assert llms.made[0].most == 3
    assert len(results(out)) == 40


def test_ctrl_c_keeps_what_is_done(llms, files):
    given, out = files
    llms.script = {"pace": 0.002}
    write(given, [chat(f"r{i}", max_tokens=4 + i) for i in range(60)])

    def interrupt():
        while not out.exists() or out.read_bytes().count(b"\n") < 5:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    counts, code = batch(files)
    thread.join()
    assert code == 130
    done = results(out)
    assert 5 <= len(done) < 60
    assert (counts.answered, counts.left) == (len(done), 60 - len(done))
    llms.script = {}
    batch(files)
    assert sorted(r["custom_id"] for r in results(out)) == sorted(f"r{i}" for i in range(60))


def test_a_lost_engine_ends_the_run_and_its_lines_are_left(llms, files):
    given, out = files
    write(given, [chat(f"r{i}", max_tokens=4 + i) for i in range(30)])
    forget = llms.forget

    def lose(self, stream):
        forget(self, stream)
        if len(self.submitted) > 12 and self.loss is None:
            asyncio.get_running_loop().call_soon(self.lose, "the device is lost")

    llms.forget = lose
    try:
        with pytest.raises(RuntimeError, match=r"line \d+ has no answer: .*the device is lost"):
            batch(files)
    finally:
        llms.forget = forget
    done = results(out)
    assert 0 < len(done) < 30
    assert all(result["response"]["status_code"] == 200 for result in done)
    counts, _ = batch(files)
    assert counts.skipped == len(done)
    assert len(results(out)) == 30


def test_a_failure_of_one_request_is_its_result(llms, files):
    given, out = files
    llms.script = {"answers": [[65, -1]]}
    write(given, [chat("a"), chat("b")])
    batch(files, concurrency=1)
    assert [r["response"]["status_code"] for r in results(out)] == [500, 200]


def test_a_fault_of_the_server_is_a_result_without_a_traceback(llms, files):
    given, out = files
    llms.script = {"refuse": KeyError("secret")}
    write(given, [chat("a")])
    counts, code = batch(files)
    assert (counts.refused, code) == (1, 0)
    assert "secret" not in out.read_text()


def test_the_command(llms, files):
    given, out = files
    write(given, [chat("a", model="one")])
    words = ["run-batch", "some/model", "-i", str(given), "-o", str(out), "--max-num-seqs", "4"]
    result = CliRunner().invoke(app, [*words, "--served-model-name", "one"])
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("nv: 1 answered, 0 refused")
    assert results(out)[0]["response"]["body"]["model"] == "one"
    (llm,) = llms.made
    assert (llm.model, llm.options) == ("some/model", {"max_num_seqs": 4})
    for more, sentence in (
        (["--concurrency", "0"], "concurrency is 0"),
        (["-i", str(given.parent / "none")], "none"),
    ):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 1
        assert result.stderr.startswith("nv: ")
        assert sentence in result.stderr


@pytest.mark.slow
def test_the_whole_of_it_keeps_what_is_done_at_a_signal(checkpoint, files):
    given, out = files
    names = [f"r{i}" for i in range(200)]
    write(given, [chat(name, max_tokens=60, ignore_eos=True) for name in names])
    command = [
        *(sys.executable, "-m", "nv_api", "run-batch", checkpoint, "-i", given, "-o", out),
        *("--device=cpu", "--dtype=float32", "--max-model-len=128", "--concurrency=4"),
        "--served-model-name=x",
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment,
                               start_new_session=True)  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    done = results(out)
    assert f"nv: {len(done)} answered, 0 refused" in shown
    assert len(done) < 200
