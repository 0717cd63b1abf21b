"""openai's client: embeddings, as numbers and in base64, with fewer dimensions, and an error."""

import openai
import pytest

MORE_OPTIONS = ["--runner=pooling"]
TEXTS = ["Say ab.", "The sea is wide.", "x"]


@pytest.fixture(scope="module")
def create(served):
    with openai.OpenAI(base_url=served.v1, api_key=served.key, max_retries=0) as client:
        yield lambda given, **fields: client.embeddings.create(
            model=served.model, input=given, **fields
        )


def test_base64_which_the_client_asks_for_by_default_is_the_numbers(create):
    numbers, coded = create(TEXTS, encoding_format="float"), create(TEXTS)
    assert [each.embedding for each in coded.data] == [each.embedding for each in numbers.data]
    assert [each.index for each in coded.data] == [0, 1, 2]
    assert {each.object for each in coded.data} == {"embedding"}
    for each in coded.data:
        assert len(each.embedding) == 64
        assert abs(sum(value * value for value in each.embedding) - 1) < 1e-4


def test_dimensions_ids_and_usage(create, served):
    answer = create([[5, 6, 7], [8]], dimensions=3, user="me")
    assert [len(each.embedding) for each in answer.data] == [3, 3]
    assert answer.model == served.model
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4


def test_an_error_names_the_field(create):
    with pytest.raises(openai.BadRequestError) as raised:
        create("a", dimensions=1000)
    assert raised.value.param == "dimensions"
