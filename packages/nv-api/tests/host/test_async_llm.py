"""AsyncLLM: many tasks on one engine in a host."""

import asyncio
import contextlib
import gc
import inspect
import random
import threading
import time
import weakref
from collections import Counter

import pytest
from nv_api import LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams, wake_queue
from nv_api.async_llm import AsyncLLM, EngineDead
from nv_api.members import OF_ASYNC_LLM
from nv_api.prompts import TokenPrompt
from scripted_device import EOS, ScriptedDevice

PARAMS = SamplingParams(max_tokens=40)


async def texts_of(llm, prompt, params=PARAMS, **options):
    """The text of each snapshot, and the last snapshot."""
    texts, last = [], None
    async for output in llm.generate(prompt, params, **options):
        texts.append(output.outputs[0].text)
        last = output
    return texts, last


async def settled(llm):
    """Wait until the engine has nothing to do and its blocks are free."""
    for _ in range(200):
        await asyncio.sleep(0.01)
        stats = llm.stats
        is_idle = stats.num_running == stats.num_waiting == 0 and stats.num_blocks
        if is_idle and stats.num_free_blocks == stats.num_blocks:
            return
    raise AssertionError(f"still at work: {llm.stats}")


def test_outputs_are_snapshots_that_grow_to_the_answer(front_end):
    async def main():
        async with front_end(ScriptedDevice(step_seconds=0.003)) as llm:
            texts, last = await texts_of(llm, "hello, wörld")
            assert last.finished
            assert last.outputs[0].finish_reason == "stop"
            assert last.outputs[0].token_ids[-1] == EOS
            assert last.prompt == "hello, wörld"
            assert texts[-1] == "hello, wörld"
            assert all(texts[-1].startswith(text) for text in texts)
            assert len(texts) > 3
            assert llm.num_unfinished == 0

    asyncio.run(main())


def test_the_counters_are_new_once_the_engine_has_nothing_to_do(front_end, monkeypatch):
    for name in "IDLE_SECONDS", "STATS_SECONDS":
        monkeypatch.setattr(f"nv_api.host.host.{name}", 5.0)  # longer than `settled` waits

    async def main():
        async with front_end() as llm:
            for number in 1, 2:
                _, last = await texts_of(llm, "abc")
                await asyncio.sleep(0.05)
                await settled(llm)
                assert llm.stats.num_requests == number
                assert llm.stats.num_generated_tokens == number * len(last.outputs[0].token_ids)

    asyncio.run(main())


def test_many_tasks_at_once(front_end):
    async def main():
        async with front_end(max_num_seqs=8) as llm:
            prompts = [f"number {i}" for i in range(50)]
            answers = await asyncio.gather(*(texts_of(llm, prompt) for prompt in prompts))
            assert [texts[-1] for texts, _ in answers] == prompts
            await settled(llm)

    asyncio.run(main())


@pytest.mark.parametrize("burst", [1, 3])
def test_requests_that_come_and_go_get_their_own_tokens(front_end, burst):
    """Rows of a step change with each: some leave, some end by a text, some by a step of theirs."""
    rng = random.Random(burst)
    kinds = {
        "plain": PARAMS,
        "several": SamplingParams(n=3, max_tokens=40),
        "stop": SamplingParams(max_tokens=40, stop="7"),
        "length": SamplingParams(max_tokens=5),
    }
    ends = {"stop": lambda text: text.partition("7")[0], "length": lambda text: text[:5]}

    async def one(llm, number):
        await asyncio.sleep(rng.uniform(0, 0.1))
        kind, prompt = rng.choice([*kinds]), f"{number} and {number * 37} more"
        leaves = rng.random() < 0.2
        wanted = ends.get(kind, str)(prompt)
        async for output in llm.generate(prompt, kinds[kind]):
            texts = [each.text for each in output.outputs]
            assert all(wanted.startswith(text) for text in texts), (texts, wanted)
            if leaves and len(texts[0]) > 3:
                return 0
        assert texts == [wanted] * kinds[kind].n
        return 1

    async def main():
        device = ScriptedDevice(step_seconds=0.001)
        async with front_end(device, max_num_seqs=16, max_burst=burst) as llm:
            assert sum(await asyncio.gather(*(one(llm, number) for number in range(60)))) > 30
            await settled(llm)

    asyncio.run(main())


