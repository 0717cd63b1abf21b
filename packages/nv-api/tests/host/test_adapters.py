"""Adapters of AsyncLLM: over the socket, opened beside the steps of others."""

import asyncio
import threading
from collections import Counter
from pathlib import Path

import nv_api.async_llm
import pytest
from nv_api import LLM, AsyncLLM, LoRARequest, SamplingParams
from nv_api.async_llm import EngineDead
from nv_api.host.opening import Opening
from nv_engine import Engine
from scripted_device import HostThread

OPTIONS = {
    "device": "cpu", "dtype": "float32", "kvcache_block_size": 16, "num_kvcache_blocks": 64,
    "max_model_len": 256, "max_num_seqs": 8, "enable_lora": True, "max_loras": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def poets(tmp_path_factory, checkpoint, adapter_writer):
    """Three adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    write, base = adapter_writer.write_adapter, Path(checkpoint)
    return [
        LoRARequest(f"poet {n}", n, write(folder / str(n), base, seed=n, scale=3.0))
        for n in (1, 2, 3)
    ]


@pytest.fixture
def front_end(monkeypatch, checkpoint):
    """Make an AsyncLLM over the tiny model, whose host is a thread; `hosts` has it."""

    def make(**options):
        host = HostThread(None)
        make.hosts.append(host)
        monkeypatch.setattr(nv_api.async_llm, "HostProcess", lambda: host)
        return AsyncLLM(checkpoint, **OPTIONS | options)

    make.hosts = []
    return make


async def ids_of(llm, lora, prompt="hello", params=PARAMS):
    async for output in llm.generate(prompt, params, lora_request=lora):
        last = output
    assert last.lora_request is lora
    return last.outputs[0].token_ids


def test_added_listed_and_removed_as_in_llm(front_end, checkpoint, poets, tmp_path):
    async def main():
        async with front_end() as llm:
            assert await llm.list_loras() == set()
            assert await llm.add_lora(poets[0]) is True
            assert await llm.add_lora(poets[0]) is True
            assert await llm.list_loras() == {1}
            found = await asyncio.gather(*(ids_of(llm, each) for each in (None, *poets)))
            assert await llm.list_loras() == {1, 2, 3}
            assert await llm.remove_lora(2) is True
            assert await llm.remove_lora(2) is False
            assert await llm.list_loras() == {1, 3}
            other = LoRARequest("other", 1, poets[1].lora_path)
            for call in llm.add_lora(other), ids_of(llm, other):
                with pytest.raises(
                    ValueError, match=r"lora_int_id 1 is 'poet 1' from .*another id"
                ):
                    await call
            nowhere = LoRARequest("nowhere", 9, str(tmp_path / "none"))
            for call in llm.add_lora(nowhere), ids_of(llm, nowhere):
                with pytest.raises(FileNotFoundError, match="none is not a folder: give the one"):
                    await call
            replaced = LoRARequest("other", 1, poets[1].lora_path, load_inplace=True)
            assert await llm.add_lora(replaced) is True
            assert await ids_of(llm, replaced) == found[2]
            assert await llm.list_loras() == {1, 3}
        return found

    found = asyncio.run(main())
    with LLM(checkpoint, **OPTIONS) as llm:
        assert [llm.generate("hello", PARAMS, False, each)[0]["token_ids"]
                for each in (None, *poets)] == found  # fmt: skip
    assert len(set(map(tuple, found))) == 4


@pytest.fixture
def held(monkeypatch):
    """An event that the opening of each adapter waits for; `opened` counts them by name."""
    held, whole = threading.Event(), Engine.open_adapter
    held.opened = Counter()

    def slow(engine, lora):
        held.opened[lora.lora_name] += 1
        assert held.wait(60)
        return whole(engine, lora)

    monkeypatch.setattr(Engine, "open_adapter", slow)
    yield held
    held.set()


def test_rows_decode_while_an_adapter_is_opened_and_requests_for_it_wait_together(
    front_end, poets, held, monkeypatch
):
    openings = []
    made = Opening.__init__
    monkeypatch.setattr(
        Opening, "__init__", lambda self, *given: (openings.append(self), made(self, *given))[1]
    )

    def waits(lora):
        return openings[0]._waiting.get(lora)

    async def main():
        async with front_end() as llm:
            late = [asyncio.create_task(ids_of(llm, poets[0])) for _ in range(3)]
            late.append(asyncio.create_task(llm.add_lora(poets[0])))
            aborted = asyncio.create_task(ids_of(llm, poets[1]))
            base = await ids_of(llm, None, params=SamplingParams(max_tokens=200, ignore_eos=True))
            assert len(base) == 200  # all of its steps, beside the opening
            assert not any(task.done() for task in (*late, aborted))
            assert await llm.list_loras() == set()
            aborted.cancel()
            with pytest.raises(asyncio.CancelledError):
                await aborted
            while waits(poets[1]):  # until the host has the frame
                await asyncio.sleep(0.01)
            held.set()
            *found, added = await asyncio.gather(*late)
            assert added is True
            assert found == [await ids_of(llm, poets[0])] * 3
            assert held.opened == {"poet 1": 1, "poet 2": 1}
            assert llm.num_unfinished == 0

    asyncio.run(main())


def test_a_cancelled_call_harms_no_other(front_end, poets, held):
    async def main():
        async with front_end() as llm:
            first = asyncio.create_task(llm.add_lora(poets[0]))
            other = asyncio.create_task(llm.add_lora(poets[0]))
            await asyncio.sleep(0.05)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            held.set()
            assert await other is True
            assert await llm.list_loras() == {1}
            assert not llm._answers

    asyncio.run(main())


def test_calls_in_flight_fail_when_the_engine_is_closed_or_gone(front_end, poets, held):
    async def main(end):
        llm = front_end()
        await llm.ready()
        call = asyncio.create_task(llm.add_lora(poets[0]))
        await asyncio.sleep(0.05)
        await end(llm)
        with pytest.raises(EngineDead):
            await call
        for later in llm.list_loras(), llm.remove_lora(1), llm.add_lora(poets[0]):
            with pytest.raises(EngineDead):
                await later
        held.set()
        await llm.close()

    async def closed(llm):
        await llm.close()

    async def gone(llm):
        front_end.hosts[-1].wire._end.shutdown(2)

    for end in closed, gone:
        held.clear()
        asyncio.run(main(end))


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            PermissionError(13, "Permission denied", "/a/b"),
            ValueError,
            "^/a/b cannot be read .Perm",
        ),
        (KeyError("r"), EngineDead, "^KeyError: 'r'$"),
    ],
)
def test_files_that_cannot_be_opened_are_an_error_of_their_requests_alone(
    front_end, poets, monkeypatch, fault, kind, message
):
    def fails(folder):
        raise fault

    async def main():
        async with front_end() as llm:
            with monkeypatch.context() as patch:
                patch.setattr("nv_engine.adapter_library.AdapterFiles.open", fails)
                for call in llm.add_lora(poets[0]), ids_of(llm, poets[0]):
                    with pytest.raises(kind, match=message):
                        await call
            assert llm.is_ready
            assert len(await ids_of(llm, poets[0])) == 8

    asyncio.run(main())
