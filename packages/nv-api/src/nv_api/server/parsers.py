"""Parsers: what one server reads in the texts of its model.

Owns which parsers there are: those of the options, or those that the chat template asks for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nv_api.prompts import TokenPrompt
from nv_api.request import Request
from nv_api.said import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    Function,
    Place,
    Speech,
    ToolCalls,
    reasoning_parser,
    tool_call_parser,
)
from nv_api.said.forms import Tags
from nv_api.said.qwen3 import Qwen3Thoughts
from nv_api.said.tool_calls import Dialect
from nv_api.server.options import OFF, ServeOptions
from nv_api.server.thought_tokens import ThoughtTokens
from nv_api.tokenizer import Tokenizer


@dataclass(frozen=True)
class Parsers:
    """The parsers of one model.

    Attributes:
        thoughts: None: the model does not reason, or its thoughts are content.
        dialect: of its calls; None: it calls no functions.
        tags: of its tokenizer.
        token_text: returns a token's own text; None: without a tokenizer.
    """

    thoughts: type[Qwen3Thoughts] | None
    dialect: type[Dialect] | None
    tags: Tags
    token_text: Callable[[int], str] | None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, options: ServeOptions) -> "Parsers":
        """Those of a model that is loaded."""
        template = options.chat_template or _template(tokenizer)
        thoughts, calls = options.reasoning_parser, options.tool_call_parser
        return cls(
            None if thoughts == OFF else reasoning_parser(thoughts, template),
            None if calls == OFF else tool_call_parser(calls, template),
            Tags(() if tokenizer is None else tokenizer.backend.get_added_vocab()),
            None if tokenizer is None else tokenizer.token_text,
        )

    def __str__(self) -> str:
        """For the log: the names of the parsers."""
        thoughts = _name(REASONING_PARSERS, self.thoughts)
        return f"thoughts {thoughts}, tool calls {_name(TOOL_CALL_PARSERS, self.dialect)}"

    def placed(self, prompt: TokenPrompt) -> TokenPrompt:
        """A rendered conversation, with the place where its answer begins."""
        if self.thoughts is None:
            return prompt
        return prompt._replace(place=self.thoughts.place_after(prompt.text or ""))

    def thought_tokens(self, request: Request) -> list[ThoughtTokens]:
        """Counters of the completions of a prompt that has its place; [] if they cannot think."""
        place = request.prompt.place
        if self.token_text is None or place in (None, Place.AFTER):
            return []
        return [ThoughtTokens(place, self.token_text) for _ in request.completions]

    def speech(self, prompt: TokenPrompt, calls: ToolCalls | None) -> Speech:
        """A reader of one answer to a prompt that has its place, with a reader of its calls."""
        thoughts = None
        if self.thoughts is not None and prompt.place not in (None, Place.AFTER):
            thoughts = self.thoughts(prompt.place)
        return Speech(thoughts, calls)

    def calls(self, functions: Sequence[Function], *, is_forced: bool) -> ToolCalls | None:
        """A reader of the calls of one answer; None: tags of calls are content.

        Args:
            functions: those that the answer may call.
            is_forced: the answer is calls and nothing else.
        """
        if self.dialect is None or not functions:
            return None
        return ToolCalls(self.dialect, functions, is_forced=is_forced)


def _name(parsers: Mapping[str, object], parser: object) -> str:
    """The name of a parser."""
    return next((name for name, each in parsers.items() if each is parser), OFF)


def _template(tokenizer: Tokenizer | None) -> str | None:
    """The chat template; of several by name, all of them."""
    found = None if tokenizer is None else tokenizer.backend.chat_template
    return "\n".join(found.values()) if isinstance(found, dict) else found
