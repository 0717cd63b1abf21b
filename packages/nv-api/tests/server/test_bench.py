"""`nv bench serve`, against nv's own server and against servers that fail."""

import asyncio
import json
import socket
import time

import numpy as np
import pytest
from nv_api.cli import app
from typer.testing import CliRunner

pytest.importorskip("aiohttp")

from nv_api.bench.figures import figures  # after the skip
from nv_api.bench.load import Load, milliseconds_by_metric
from nv_api.bench.outcome import Outcome
from nv_api.bench.pace import Run, offsets, run
from nv_api.bench.prompts import Prompt, file_prompts, random_prompts
from transformers import AutoTokenizer


def bench(url, *words):
    return CliRunner().invoke(app, ["bench", "serve", "--base-url", url, "--disable-tqdm", *words])


@pytest.fixture
def result(tmp_path):
    """Run the command with --result-filename; returns its JSON and what it printed."""

    def measured(url, *words):
        path = tmp_path / "result.json"
        found = bench(url, *words, "--result-filename", str(path))
        assert found.exit_code == 0, found.output
        return json.loads(path.read_text()), found

    return measured


@pytest.mark.slow
def test_random_ids_against_the_engine(engine_server, speaking_checkpoint, result):
    served = engine_server()
    words = ["--tokenizer", speaking_checkpoint, "--num-prompts", "6", "--ignore-eos"]
    words += ["--random-input-len", "20", "--random-output-len", "5", "--random-prefix-len", "7"]
    words += ["--metric-percentiles", "50,99", "--goodput", "e2el:60000", "--save-detailed"]
    found, printed = result(served.url, *words, "--request-rate", "50", "--max-concurrency", "2")
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["input_lens"] == [27] * 6
    assert found["output_lens"] == [5] * 6
    assert found["total_output_tokens"] == 30
    assert found["model_id"] == "m/tiny"
    assert found["request_goodput"] == found["request_throughput"] == 6 / found["duration"]
    for ttft, itls, e2el in zip(found["ttfts"], found["itls"], found["e2els"], strict=True):
        assert 0 < ttft <= e2el < found["duration"]
        assert e2el == pytest.approx(ttft + sum(itls))
    assert found["p50_e2el_ms"] == found["median_e2el_ms"]
    assert f"Mean TTFT (ms):                          {found['mean_ttft_ms']:.2f}" in printed.output
    assert "Total generated tokens:                  30" in printed.output


def test_a_file_of_conversations(serve, result, tmp_path):
    served = serve(script={"pace": 0.002})
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "abcdef"}]
    lines = [{"messages": messages, "output_tokens": 3}, {"prompt": "ghi"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(path)]
    words += ["--num-prompts", "3", "--output-len", "4", "--extra-body", '{"top_k": 7}']
    words += ["--max-concurrency", "1"]  # the order at the server is that of the file
    found, _ = result(served.url, *words, "--save-detailed")
    assert found["output_lens"] == [3, 4, 3]
    assert all(found["itls"])
    assert served.last.params.top_k == 7
    assert [each.params.max_tokens for each in served.llm.submitted[1:]] == [3, 4, 3]


def test_a_key_and_warm_ups(serve, result, byte_level, folder):
    served = serve(api_key=("sesame",))
    words = ["--tokenizer", str(folder), "--num-prompts", "2", "--random-input-len", "8"]
    found, _ = result(served.url, *words, "--api-key", "sesame", "--num-warmups", "3")
    assert found["completed"] == 2
    sent = [each.prompt.token_ids for each in served.llm.submitted]
    assert len(sent) == 1 + 3 + 2
    assert sent[:4] == [sent[0]] * 4
    assert sorted(sent[4:]).count(sent[0]) == 1  # the other is new to the server's cache
    refused = bench(served.url, *words)
    assert refused.exit_code == 1
    assert "returned status 401" in refused.stderr
    assert "--api-key" in refused.stderr


def test_failures_are_counted_and_shown(serve, result, folder):
    served = serve(max_queue=1, script={"num_slots": 1, "pace": 0.002})
    words = ["--tokenizer", str(folder), "--num-prompts", "8", "--random-input-len", "8"]
    found, printed = result(served.url, *words)
    assert found["failed"] > 0
    assert found["completed"] + found["failed"] == 8
    assert f"nv: {found['failed']} of 8 requests failed: status 429" in printed.stderr


def test_an_error_in_a_stream_fails_the_request(serve, folder):
    served = serve(script={"answers": [[65, 66, -1]]})
    words = ["--tokenizer", str(folder), "--num-prompts", "2", "--random-input-len", "8"]
    found = bench(served.url, *words)
    assert found.exit_code == 1
    assert found.stderr.startswith("nv: the first request failed: ValueError: the stream had")
    assert "out of memory" in found.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--request-rate", "0"], "request_rate is 0.0"),
        (["--goodput", "itl:3"], "goodput is 'itl:3': it must be ttft, tpot or e2el"),
        (["--metric-percentiles", "50,x"], "metric_percentiles is '50,x'"),
        (["--percentile-metrics", "ttft,x"], "percentile_metrics entry is 'x'"),
        (["--dataset-name", "custom"], "--dataset-name custom and --dataset-path FILE belong"),
        (["--dataset-path", __file__], "--dataset-name custom and --dataset-path FILE belong"),
        (["--extra-body", "3"], "extra_body is '3'"),
        (["--header", "x"], "header must be NAME=VALUE"),
        ([], "nothing answers at http://127.0.0.1:1 "),
    ],
)
def test_a_wrong_option_is_one_sentence(words, sentence):
    found = bench("http://127.0.0.1:1/v1", *words)
    assert found.exit_code == 1
    assert found.stderr.startswith(f"nv: {sentence}")


