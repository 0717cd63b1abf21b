"""The draw keys, where a sequence ends, and which files change one."""

import ast
from pathlib import Path

import nv_engine
import pytest
from nv_engine.batch import NO_TOKEN
from nv_engine.params import SamplingParams
from nv_engine.scheduling.draw_key import draw_key, mix64
from nv_engine.scheduling.policy import first_come_first_served, longest_first
from nv_engine.scheduling.sequence import Sequence


def sequence(prompt_len=3, *, limit=100, eos=(0, 1), **params):
    prompt = list(range(10, 10 + prompt_len))
    return Sequence(7, 0, prompt, SamplingParams(**params), seed=5, limit=limit, eos_token_ids=eos)


def test_mix64_is_splitmix64():
    # The published first outputs of splitmix64 for states 0 and 1234567.
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1234567) == 6457827717110365317


def test_draw_keys_differ_by_seed_and_stream():
    keys = [draw_key(seed, index) for seed in (0, 1, -1, 2**63) for index in range(50)]
    keys += [draw_key(0, number, index) for number in range(50) for index in range(3)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_draw_key_takes_seeds_modulo_2_to_the_64():
    assert draw_key(-1, 0) == draw_key(2**64 - 1, 0)


@pytest.mark.parametrize(
    ("params", "tokens", "want"),
    [
        ({}, (5, 6), ((5, 6), None, None)),
        ({}, (5, 1, 6), ((5, 1), "stop", None)),
        ({"ignore_eos": True}, (5, 1, 6), ((5, 1, 6), None, None)),
        ({"stop_token_ids": [6]}, (5, 6, 1), ((5, 6), "stop", 6)),
        ({"stop_token_ids": [1]}, (1,), ((1,), "stop", None)),  # also an EOS
        ({"stop_token_ids": [1], "ignore_eos": True}, (1,), ((1,), "stop", 1)),
        ({"min_tokens": 2}, (1, 1, 1, 5), ((1, 1, 1), "stop", None)),
        ({"min_tokens": 3}, (1, 1, 1), ((1, 1, 1), None, None)),
    ],
)
def test_cut_at_stop_tokens(params, tokens, want):
    assert sequence(**params).cut(tokens) == want


def test_cut_at_the_limit_keeps_a_stop_token_as_the_reason():
    assert sequence(3, limit=5).cut((5, 6, 7)) == ((5, 6), "length", None)
    assert sequence(3, limit=5).cut((5, 1, 7)) == ((5, 1), "stop", None)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {5: 3.4e38}, "repetition_penalty": 1e-5}, "logit_bias and repetition_pen"),
        ({"logit_bias": {5: -3e38}, "repetition_penalty": 2.0}, "logit_bias and repetition_pen"),
        ({"repetition_penalty": 1e-36}, "repetition_penalty made logits that fp32 cannot hold"),
        (
            {"allowed_token_ids": [5], "bad_words_token_ids": [[5]]},
            "allowed_token_ids, bad_words_token_ids left no token to draw",
        ),
        ({"allowed_token_ids": [0, 1], "min_tokens": 2}, "allowed_token_ids, min_tokens left no"),
    ],
)
def test_f04_parameters_that_explain_why_nothing_was_drawn_are_named_alone(params, message):
    cut = sequence(**params).cut((7, NO_TOKEN))
    assert (cut.token_ids, cut.finish_reason) == ((7,), "error")
    assert cut.stop_reason.startswith(message)
    assert "weights" not in cut.stop_reason


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({}, ""),
        ({"logit_bias": {5: 3e38}, "repetition_penalty": 1.0}, "logit_bias"),
        ({"repetition_penalty": 1.3}, "repetition_penalty"),
        ({"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5]]}, "bad_words_token_ids"),
    ],
)
def test_f04_else_the_weights_come_first(params, named):
    reason = sequence(**params).cut((NO_TOKEN,)).stop_reason
    assert reason.startswith("the logits of this sequence hold NaN or infinity: ")
    assert named in reason


def test_policies_order_by_arrival_or_by_length():
    made = [sequence(limit=limit) for limit in (10, 30, 20, 30)]
    for number, each in enumerate(made):
        each.arrive(number)
    assert sorted(made, key=first_come_first_served) == made
    assert [each.number for each in sorted(made, key=longest_first)] == [1, 3, 2, 0]


def assigned(tree):
    """Attributes of other objects than self that a module assigns: (attribute, function)."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        (node.attr, function.name)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_sequence_py_alone_assigns_a_sequence():
    """Two fields are also assigned in the scheduler's loop over decoding sequences, for speed."""
    folder, found = Path(nv_engine.__file__).parent, set()
    for path in (folder / "engine.py", *(folder / "scheduling").glob("*.py")):
        if path.name != "sequence.py":
            pairs = assigned(ast.parse(path.read_text()))
            found |= {(path.name, *pair) for pair in pairs if pair[0] in Sequence.__slots__}
    assert found == {
        ("scheduler.py", "num_scheduled", "_decode"),
        ("scheduler.py", "last_step", "_decode"),
    }
