"""The host as a process: a model, two deaths, and the answers of `LLM`."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nv_api import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nv_api.async_llm import EngineDead
from nv_api.host.frames import FROM_HOST, Failed, FrameBuffer, Start, packed
from nv_api.host.process import serve
from nv_api.host.wire import Wire
from nv_engine import EngineConfig

OPTIONS = {"device": "cpu", "num_kvcache_blocks": 16, "max_model_len": 256}
PROMPTS = ["hello world", [5, 6, 7], "日本 hello", {"prompt": "STOP"}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
    SamplingParams(seed=3, max_tokens=20, n=2, stop=["a", "STOP"]),
    SamplingParams(seed=4, max_tokens=9, bad_words=["hello"], logit_bias={104: 3.0}),
    SamplingParams(
        seed=5, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    ),
]


def plain(output):
    """The part of an output that two runs of one request share."""
    return [
        output.prompt,
        output.prompt_token_ids,
        output.prompt_logprobs,
        [
            (each.text, each.token_ids, each.logprobs, each.finish_reason, each.stop_reason)
            for each in output.outputs
        ],
    ]


def test_its_answers_are_those_of_llm(checkpoint):
    with LLM(checkpoint, **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)

    async def one(llm, prompt, params):
        async for output in llm.generate(prompt, params):
            last = output
        return last

    async def main():
        async with AsyncLLM(checkpoint, **OPTIONS) as llm:
            answers = await asyncio.gather(*map(one, [llm] * 4, PROMPTS, PARAMS))
            assert list(map(plain, answers)) == list(map(plain, expected))
            assert llm.get_default_sampling_params().top_k == 20
            with pytest.raises(ValueError, match="not JSON"):
                StructuredOutputsParams(json="{")
            bad = StructuredOutputsParams(grammar="start: undefined")
            with pytest.raises(ValueError, match="undefined"):
                await one(llm, "hello", SamplingParams(structured_outputs=bad))
            return llm

    llm = asyncio.run(main())
    assert llm.loss is not None
    with pytest.raises(ProcessLookupError):
        os.kill(llm._process.process_id, 0)


def test_s05_a_killed_host_is_an_error_of_each_request_within_a_second(checkpoint):
    async def read(llm):
        async for _ in llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True)):
            pass

    async def main():
        async with AsyncLLM(checkpoint, **OPTIONS) as llm:
            tasks = [asyncio.create_task(read(llm)) for _ in range(3)]
            await asyncio.sleep(0.05)
            os.kill(llm._process.process_id, signal.SIGKILL)
            began = time.monotonic()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - began < 1
            assert [type(error) for error in errors] == [EngineDead] * 3
            assert "SIGKILL" in str(errors[0])
            with pytest.raises(EngineDead, match="SIGKILL"):
                await read(llm)
            for call in (llm.ready, llm.reset_prefix_cache):
                with pytest.raises(EngineDead, match="SIGKILL"):
                    await call()

    asyncio.run(main())


@pytest.mark.parametrize(("error", "is_logged"), [(KeyError("rows"), True), (OSError(5), False)])
def test_a_fault_of_the_program_at_the_start_is_logged_with_its_trace(caplog, error, is_logged):
    def broken(config):
        raise error

    ours, theirs = socket.socketpair()
    ours.sendall(packed(Start(EngineConfig(model="m"), None, "auto")))
    assert not serve(Wire(theirs), broken)
    (frame,) = map(FROM_HOST.decode, FrameBuffer().push(ours.recv(1 << 16)))
    assert frame == Failed(type(error).__name__, str(error))
    assert ("in broken" in caplog.text) == is_logged
    ours.close()


def test_a_model_that_cannot_be_loaded_raises_as_llm(folder):
    async def main():
        llm = AsyncLLM(str(folder), **OPTIONS)
        with pytest.raises(FileNotFoundError) as raised:
            await llm.ready()
        await llm.close()
        return str(raised.value)

    with pytest.raises(FileNotFoundError) as expected:
        LLM(str(folder), **OPTIONS)
    assert asyncio.run(main()) == str(expected.value)


SCRIPT = """
import asyncio, json, sys, time
from nv_api import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1], **json.loads(sys.argv[2]))
    print(llm._process.process_id, flush=True)
    if sys.argv[3] == "ready":
        await llm.ready()
    print("here", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_s05_a_killed_front_end_leaves_no_host(checkpoint, when):
    front = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, checkpoint, json.dumps(OPTIONS), when],
        stdout=subprocess.PIPE,
        text=True,
    )
    host = int(front.stdout.readline())
    assert front.stdout.readline() == "here\n"
    front.kill()
    front.wait()
    front.stdout.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if status == "Z":
            return
        time.sleep(0.05)
    os.kill(host, signal.SIGKILL)
    raise AssertionError("the host outlived its front end by 5 s")
