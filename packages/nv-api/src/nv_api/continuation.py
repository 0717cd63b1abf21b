"""Continuation: the prompt that ends inside the last message, which the model continues.

Owns where a rendered conversation is cut. A mark is put after the last message's text; the text
that the template prints after the mark is then removed from the conversation rendered without it.
So whitespace that the template trims stays trimmed, and the mark is never in a prompt.
"""

from collections.abc import Callable
from typing import Any

from nv_engine.values import shown

from nv_api.content import Content, Parts

Messages = list[dict[str, Any]]
ADVICE = "pass another chat_template, or leave continue_final_message out"


def continued(messages: Messages, render: Callable[[Messages], str]) -> str:
    """The prompt of a conversation up to the end of its last message's text.

    Args:
        messages: the conversation, in the form that the template reads.
        render: returns a conversation's text.

    Raises:
        ValueError: the last message has tool calls, which come after its text; or the template
            does not print its text exactly once, unchanged and last.
    """
    *before, last = messages
    if "tool_calls" in last or "function_call" in last:
        raise ValueError(
            "continue_final_message continues a text, and the last message ends with calls of "
            "tools: remove them, or pass add_generation_prompt=True instead"
        )
    whole = render(messages)
    mark = _mark_unlike(whole)
    marked = render([*before, {**last, "content": _marked(last["content"], mark)}])
    if marked.count(mark) != 1:
        raise ValueError(
            f"the chat template prints the last message {marked.count(mark)} times, so "
            f"continue_final_message cannot find its end: {ADVICE}"
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
            f"the chat template changes the last message, {shown(text)}, so continue_final_message "
            f"cannot continue it: {ADVICE}"
        )
    return prompt


def _mark_unlike(text: str) -> str:
    """A word that is not in a text, of both cases and digits, so that every filter changes it."""
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
