"""Frames: what goes in comes out, however the bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st
from nv_api.host.frames import (
    FOR_HOST,
    FROM_HOST,
    LENGTH,
    Abort,
    Accepted,
    FrameBuffer,
    Refused,
    RowNames,
    Start,
    Step,
    add_of,
    packed,
    request_of,
)
from nv_engine import (
    EngineConfig,
    EngineRequest,
    SamplingParams,
    SequenceUpdate,
    StructuredOutputsParams,
)
from nv_engine.batch import TokenLogprobs

FRAMES = [Accepted(3), Refused(4, "ValueError", "é" * 70000), Accepted(2**62)]


@given(st.lists(st.integers(1, 9000), max_size=40))
def test_frames_survive_any_cut(sizes):
    text = b"".join(map(packed, FRAMES))
    buffer, found, start = FrameBuffer(), [], 0
    for size in [*sizes, len(text)]:
        found += map(FROM_HOST.decode, buffer.push(text[start : start + size]))
        start += size
    assert found == FRAMES


def test_a_request_travels_whole():
    params = SamplingParams(
        n=2,
        temperature=0.5,
        seed=2**64 - 1,
        stop=["x"],
        stop_token_ids=[7],
        logit_bias={5: -1.5},
        bad_words=["no"],
        bad_words_token_ids=[[1, 2], [3]],
        logprobs=3,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    request = EngineRequest([1, 2, 3], params.frozen(), cache_salt="salt")
    body = packed(add_of(request, 9))[4:]
    found = request_of(FOR_HOST.decode(body))
    assert found.token_ids == [1, 2, 3]
    assert (found.request_id, found.cache_salt) == (9, "salt")
    assert found.params == SamplingParams(**{**vars(params), "stop": None})


def test_a_step_travels_with_its_log_probabilities():
    class View:
        """As RowLogprobs: a sequence that makes its entries when they are read."""

        def __len__(self):
            return 1

        def __iter__(self):
            return iter([TokenLogprobs([5, 6], [-0.5, -1.0], 1)])

        def __getitem__(self, index):
            return list(self)[index]

    update = SequenceUpdate(1, 0, (5,), "stop", None, 16, 1.5, logprobs=View())
    found = FROM_HOST.decode(packed(Step([update], 3, 1))[4:])
    assert found.updates[0].logprobs == [TokenLogprobs([5, 6], [-0.5, -1.0], 1)]
    assert found.updates[0].token_ids == (5,)
    assert isinstance(found.updates[0], SequenceUpdate)


def test_a_step_names_its_rows_or_has_those_before():
    step = Step([], 0, 2, [[7, 9], [8, 300]], RowNames([1, 2**40], [0, 3]))
    assert FROM_HOST.decode(packed(step)[4:]) == step
    assert FROM_HOST.decode(packed(Step([], 0, 2, [[7, 9]]))[4:]).rows is None


def test_a_step_of_256_rows_as_before_is_a_byte_per_small_token():
    assert len(packed(Step([], 0, 256, [[65] * 256]))) < 300


def test_the_engine_s_options_travel_whole():
    overrides = {"rope_parameters": {"rope_type": "yarn", "factor": 2.5}, "layer_types": None}
    start = Start(EngineConfig(model="m", hf_overrides=overrides), "t", "auto")
    assert FOR_HOST.decode(packed(start)[LENGTH.size :]) == start


def test_an_abort_of_one_completion():
    assert FOR_HOST.decode(packed(Abort(5, 1))[4:]) == Abort(5, 1)