def test_an_idle_front_end_keeps_no_completion(front_end):
    async def main():
        async with front_end() as llm:
            (prompt,) = await llm.tokenize(["abc"])
            async with await llm.submit(prompt, PARAMS) as stream:
                ended = weakref.ref(stream.request.completions[0])
                async for _ in stream:
                    pass
            del stream
            await settled(llm)
            gc.collect()
            assert ended() is None

    asyncio.run(main())


def test_several_completions_and_stop_strings(front_end):
    async def main():
        async with front_end() as llm:
            params = SamplingParams(n=3, max_tokens=40, stop="STOP")
            _, last = await texts_of(llm, "one STOP two", params)
            assert [each.text for each in last.outputs] == ["one "] * 3
            assert [each.stop_reason for each in last.outputs] == ["STOP"] * 3
            await settled(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([5, 999], PARAMS, ValueError, "999"),
        ([5] * 3000, PARAMS, ValueError, "3000 tokens"),
        ([5], SamplingParams(stop_token_ids=[5000]), ValueError, "5000"),
        ("", PARAMS, ValueError, "empty"),
        (7.5, PARAMS, TypeError, "float"),
        ({"prompt": "x", "cache_salt": 5}, PARAMS, ValueError, "cache_salt is 5: it must be a str"),
        ({"prompt": "x", "cache_salt": "\ud800"}, PARAMS, ValueError, "in valid Unicode"),
        ([2**70], PARAMS, ValueError, "more than 64 bits: token ids are below"),
    ],
)
def test_a_wrong_request_is_refused_before_the_first_output(
    front_end, prompt, params, error, message
):
    async def main():
        async with front_end() as llm:
            with pytest.raises(error, match=message):
                await texts_of(llm, prompt, params)
            texts, _ = await texts_of(llm, "abc")
            assert texts[-1] == "abc"
            await settled(llm)

    asyncio.run(main())


def slow(_):
    return [65] * 2000


def test_abort_ends_the_outputs_and_frees_the_blocks(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.002)) as llm:
            seen = []

            async def read():
                params = SamplingParams(max_tokens=2000)
                async for output in llm.generate("abc", params, request_id="mine"):
                    seen.append(output)  # noqa: PERF401  # counted so far

            task = asyncio.create_task(read())
            while len(seen) < 3:
                await asyncio.sleep(0.005)
            await llm.abort("mine")
            await asyncio.wait_for(task, 5)
            assert seen[-1].outputs[0].finish_reason == "abort"
            assert seen[-1].request_id == "mine"
            await llm.abort("mine")
            await llm.abort("unknown")
            await settled(llm)

    asyncio.run(main())


