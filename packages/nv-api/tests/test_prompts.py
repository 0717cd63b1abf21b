from array import array
from collections import UserDict

import pytest
import torch
from nv_api.prompts import Prompt, TokenPrompt, prompt_list, tokenize


class Index:
    """An integer that is none of Python's, as numpy's are."""

    def __index__(self):
        return 7


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [Prompt("a", None)]),
        (["a", "b"], [Prompt("a", None), Prompt("b", None)]),
        ([1, 2], [Prompt(None, [1, 2])]),
        ((1, 2), [Prompt(None, [1, 2])]),
        ([[1, 2], [3]], [Prompt(None, [1, 2]), Prompt(None, [3])]),
        ([(1, 2)], [Prompt(None, [1, 2])]),
        ([Index()], [Prompt(None, [7])]),
        ({"prompt": "a"}, [Prompt("a", None)]),
        ([{"prompt_token_ids": [1]}, "b"], [Prompt(None, [1]), Prompt("b", None)]),
        (UserDict(prompt="a"), [Prompt("a", None)]),
        ({"prompt": "a", "multi_modal_data": None}, [Prompt("a", None)]),
        ({"prompt": "a", "cache_salt": "b"}, [Prompt("a", None, "b")]),
        ({"prompt_token_ids": [1], "cache_salt": "b"}, [Prompt(None, [1], "b")]),
        ({"prompt": "a", "cache_salt": None}, [Prompt("a", None)]),
        ([], []),
    ],
)
def test_every_spelling(prompts, expected):
    assert prompt_list(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "error", "match"),
    [
        ("", ValueError, "the prompt is empty"),
        (["a", ""], ValueError, "prompt 1 is empty"),
        ([[]], ValueError, "the prompt is empty"),
        ([[1], []], ValueError, "prompt 1 is empty"),
        (7, TypeError, "prompts is a int"),
        (None, TypeError, "prompts is a NoneType"),
        ([None], TypeError, "the prompt is a NoneType"),
        ([1, "a"], TypeError, "holds 'a' among its token ids"),
        (["a", 1], TypeError, "prompt 1 is a int"),
        ([[1, 2.5]], TypeError, r"holds 2\.5"),
        ([[True]], TypeError, "holds True"),
        ({}, ValueError, "without 'prompt'"),
        ({"prompt": 5}, TypeError, "the prompt has 5 as its 'prompt': it must be a str"),
        ({"prompt": 5, "prompt_token_ids": [1]}, TypeError, "has 5 as its 'prompt'"),
        ({"text": "a"}, ValueError, "unknown key 'text'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, NotImplementedError, "multi_modal"),
        (b"a", TypeError, "bytes"),
        (bytearray(b"a"), TypeError, "the prompt is a bytearray"),
        (torch.empty(2, device="meta"), TypeError, "prompts is a Tensor: it must be a str"),
        ([torch.eye(2).to_sparse()], TypeError, "the prompt is a Tensor: it must be a str"),
    ],
)
def test_what_is_no_prompt(prompts, error, match):
    with pytest.raises(error, match=match):
        prompt_list(prompts)


def test_an_array_of_ids_is_one_prompt():
    assert prompt_list([array("l", [1, 2])]) == [Prompt(None, [1, 2])]


def test_token_ids_need_no_tokenizer():
    """Whatever is asked for texts: special tokens are theirs alone."""
    made = tokenize([Prompt(None, [5, 6])], None, add_special_tokens=False)
    assert made == [TokenPrompt(None, [5, 6])]
