"""Continuation: the prompt that ends inside the last message, for the model to go on with it.

Owns where a rendered conversation is cut. A mark after the last message's text shows what the
template puts after it, and that is taken off the conversation rendered without the mark. So what
the template trims is trimmed, and the mark is never in a prompt.
"""

from collections.abc import Callable
from typing import Any

from nv_api.content import Content, Parts

Messages = list[dict[str, Any]]
ADVICE = "pass another chat_template, or leave continue_final_message out"


def continued(messages: Messages, render: Callable[[Messages], str]) -> str:
    """The prompt of a conversation up to the end of its last message's text.

    Args:
        messages: the conversation, in the form that the template reads.
        render: makes a conversation's whole text.

    Raises:
        ValueError: the last message has calls, which come after its text, or its text is not once,
            whole and last in what the template makes of it.
    """
    *before, last = messages
    if "tool_calls" in last or "function_call" in last:
        raise ValueError(
            "continue_final_message goes on with a text, and the last message ends with calls of "
            "tools: take them out, or pass add_generation_prompt=True instead"
        )
    whole = render(messages)
    mark = _mark_unlike(whole)
    marked = render([*before, {**last, "content": _marked(last["content"], mark)}])
    if marked.count(mark) != 1:
        raise ValueError(
            f"the chat template prints the last message {marked.count(mark)} times, so "
            f"continue_final_message cannot tell where it ends: {ADVICE}"
        )
    start, end = marked.split(mark)
    text, prompt = _last_text(last["content"]), whole.removesuffix(end)
    trimmed = start.removeprefix(prompt)
    if (
        not whole.endswith(end)
        or start != prompt + trimmed
        or trimmed.strip()
        or not text.endswith(trimmed)
        or not prompt.rstrip().endswith(text.strip())
    ):
        raise ValueError(
            f"the chat template changes the last message, {text!r}, so continue_final_message "
            f"cannot go on with it: {ADVICE}"
        )
    return prompt


def _mark_unlike(text: str) -> str:
    """A word that a text has not; letters of both cases and digits, so that no filter spares it."""
    mark = "EndOfMessage1"
    while mark in text:
        mark += "0"
    return mark


def _marked(content: Content, mark: str) -> Content:
    """The content with a mark after its last text."""
    if isinstance(content, str):
        return content + mark
    return Parts([*content[:-1], {"type": "text", "text": _last_text(content) + mark}])


def _last_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return content[-1]["text"] if content else ""