def test_16_a_request_has_its_name_before_the_engine_has_answered(front_end, monkeypatch):
    """While its grammar compiles, no other can have the name, and it can be aborted by it."""
    wait = threading.Event()
    monkeypatch.setattr("nv_api.structured.grammar_compiler", lambda *_: lambda _: wait.wait(5))

    async def main():
        async with front_end() as llm:
            bound = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
            outputs = llm.generate("abc", bound, "one")
            reader = asyncio.create_task(anext(outputs))
            while not llm.num_unfinished:
                await asyncio.sleep(0.005)
            with pytest.raises(ValueError, match="'one': a request in flight has that id"):
                await anext(llm.generate("abc", PARAMS, "one"))
            await llm.abort("one")
            output = await asyncio.wait_for(reader, 2)
            assert output.outputs[0].finish_reason == "abort"
            wait.set()
            await outputs.aclose()  # which frees the name at once
            texts, _ = await texts_of(llm, "abcd", request_id="one")
            assert texts[-1] == "abcd"
            await settled(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda llm: llm.submit("abc"), TypeError, "prompt is 'abc': it must be a TokenPrompt"),
        (lambda llm: llm.tokenize("abc"), TypeError, "prompts is 'abc': it must be a list"),
        (lambda llm: llm.tokenize(None), TypeError, "prompts is None: it must be a list"),
        (lambda llm: llm.abort(["one"]), TypeError, r"request_id is \['one'\]: it must be one id"),
        (lambda llm: anext(llm.generate("a", None, [])), TypeError, "request_id is .*one id"),
        (lambda llm: anext(llm.generate("a", None, b"x")), TypeError, "is b'x': .* str or an int"),
        (lambda llm: anext(llm.generate("a", None, True)), TypeError, "is True: .*one id"),
        (lambda llm: anext(llm.generate("a", None, 1.0)), TypeError, "is 1.0: .*one id"),
        (lambda llm: anext(llm.generate("a", None, "")), ValueError, "request_id is empty"),
        (lambda llm: llm.add_lora("poet"), TypeError, "lora_request is 'poet': it must be a LoRA"),
        (lambda llm: llm.add_lora(None), TypeError, "lora_request is None: it must be a LoRAReq"),
        (lambda llm: llm.remove_lora("x"), ValueError, "lora_id is 'x': it must be an integer"),
        (lambda llm: llm.remove_lora(0), ValueError, "lora_id is 0: it must be an integer from 1"),
        (lambda llm: llm.remove_lora(2**70), ValueError, "lora_id is .*: it must be an integer"),
        (
            lambda llm: llm.add_lora(LoRARequest("poet", 1, "/none")),
            ValueError,
            "lora_request is 'poet' and the model was loaded without adapters: .*enable_lora=True",
        ),
    ],
)
def test_16_an_argument_of_a_wrong_type_is_one_sentence(front_end, call, error, message):
    async def main():
        async with front_end() as llm:
            with pytest.raises(error, match=message):
                await call(llm)
            assert llm.num_unfinished == 0

    asyncio.run(main())


def test_16_what_is_known_only_after_the_start_is_refused_before_it(front_end):
    async def main():
        llm = front_end()
        for call in (
            llm.get_tokenizer,
            llm.get_default_sampling_params,
            lambda: llm.facts,
            lambda: llm.text,
            lambda: llm.pooler,
        ):
            with pytest.raises(RuntimeError, match="not loaded yet: await ready"):
                call()
        await llm.close()

    asyncio.run(main())


def test_a_cancelled_task_aborts_its_request_alone(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.002)) as llm:
            params = SamplingParams(max_tokens=300)
            tasks = [asyncio.create_task(texts_of(llm, "abc", params)) for _ in range(4)]
            await asyncio.sleep(0.1)
            tasks[0].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tasks[0]
            answers = await asyncio.gather(*tasks[1:])
            assert [len(last.outputs[0].token_ids) for _, last in answers] == [300] * 3
            await settled(llm)

    asyncio.run(main())


def test_leaving_the_loop_aborts(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.002)) as llm:
            outputs = llm.generate("abc", SamplingParams(max_tokens=2000))
            async for _ in outputs:
                break
            await outputs.aclose()
            await settled(llm)
            assert llm.num_unfinished == 0

    asyncio.run(main())


def test_16_an_iterator_that_is_dropped_or_left_open_frees_its_blocks(front_end, capfd):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.002)) as llm:
            params = SamplingParams(max_tokens=2000)
            outputs = llm.generate("abc", params)
            await anext(outputs)
            del outputs
            await settled(llm)
            assert llm.num_unfinished == 0
            left_open.append(llm.generate("abc", params, "name"))
            assert not (await anext(left_open[0])).finished

    left_open = []
    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 4
    assert capfd.readouterr().err == ""


def test_16_vllm_s_members_work_or_name_what_there_is_instead(front_end):
    async def main():
        llm = front_end()
        for name in OF_ASYNC_LLM:
            with pytest.raises(AttributeError, match=rf"^AsyncLLM.{name} is not built yet: [\w(]"):
                getattr(llm, name)
            assert not hasattr(AsyncLLM, name)  # which would hide the sentence
        with pytest.raises(AttributeError, match="'AsyncLLM' object has no attribute 'gen"):
            _ = llm.generat
        assert (llm.is_running, llm.errored) == (True, False)
        await llm.check_health()
        await llm.close()
        assert (llm.is_running, llm.errored) == (False, True)
        assert str(llm.dead_error) == llm.loss
        with pytest.raises(EngineDead, match="this AsyncLLM is closed"):
            await llm.check_health()

    asyncio.run(main())


