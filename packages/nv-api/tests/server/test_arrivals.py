"""Arrivals: requests that come at once begin a few in each turn of the event loop."""

import asyncio

import pytest
from nv_api.server.arrivals import NUM_PER_TURN, Arrivals


def test_a_turn_begins_a_few_and_all_begin_in_their_order():
    async def run():
        arrivals, begun, turns = Arrivals(), [], []
        for number in range(3 * NUM_PER_TURN + 1):
            arrivals.add(lambda number=number: begun.append(number))
        for _ in range(5):
            turns.append(len(begun))
            await asyncio.sleep(0)
        return begun, turns

    begun, turns = asyncio.run(run())
    assert begun == list(range(3 * NUM_PER_TURN + 1))
    assert turns == [n * NUM_PER_TURN for n in (1, 2, 3)] + [len(begun)] * 2


def test_a_request_that_comes_alone_begins_at_once():
    async def run():
        arrivals, begun = Arrivals(), []
        for number in range(3):
            arrivals.add(lambda number=number: begun.append(number))
            assert begun[-1] == number
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())


def test_one_that_cannot_begin_keeps_none_of_the_others():
    async def run():
        arrivals, begun, errors = Arrivals(), [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, it: errors.append(it))

        def fail():
            raise OSError("broken")

        for number in range(NUM_PER_TURN):
            arrivals.add(lambda number=number: begun.append(number))
        arrivals.add(fail)
        arrivals.add(lambda: begun.append("last"))
        for _ in range(4):
            await asyncio.sleep(0)
        return begun, errors

    begun, errors = asyncio.run(run())
    assert begun == [*range(NUM_PER_TURN), "last"]
    assert len(errors) == 1


def test_an_error_of_a_request_that_begins_at_once_is_its_own():
    async def run():
        arrivals, begun = Arrivals(), []
        with pytest.raises(ZeroDivisionError):
            arrivals.add(lambda: 1 / 0)
        arrivals.add(lambda: begun.append(1))
        return begun

    assert asyncio.run(run()) == [1]