def test_a_model_without_a_tokenizer_names_the_option(serve):
    found = bench(serve().url)
    assert found.exit_code == 1
    assert "--tokenizer" in found.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is \\[1\\]: it must be an object"),
        ('{"prompt": "x", "output_tokens": 0}', "line 2: output_tokens is 0"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path, line, sentence):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(ValueError, match=sentence):
        file_prompts(path, Load())


def test_a_line_of_a_file_ends_only_at_a_line_feed(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "c\x85"}\n'.encode())
    assert [each.content for each in file_prompts(path, Load(num_prompts=2))] == [
        "a\u2028b",
        "c\x85",
    ]
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"prompts\.jsonl is not UTF-8: write it anew"):
        file_prompts(path, Load())


def test_a_request_that_takes_too_long_names_its_limit(serve, folder):
    words = ["--tokenizer", str(folder), "--random-input-len", "8", "--request-timeout", "0.5"]
    sentence = "no whole answer within request_timeout, 0.5 s: give a longer --request-timeout\n"
    found = bench(serve(script={"paused": True}).url, *words)
    assert found.stderr == f"nv: the first request failed: {sentence}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert bench(url, *words).stderr == f"nv: {url}/v1/models gave {sentence}"


def test_random_prompts_vary_in_length_and_share_prefixes(folder):
    load = Load(
        num_prompts=200, random_input_len=20, random_range_ratio=0.5, random_prefix_len=6,
        random_num_prefixes=3,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = random_prompts(load, tokenizer)
    assert prompts == random_prompts(load, tokenizer)
    lengths = {len(prompt.content) - 6 for prompt in prompts}
    assert (min(lengths), max(lengths)) == (10, 30)
    assert len({tuple(prompt.content[:6]) for prompt in prompts}) == 3
    assert not set(tokenizer.all_special_ids) & {i for each in prompts for i in each.content}


def test_the_gaps_have_the_rate_and_the_shape():
    rate = {"num_prompts": 20_000, "request_rate": 50.0}
    for burstiness in 0.25, 1.0, 4.0:
        gaps = np.diff(offsets(Load(**rate, burstiness=burstiness)))
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        assert gaps.std() == pytest.approx(1 / 50 / burstiness**0.5, rel=0.05)
    assert offsets(Load(num_prompts=3)) == [0.0] * 3


def test_requests_wait_for_their_time_and_for_a_place():
    load = Load(num_prompts=5, request_rate=100.0, max_concurrency=2)
    sent, most, done = [], [], []

    async def send(prompt):
        sent.append(time.perf_counter())
        most.append(len(sent) - len(done))
        await asyncio.sleep(0.03)
        return Outcome(num_output=prompt.num_output)

    began = time.perf_counter()
    prompts = [Prompt("x", index) for index in range(5)]
    ran = asyncio.run(run(prompts, load, send, lambda: done.append(1)))
    assert [each.num_output for each in ran.outcomes] == [0, 1, 2, 3, 4]
    assert max(most) == 2
    for at, offset in zip(sent, offsets(load), strict=True):
        assert at - began >= offset


def test_the_figures_are_vllm_s():
    outcomes = [
        Outcome(num_prompt=10, num_output=5, ttft=0.1, itls=(0.1, 0.3), e2el=0.5),
        Outcome(num_prompt=20, num_output=1, ttft=0.3, e2el=0.3),
        Outcome(error="status 503"),
    ]
    found = figures(Run(outcomes, 2.0, 0.1), (50.0, 99.9), milliseconds_by_metric(["ttft:200"]))
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["request_throughput"], found["request_goodput"]) == (1.0, 0.5)
    assert (found["output_throughput"], found["total_token_throughput"]) == (3.0, 18.0)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # an answer of one token has none
    assert found["median_itl_ms"] == pytest.approx(200)
    assert found["p99.9_e2el_ms"] == pytest.approx(499.8)
