"""RowTokens: each completion gets the tokens of its row, once."""

from nv_api.completion import Completion
from nv_api.prompts import TokenPrompt
from nv_api.request import Request
from nv_api.row_tokens import RowTokens
from nv_engine import SamplingParams


def request(number, **params):
    own = SamplingParams(**params)
    completions = tuple(Completion(index, own, None) for index in range(own.n))
    return Request(number, TokenPrompt([1], None), completions)


def test_tokens_go_to_the_completions_of_their_rows():
    first, second = request(3, n=2), request(5)
    rows = RowTokens([(second, 0), (None, 0), (first, 1), (first, 0)])
    assert rows.request_ids == (5, 3)
    assert rows.take([[10, 11, 12, 13], [20, 21, 22, 23]], ()) == []
    assert second.completions[0].token_ids == [10, 20]
    assert [each.token_ids for each in first.completions] == [[13, 23], [12, 22]]


def test_a_completion_that_has_ended_or_has_an_update_is_passed_over():
    ended, updated, other = (request(number) for number in range(3))
    ended.abort()
    rows = RowTokens([(ended, 0), (updated, 0), (other, 0)])
    rows.take([[7, 8, 9]], {updated.completions[0], None})
    assert [each.completions[0].token_ids for each in (ended, updated, other)] == [[], [], [9]]


def test_a_text_that_is_searched_gets_an_update():
    searched = request(4, n=2, logprobs=0)
    rows = RowTokens([(searched, 0), (searched, 1)])
    (update,) = rows.take([[7, 8], [9, 10]], {searched.completions[0]})
    assert (update.request_id, update.index, update.token_ids) == (4, 1, (8, 10))
    assert update.finish_reason is None
    assert searched.completions[1].token_ids == []
