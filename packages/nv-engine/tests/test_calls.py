"""A call whose arguments do not fit: one sentence in place of Python's own."""

import pytest
from nv_engine.calls import Shape


class Engine:
    def __init__(self, model, **options): ...

    def score(self, data_1, data_2, use_tqdm=True): ...

    def chat(self, messages, *, tools=None): ...

    def step(self): ...


def pair(left, right): ...


@pytest.mark.parametrize(
    ("function", "num_placed", "named", "sentence"),
    [
        (Engine.score, 2, (), "score lacks data_2: call score(data_1, data_2)"),
        (Engine.score, 1, (), "score lacks data_1 and data_2: call score(data_1, data_2)"),
        (Engine.score, 1, ("data_2",), "score lacks data_1: call score(data_1, data_2)"),
        (Engine.score, 2, ("use_tqdm",), "score lacks data_2: call score(data_1, data_2)"),
        (
            Engine.score,
            5,
            (),
            "score takes at most 3 by position (data_1, data_2, use_tqdm) and got 4: leave the "
            "others out",
        ),
        (
            Engine.score,
            3,
            ("data_2",),
            "score got data_2 twice, by position and by name: give it once",
        ),
        (
            Engine.chat,
            3,
            (),
            "chat takes at most 1 by position (messages) and got 2: give the others by name",
        ),
        (Engine.step, 2, (), "step takes no arguments by position and got 1: leave them out"),
        (Engine, 1, (), "Engine lacks model: call Engine(model)"),
        (
            Engine,
            3,
            (),
            "Engine takes at most 1 by position (model) and got 2: give the others by name",
        ),
        (pair, 1, (), "pair lacks right: call pair(left, right)"),
    ],
)
def test_16_a_call_that_does_not_fit_is_one_sentence(function, num_placed, named, sentence) -> None:
    function = function.__init__ if isinstance(function, type) else function
    with pytest.raises(TypeError) as error:
        Shape.of(function).check(num_placed, named)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("function", "num_placed", "named"),
    [
        (Engine.score, 3, ()),
        (Engine.score, 1, ("data_1", "data_2", "use_tqdm")),
        (Engine.score, 4, ()),
        (Engine.chat, 2, ("tools",)),
        (Engine.step, 1, ()),
        (Engine.__init__, 2, ("anything",)),
        (pair, 0, ("left", "right")),
    ],
)
def test_16_a_call_that_fits_is_left_alone(function, num_placed, named) -> None:
    Shape.of(function).check(num_placed, named)
