"""llama-index: chat, text, and their streams."""

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture(params=[True, False], ids=["chat", "text"])
def llm(served, request):
    return OpenAILike(
        model=served.model,
        api_base=served.v1,
        api_key=served.key,
        context_window=1024,
        is_chat_model=request.param,
        temperature=0,
        max_tokens=16,
        max_retries=0,
    )


def test_complete(llm):
    plain = llm.complete("Say ab.").text
    assert plain
    assert "".join(piece.delta for piece in llm.stream_complete("Say ab.")) == plain


def test_chat(llm):
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="Say ab.")]
    plain = llm.chat(messages).message.content
    assert plain
    assert "".join(piece.delta or "" for piece in llm.stream_chat(messages)) == plain
