"""litellm: chat, a stream, text, errors."""

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Say ab."}]


@pytest.fixture
def fields(served):
    return {
        "api_base": served.v1,
        "api_key": served.key,
        "model": f"openai/{served.model}",
        "temperature": 0,
        "max_tokens": 16,
    }


def test_chat_and_its_stream(fields):
    answer = litellm.completion(messages=MESSAGES, **fields)
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(messages=MESSAGES, stream=True, **fields)
    ]
    assert answer.usage.completion_tokens <= 16
    assert answer.choices[0].message.content
    assert "".join(pieces) == answer.choices[0].message.content


def test_text(fields):
    model = fields["model"].replace("openai/", "text-completion-openai/")
    answer = litellm.text_completion(**{**fields, "model": model}, prompt="Say ab.")
    assert answer.choices[0].text


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"api_key": "sk-wrong"}, litellm.AuthenticationError),
        ({"model": "openai/gpt-none"}, litellm.NotFoundError),
        ({"temperature": -1}, litellm.BadRequestError),
        (
            {"messages": [{"role": "user", "content": "a" * 1100}]},
            litellm.ContextWindowExceededError,
        ),
    ],
)
def test_errors(fields, wrong, error):
    with pytest.raises(error):
        litellm.completion(**{"messages": MESSAGES, **fields, "num_retries": 0, **wrong})
