"""Regular expressions of configs: which are taken, and which could hold everything up."""

import pytest
from nv_models.quantization.expression import check_expression, most_steps
from nv_models.quantization.ignored import is_ignored

USUAL = (
    "q_proj", r".*\.q_proj", "^.*(q|k)_proj$", r"model\.layers\.(0|1|2)\..*", r"(model\.)?layers.*",
    r".*\.(?:mtp|visual).*", "^(?!.*visual)(?=.*layers).*", r"layers\.[0-9]{1,2}\.", r"(a\.)*x",
    "[(*+]{1,3}", r"\(\*\+", "x{}", "a|b|c", ".*?x", ".*+x", "[]()+*]", "(?P<a>.*)b",
)  # fmt: skip
COSTLY = (
    "([a-z.]+)+X", "((.+)+)+", "(a|a)*!", "(.*){50}Z", "(?:(?:.?){60}){60}", ".?" * 40, ".*" * 6,
    "(x+x+)+y", "(?:.|[a-z])+!", "(.*)*", "(a{1,60}){2,}",
)  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_16_usual_expressions_are_taken(pattern):
    check_expression(pattern, "ignore")


@pytest.mark.parametrize("pattern", COSTLY)
def test_16_an_expression_whose_match_could_take_for_ever_is_refused(pattern):
    with pytest.raises(ValueError, match=r"^ignore has .* could take for ever: write it with"):
        check_expression(pattern, "ignore")
    with pytest.raises(ValueError, match=r"^the list of modules in floats has .* for ever"):
        is_ignored("model.layers.0.mlp.gate_proj", [pattern])


@pytest.mark.parametrize("pattern", ["(" * 3000 + ")" * 3000, "a{99999999999999}"])
def test_a_pattern_that_cannot_be_compiled_matches_whole_parts_alone(pattern):
    assert not is_ignored("lm_head", [pattern])
    assert is_ignored("lm_head", [pattern, "lm_head"])


@pytest.mark.parametrize("pattern", ["layers.1", "layers.1.", ".layers.1.", "model.layers.1."])
def test_dots_at_the_ends_of_parts_do_not_count(pattern):
    assert is_ignored("model.layers.1.mlp.up_proj", [pattern])
    assert not is_ignored("model.layers.10.mlp.up_proj", [pattern])
    assert not is_ignored("model.layers.1.mlp.up_proj", [".", ""])


def test_16_a_long_expression_is_refused():
    with pytest.raises(ValueError, match="of 65537 characters: it must have at most 65536"):
        check_expression("a" * (2**16 + 1), "dynamic")


def test_steps_grow_with_choices_and_repetitions():
    assert most_steps("(a|b)(c|d|e)x?") == 2 * 3 * 2
    assert most_steps("a{2,4}") == 3
