"""Conversations: messages in, the prompt of the checkpoint's chat template out.

Owns how messages are checked, put into the form that the template reads, and rendered; the
template itself is the tokenizer's.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2 import TemplateError
from nv_engine.user_line import warn_user
from nv_engine.values import boolean, one_of, shown

from nv_api.bounded_template import rendered
from nv_api.chat_losses import unread
from nv_api.content import checked_content, in_form
from nv_api.continuation import continued
from nv_api.probe import TEMPLATE_ERRORS, form_of
from nv_api.prompts import TokenPrompt, check_length, checked_text
from nv_api.template import ContentForm
from nv_api.tokenizer import Tokenizer, existing
from nv_api.tool_calls import parsed_calls, parsed_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]

CONTENT_FORMATS = ("auto", "string", "openai")

FORMS = "a list of {'role': …, 'content': …} dicts, or a list of such lists"


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt; names as `LLM.chat`.

    Raises:
        ValueError: a prompt that both opens a new message and continues the last one, or a flag
            that is not True or False.
        TypeError: a field of another type.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"

    def __post_init__(self) -> None:
        for name in "add_generation_prompt", "continue_final_message":
            boolean(name, getattr(self, name))
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "continue_final_message=True continues the last message and "
                "add_generation_prompt=True opens a new one: pass add_generation_prompt=False"
            )
        if not isinstance(self.chat_template, str | None):
            raise TypeError(
                f"chat_template is {shown(self.chat_template)}: it must be a Jinja template"
            )
        if not isinstance(self.chat_template_kwargs, Mapping | None):
            raise TypeError(
                f"chat_template_kwargs is {shown(self.chat_template_kwargs)}: it must be a dict"
            )
        form = self.chat_template_content_format
        one_of("chat_template_content_format", form, CONTENT_FORMATS)
        tools = () if self.tools is None else self.tools
        if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
            raise TypeError(
                f"tools is {shown(tools)}: it must be a list of JSON schemas, each a dict"
            )

    def content_form_of(self, template: str) -> ContentForm:
        """The form of content that a template gets: the requested one, or the one that it reads."""
        if self.chat_template_content_format != "auto":
            return self.chat_template_content_format
        return form_of(template)


def conversation_list(messages: object) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of conversations.

    Raises:
        TypeError: a value that is not a conversation, or not a message.
        ValueError: an empty conversation, a message without a role or a content, or a tool call
            whose arguments are not a JSON object.
        NotImplementedError: a content that is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        hint = ": put the message in a list" if isinstance(messages, Mapping) else ""
        raise TypeError(f"messages is a {type(messages).__name__}: it must be {FORMS}{hint}")
    single = bool(messages) and isinstance(messages[0], Mapping)
    conversations = [messages] if single else messages
    return [
        [
            _message(message, f"message {i}" if single else f"conversation {number}, message {i}")
            for i, message in enumerate(_conversation(conversation))
        ]
        for number, conversation in enumerate(conversations)
    ]


def chat_prompt(
    tokenizer: Tokenizer | None,
    conversation: list[dict[str, Any]],
    rendering: Rendering,
    max_model_len: int | None = None,
) -> TokenPrompt:
    """The prompt that the chat template makes of a conversation of `conversation_list`.

    Args:
        tokenizer: has the template.
        conversation: its messages.
        rendering: how they become a prompt.
        max_model_len: as of `check_length`.

    Raises:
        ValueError: there is no tokenizer, it has no chat template and none was given, the template
            refuses the conversation or does not end with the message to continue, or
            `chat_template_kwargs` has a name that is not a variable of the template.
        PromptTooLong: as `check_length`.
    """
    tokenizer = existing(tokenizer)
    text = checked_text(_render(tokenizer.backend, conversation, rendering), "the prompt")
    check_length(text, tokenizer, max_model_len)
    (token_ids,) = tokenizer.encode([text], add_special_tokens=False)
    return TokenPrompt(text, token_ids)


def check_read(
    tokenizer: Tokenizer | None,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    rendering: Rendering,
) -> None:
    """Check that the chat template reads the tools of a call and the calls of its messages.

    Args:
        tokenizer: has the template.
        conversations: of `conversation_list`.
        rendering: has the tools.

    Warns:
        UserWarning: it does not. Other faults are reported when it is rendered.
    """
    given = ["tools"] if rendering.tools else []
    messages = itertools.chain.from_iterable(conversations)
    given += ["tool_calls"] if any("tool_calls" in message for message in messages) else []
    template = rendering.chat_template
    if tokenizer is None or not given or not (template or tokenizer.backend.chat_template):
        return
    with _template_errors():
        template = tokenizer.backend.get_chat_template(template, [*(rendering.tools or ())] or None)
    for name in unread(template, given):
        warn_user(
            f"there are {name}, and the chat template does not read {name}, so that the model does "
            "not see them: pass a chat_template that prints them, or put them into a message"
        )


def _render(
    backend: "PreTrainedTokenizerBase", conversation: list[dict[str, Any]], rendering: Rendering
) -> str:
    """The prompt's text."""
    if rendering.chat_template is None and not backend.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: pass chat_template=…, or use generate with text"
        )
    _check_names(backend, rendering.chat_template_kwargs or {})
    tools: list[Any] | None = None if rendering.tools is None else [*rendering.tools]
    with _template_errors():
        template = backend.get_chat_template(rendering.chat_template, tools)
        form = rendering.content_form_of(template)
    if "{{" not in template and "{%" not in template:
        raise ValueError(
            f"chat_template is {shown(template)}: a Jinja template has {{{{ or {{%, and this text "
            "would be the prompt of every conversation; of a file, pass the text"
        )
    shaped = [{**each, "content": in_form(each["content"], form)} for each in conversation]

    variables = {
        "tools": tools,
        "documents": None,
        "add_generation_prompt": rendering.add_generation_prompt,
        **backend.special_tokens_map,
        **(rendering.chat_template_kwargs or {}),
    }

    def apply(messages: list[dict[str, Any]]) -> str:
        with _template_errors():
            return rendered(template, {"messages": messages, **variables})

    return continued(shaped, apply) if rendering.continue_final_message else apply(shaped)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raise a ValueError that names the template in place of its errors."""
    try:
        yield
    except TemplateError as error:
        raise ValueError(f"the chat template does not take the conversation: {error}") from error
    except TEMPLATE_ERRORS as error:
        raise ValueError(
            f"the chat template failed on these messages ({type(error).__name__}: {error}): "
            "correct it, or pass another as chat_template=…"
        ) from error


def _check_names(backend: "PreTrainedTokenizerBase", given: Mapping[str, Any]) -> None:
    """Check that `chat_template_kwargs` has no argument of transformers' renderer.

    Raises:
        ValueError: a name that is one.
        TypeError: documents of another type.
    """
    taken = {"messages", *inspect.signature(backend.apply_chat_template).parameters} - {"documents"}
    for name in given:
        if not isinstance(name, str) or name in taken:
            raise ValueError(
                f"chat_template_kwargs has {shown(name)}, which is not a variable of the template: "
                "remove it, or pass it to chat itself if that has it"
            )
    documents = given.get("documents") or []
    if not isinstance(documents, list | tuple) or not all(isinstance(d, dict) for d in documents):
        raise TypeError(
            f"chat_template_kwargs has the documents {shown(documents)}: they must be a list of "
            "dicts, such as {'title': …, 'text': …}"
        )


def _conversation(conversation: object) -> Sequence[Any]:
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
        raise TypeError(f"messages holds a {type(conversation).__name__}: it must be {FORMS}")
    if not conversation:
        raise ValueError("a conversation is empty: give at least one message")
    return conversation


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message is a {type(message).__name__}: it must be a dict with 'role' and 'content'"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        found = f"the role {shown(role)}" if "role" in message else "no 'role'"
        raise ValueError(
            f"the message {shown(dict(message))} has {found}: give one, such as 'user'"
        )
    called = _called(message, name)
    if content is None and called:
        content = ()  # as OpenAI: tool calls may replace the content
    if content is None:
        raise ValueError(f"the message {shown(dict(message))} has no 'content': give it a text")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": checked_content(content), **called}


def _called(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tool calls of a message, parsed; an empty list is omitted, as in vLLM."""
    called: dict[str, Any] = {}
    if (calls := message.get("tool_calls")) is not None and (
        parsed := parsed_calls(calls, f"{name}: tool_calls")
    ):
        called["tool_calls"] = parsed
    if (call := message.get("function_call")) is not None:
        called["function_call"] = parsed_function(call, f"{name}: function_call")
    return called