def test_a_slow_reader_gets_several_tokens_in_one_delta(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            stream = await llm.submit(prompt, SamplingParams(max_tokens=60))
            sizes = []
            async for deltas in stream:
                sizes += [len(delta.token_ids) for delta in deltas]
                await asyncio.sleep(0.03)
            assert sum(sizes) == 60
            assert max(sizes) > 3

    asyncio.run(main())


def test_deltas_are_handed_on_and_merge_while_their_reader_is_busy(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            stream = await llm.submit(prompt, SamplingParams(max_tokens=60))
            sizes, busy_at = [], []

            def take(deltas):
                sizes.append(sum(len(delta.token_ids) for delta in deltas))
                if len(sizes) in (3, 6):
                    busy_at.append(len(sizes))
                    return asyncio.sleep(0.05)
                return None

            await stream.hand_on(take)
            assert sum(sizes) == 60
            assert busy_at == [3, 6]
            assert min(sizes[3], sizes[6]) > 3, "they wait in the completion"
            assert stream.request.finished

    asyncio.run(main())


def test_an_error_of_the_one_that_takes_deltas_ends_its_own_request_alone(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            params = SamplingParams(max_tokens=40)
            broken, whole = [await llm.submit(prompt, params) for _ in range(2)]
            taken, tokens = [], []

            def refuse(deltas):
                taken.append(deltas)
                raise KeyError("no event")

            def take(deltas):
                tokens.extend(token for delta in deltas for token in delta.token_ids)

            failed, ended = await asyncio.gather(
                broken.hand_on(refuse), whole.hand_on(take), return_exceptions=True
            )
            assert isinstance(failed, KeyError)
            assert len(taken) == 1, "nothing is handed on after it"
            assert ended is None
            assert len(tokens) == 40

    asyncio.run(main())


def test_one_that_takes_deltas_may_end_its_request(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            params = SamplingParams(max_tokens=40)
            ended, whole = [await llm.submit(prompt, params) for _ in range(2)]
            reasons, tokens, errors = [], [], []
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: errors.append(context)
            )

            def end(deltas):
                reasons.extend(delta.finish_reason for delta in deltas)
                ended.abort()

            def take(deltas):
                tokens.extend(token for delta in deltas for token in delta.token_ids)

            await asyncio.wait_for(asyncio.gather(ended.hand_on(end), whole.hand_on(take)), 30)
            assert reasons == [None, "abort"]
            assert errors == []
            assert len(tokens) == 40

    asyncio.run(main())


def test_an_error_of_one_that_takes_deltas_is_raised_though_it_has_ended_its_request(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            stream = await llm.submit(prompt, SamplingParams(max_tokens=40))

            def end(deltas):
                if deltas[0].finish_reason is None:
                    stream.abort()
                    raise KeyError("no event")

            with pytest.raises(KeyError, match="no event"):
                await stream.hand_on(end)
            assert stream.request.finished

    asyncio.run(main())


def test_an_error_of_one_stream_leaves_the_others_their_turn():
    class Stream:
        def __init__(self, error=None):
            self.error, self.wakes = error, 0

        def wake(self):
            self.wakes += 1
            if self.error is not None:
                raise self.error

    async def main():
        errors = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: errors.append(context["exception"])
        )
        queue, broken, whole = wake_queue.WakeQueue(), Stream(KeyError("no")), Stream()
        queue.add([broken, whole])
        await asyncio.sleep(0.01)
        queue.add([whole])
        await asyncio.sleep(0.01)
        assert (broken.wakes, whole.wakes) == (1, 2)
        assert [type(error) for error in errors] == [KeyError]

    asyncio.run(main())


def test_more_streams_than_a_turn_wakes_all_get_every_token(front_end, monkeypatch):
    monkeypatch.setattr(wake_queue, "NUM_PER_TURN", 2)

    async def main():
        async with front_end(ScriptedDevice(slow)) as llm:
            (prompt,) = await llm.tokenize(["abc"])
            streams = [await llm.submit(prompt, SamplingParams(max_tokens=20)) for _ in range(7)]
            counts = Counter()

            def taking(number):
                return lambda deltas: counts.update({number: len(deltas[0].token_ids)})

            await asyncio.gather(
                *(stream.hand_on(taking(number)) for number, stream in enumerate(streams))
            )
            assert counts == dict.fromkeys(range(7), 20)

    asyncio.run(main())


def test_a_name_in_use_is_refused(front_end):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.002)) as llm:
            first = llm.generate("abc", SamplingParams(max_tokens=2000), "one")
            await anext(first)
            with pytest.raises(ValueError, match="'one'"):
                await texts_of(llm, "abc", request_id="one")
            await first.aclose()
            await texts_of(llm, "abc", request_id="one")

    asyncio.run(main())


def test_s06_a_step_that_fails_ends_its_requests_and_the_next_works(front_end):
    async def main():
        fault = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        device = ScriptedDevice(fail_at=(2,), fault=fault)
        async with front_end(device) as llm:
            _, last = await texts_of(llm, "abcdef")
            assert last.outputs[0].finish_reason == "error"
            assert "out of memory" in last.outputs[0].stop_reason
            texts, _ = await texts_of(llm, "abcdef")
            assert texts[-1] == "abcdef"

    asyncio.run(main())


def test_a_lost_device_ends_everything_with_its_sentence(front_end):
    async def main():
        fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        async with front_end(ScriptedDevice(fail_at=(2,), fault=fault)) as llm:
            _, last = await texts_of(llm, "abcdef")
            assert "illegal memory access" in last.outputs[0].stop_reason
            with pytest.raises(EngineDead, match="illegal memory access"):
                await texts_of(llm, "abc")
            assert not llm.is_ready

    asyncio.run(main())


def test_a_fault_of_the_host_is_an_error_of_each_request(front_end):
    async def main():
        fault = NotImplementedError("a fault of the program")
        device = ScriptedDevice(slow, step_seconds=0.01, fail_at=(9,), fault=fault)
        async with front_end(device) as llm:
            params = SamplingParams(max_tokens=500)
            tasks = [asyncio.create_task(texts_of(llm, "abc", params)) for _ in range(3)]
            began = time.monotonic()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - began < 3
            assert [type(answer) for answer in answers] == [EngineDead] * 3
            assert "its thread ended" in str(answers[0])
            with pytest.raises(EngineDead):
                await texts_of(llm, "abc")

    asyncio.run(main())
    assert isinstance(front_end.hosts[0].error, NotImplementedError)


def test_what_the_engine_refuses_at_its_start_is_raised_by_ready(front_end):
    async def main():
        llm = front_end(ValueError("num_kvcache_blocks is 3: too few"))
        with pytest.raises(ValueError, match="too few"):
            await llm.ready()
        with pytest.raises(ValueError, match="too few"):
            await texts_of(llm, "abc")
        await llm.close()

    asyncio.run(main())


def test_an_option_is_checked_before_a_process_is_started(folder):
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        AsyncLLM(str(folder), max_num_seqs=0)


def test_close_fails_what_is_in_flight_and_may_come_twice(front_end):
    async def main():
        llm = front_end(ScriptedDevice(slow, step_seconds=0.002))
        await llm.ready()
        task = asyncio.create_task(texts_of(llm, "abc", SamplingParams(max_tokens=2000)))
        await asyncio.sleep(0.05)
        await llm.close()
        await llm.close()
        with pytest.raises(EngineDead, match="closed"):
            await task
        assert front_end.hosts[0].device.is_closed

    asyncio.run(main())


def calls_of(llm):
    """Every method that needs the engine."""
    prompt = TokenPrompt(None, [65])
    return [
        llm.ready(), anext(llm.generate("abc", PARAMS)), anext(llm.encode("abc")),
        anext(llm.chat([{"role": "user", "content": "hi"}], PARAMS)), llm.tokenize(["abc"]),
        llm.submit(prompt, PARAMS), llm.reset_prefix_cache(), llm.list_loras(), llm.remove_lora(1),
        llm.add_lora(LoRARequest("poet", 1, "/none")),
    ]  # fmt: skip


@pytest.mark.parametrize("is_used", [False, True])
def test_16_a_closed_front_end_raises(front_end, is_used):
    async def main():
        llm = front_end()
        if is_used:
            await llm.ready()
        await llm.close()
        for call in calls_of(llm):
            with pytest.raises(EngineDead, match="this AsyncLLM is closed: make a new one"):
                await asyncio.wait_for(call, 2)
        await llm.abort("mine")

    asyncio.run(main())


def test_16_another_loop_is_refused_at_once_and_closes_when_the_first_is_closed(front_end):
    llm = front_end()
    first = asyncio.new_event_loop()
    first.run_until_complete(texts_of(llm, "abc"))
    waiting = llm.generate("abc", PARAMS, "one")
    first.run_until_complete(anext(waiting))

    async def refused():
        for call in (*calls_of(llm), llm.abort("one")):
            with pytest.raises(RuntimeError, match=r"belongs to another event loop.*make a new"):
                await asyncio.wait_for(call, 2)

    async def closing_is_refused():
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await llm.close()

    asyncio.run(refused())
    asyncio.run(closing_is_refused())
    texts, _ = first.run_until_complete(texts_of(llm, "abcd"))
    assert texts[-1] == "abcd"
    first.close()
    asyncio.run(refused())
    asyncio.run(asyncio.wait_for(llm.close(), 10))
    assert front_end.hosts[0].device.is_closed
    asyncio.run(llm.close())


@pytest.mark.parametrize("params", [5, "x", {}, [7], PoolingParams()])
def test_16_parameters_of_a_wrong_type_are_llm_s_sentence(front_end, params):
    async def main():
        async with front_end() as llm:
            (prompt,) = await llm.tokenize(["abc"])
            messages = [{"role": "user", "content": "hi"}]
            calls = [anext(llm.generate("abc", params)), anext(llm.chat(messages, params))]
            if not isinstance(params, PoolingParams):  # which submit takes
                calls.append(llm.submit(prompt, params))
            for call in calls:
                with pytest.raises(TypeError, match="sampling_params must be a SamplingParams"):
                    await call

    asyncio.run(main())


def test_16_methods_look_async_and_still_check_their_arguments(front_end):
    assert inspect.iscoroutinefunction(AsyncLLM.close)
    assert inspect.isasyncgenfunction(AsyncLLM.generate)
    assert not inspect.iscoroutinefunction(AsyncLLM.get_tokenizer)

    async def main():
        async with front_end() as llm:
            with pytest.raises(TypeError, match="submit lacks prompt"):
                await llm.submit()
            with pytest.raises(TypeError, match="generate has no option 'promt'"):
                await anext(llm.generate(promt="abc"))
            for call in (
                lambda: llm.abort("one", trace_headers={}),
                lambda: anext(llm.generate("abc", PARAMS, trace_headers={})),
            ):
                with pytest.warns(UserWarning, match="without effect: trace_headers") as warned:
                    await call()
                assert [each.filename for each in warned] == [__file__]

    asyncio.run(main())


def test_an_unused_front_end_closes(front_end):
    async def main():
        llm = front_end()
        await llm.close()
        front_end.hosts[0].reap()

    asyncio.run(main())


def test_a_chat_and_its_template(front_end):
    async def main():
        async with front_end() as llm:
            messages = [{"role": "user", "content": "hi"}]
            async for output in llm.chat(messages, PARAMS):
                last = output
            assert last.prompt.endswith("assistant\n")
            with pytest.raises(TypeError, match="messages"):
                async for _ in llm.chat("hi", PARAMS):
                    pass

    asyncio.run(main())


def test_a_text_that_cannot_be_made_ends_its_request_alone(front_end, monkeypatch):
    async def main():
        async with front_end(ScriptedDevice(slow, step_seconds=0.001)) as llm:
            params = SamplingParams(max_tokens=100, stop="never")  # so that text is made at once
            bad = asyncio.create_task(texts_of(llm, "bad", params))
            good = asyncio.create_task(texts_of(llm, "good", params))
            await asyncio.sleep(0.02)
            stream = next(s for s in llm._streams.values() if s.request.prompt.text == "bad")

            def broken(*_):
                raise OverflowError("a tokenizer's own fault")

            monkeypatch.setattr(stream.request.completions[0], "extend", broken)
            with pytest.raises(RuntimeError, match="a tokenizer's own fault"):
                await bad
            _, last = await good
            assert len(last.outputs[0].token_ids) == 100
            await settled(llm)

    asyncio.run(main())
