"""Forms: grammars that force a form on a completion: JSON, calls of functions, or a user's own.

Owns their text, in llguidance's Lark. A form may come after the model's thoughts, which are free.
Calls are written in the model's own dialect, so the parsers read them as any other calls. Never
compiles a grammar.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from nv_engine.values import shown

from nv_api.said.functions import Function
from nv_api.said.hermes import HermesCall
from nv_api.said.qwen3_coder import Qwen3CoderCall
from nv_api.said.scope import CLOSE as THOUGHT_CLOSES
from nv_api.said.scope import OPEN as THOUGHT_OPENS
from nv_api.said.scope import Place
from nv_api.said.tool_calls import CLOSE, OPEN, Dialect

MAX_SPACE = 8
"""White space characters in a row, between the tokens of JSON and after a thought."""
_OF_PATTERN = re.compile(r"\\?.", re.DOTALL)
"""A character of a regular expression, with the backslash before it."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Form(NamedTuple):
    """A form: Lark rules, of which the first describes the whole form."""

    name: str
    """Of the first rule."""
    rules: tuple[str, ...]


def json_form(schema: Mapping[str, Any] = ANY_OBJECT, max_space: int = MAX_SPACE) -> Form:
    """JSON that fits a schema; without one, any object.

    Args:
        schema: of the JSON.
        max_space: most white space characters in a row.
    """
    return Form("json", (f"json: {_json(schema, is_lenient=False, max_space=max_space)}",))


def spacing(max_space: int) -> dict[str, Any]:
    """Options of llguidance for JSON with at most so many white space characters in a row."""
    if not max_space:
        return {"whitespace_flexible": False}
    pattern = rf"[\x20\x0A\x0D\x09]{{1,{max_space}}}"
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def regex_form(pattern: str) -> Form:
    """A text that a regular expression matches from end to end."""
    return Form("text", (f"text: {_pattern(pattern)}",))


def choice_form(texts: Sequence[str]) -> Form:
    """One of some texts, none of them empty."""
    return Form("choice", ("choice: CHOICE", f"CHOICE: {' | '.join(map(_text, texts))}"))


def lark_form(lark: str) -> Form:
    """A text that fits a whole grammar in Lark, which begins at its own `start`."""
    return Form("inner", (f"inner: %lark {{\n{lark}\n}}",))


def either(first: Form, second: Form) -> Form:
    """One of two forms whose rules have different names."""
    return Form("either", (f"either: {first.name} | {second.name}", *first.rules, *second.rules))


def calls_form(
    dialect: type[Dialect],
    functions: Sequence[Function],
    tags: "Tags",
    *,
    num_calls: str = "+",
) -> Form:
    """Calls of functions, and nothing else.

    Args:
        dialect: the model's.
        functions: those that may be called, at least one.
        tags: the tokenizer's.
        num_calls: "+" for one or more, "" for exactly one (`parallel_tool_calls: false`, or a
            function that the request names).
    """
    rules = _calls(dialect, functions, tags)
    more = ' ("\\n" one)*' if num_calls else ""
    return Form("calls", (f"calls: one{more}", f"one: {tags.lark(OPEN)} call", *rules))


def one_call_form(dialect: type[Dialect], functions: Sequence[Function], tags: "Tags") -> Form:
    """Free text with at most one call, at its end (`parallel_tool_calls: false`, choice "auto")."""
    opening, rules = tags.up_to(OPEN, "opening_call")
    any_opening = f"(?s:.*){_regex(OPEN)}(?s:.*)"
    return Form(
        "answer",
        (
            f"answer: FREE | {opening} call",
            f"FREE: /(?s:.*)/ & ~/{any_opening}/",
            *rules,
            *_calls(dialect, functions, tags),
        ),
    )


def _calls(dialect: type[Dialect], functions: Sequence[Function], tags: "Tags") -> list[str]:
    """The rule `call`, a call of one of some functions after its opening tag, and more rules."""
    write = _WRITERS[dialect]
    assert functions
    rules = [f"call: {' | '.join(f'f{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        body, more = write(function, f"f{index}")
        rules += [f'f{index}: "\\n" {body} {tags.lark(CLOSE)}', *more]
    return rules


def grammar(form: Form, place: Place, tags: "Tags") -> str:
    """A form as a grammar, for `StructuredOutputsParams(grammar=…)`.

    Args:
        form: the form.
        place: where the text begins. A thought that the prompt left open comes before the form; one
            that may begin is optional.
        tags: the tokenizer's.
    """
    start = {
        Place.BEFORE: f"(opening thought)? {form.name}",
        Place.OPENED: f"thought {form.name}",
        Place.INSIDE: f"thought {form.name}",
        Place.AFTER: form.name,
    }[place]
    lines = ["%llguidance {}", f"start: {start}"]
    if place is not Place.AFTER:
        lines += tags.thought_rules()
    return "\n".join([*lines, *form.rules, ""])


class Tags:
    """The tags of a model: each is one token of its tokenizer, or plain text.

    Args:
        tokens: the texts of the tokenizer's added tokens. llguidance takes one of the shape `<…>`
            for a token that plain text never matches.
    """

    def __init__(self, tokens: Collection[str] = ()) -> None:
        self._tokens = frozenset(tokens)

    def lark(self, tag: str) -> str:
        """A tag in a Lark rule."""
        return tag if tag in self._tokens else _text(tag)

    def up_to(self, tag: str, name: str) -> tuple[str, list[str]]:
        """Free text that ends with the first copy of a tag.

        Args:
            tag: the tag; other tokens may spell it also where it is a token.
            name: of the rule.

        Returns:
            An expression, and its rules.
        """
        rules = [f"{name}[lazy]: /(?s:.*){_regex(tag)}/"]
        if tag not in self._tokens:
            return name, rules
        text = f"{name.upper()}_TEXT"
        return f"({text} {tag} | {name})", [*rules, f"{text}: /(?s:.*)/"]

    def thought_rules(self) -> list[str]:
        """The rules `opening` of the tag that opens a thought, and `thought` of what follows."""
        thought, rules = self.up_to(THOUGHT_CLOSES, "free_thought")
        return [
            f"opening: /\\s{{0,{MAX_SPACE}}}/ {self.lark(THOUGHT_OPENS)}",
            f"thought: {thought} /\\n{{0,{MAX_SPACE}}}/",  # parsers drop these, and no other space
            *rules,
        ]


def _hermes(function: Function, name: str) -> tuple[str, list[str]]:
    """`{"name": …, "arguments": …}` and a newline."""
    schema = function.parameters or _NO_ARGUMENTS
    head = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": '
    tail = "}\n"
    rule = f"{name}_arguments: {_json(schema, is_lenient=True)}"
    return f"{_text(head)} {name}_arguments {_text(tail)}", [rule]


def _qwen3_coder(function: Function, name: str) -> tuple[str, list[str]]:
    """`<function=…>`, its parameters in the order of the schema, `</function>` and a newline."""
    items: list[str] = []
    rules: list[str] = []
    for index, key in enumerate(function.properties):
        rule = f"{name}_p{index}"
        items.append(rule if key in function.required else f"{rule}?")
        rules += _parameter(function, key, rule)
    head, tail = f"<function={function.name}>\n", "</function>\n"
    return " ".join([_text(head), *items, _text(tail)]), rules


def _parameter(function: Function, key: str, rule: str) -> list[str]:
    """The rules of a parameter: its tags, and a value of its type."""
    head, tail = _text(f"<parameter={key}>\n"), "\n</parameter>\n"
    texts = function.texts(key)
    if texts is not None:
        return [f"{rule}: {head} ({' | '.join(map(_text, texts))}) {_text(tail)}"]
    if "string" in function.types(key):
        value = f"{rule}_value[lazy]: /(?s:.*){_regex(tail)}/"
        return [f"{rule}: {head} {rule}_value", value]
    schema = dict(function.properties[key])
    root = function.parameters or {}
    schema |= {name: root[name] for name in ("$defs", "definitions") if name in root}
    value = f"{rule}_value: {_json(schema, is_lenient=True)}"
    return [f"{rule}: {head} {rule}_value {_text(tail)}", value]


def _json(schema: Mapping[str, Any], *, is_lenient: bool, max_space: int = MAX_SPACE) -> str:
    """A schema in a Lark rule.

    Lenient, it ignores what llguidance cannot check: a function's schema describes the arguments,
    while that of an answer is a promise.
    """
    options = {**spacing(max_space), "lenient": is_lenient}
    try:
        text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a schema is {shown(schema)}, which is not JSON: {error}") from None
    return f"%json {text}"


def _text(text: str) -> str:
    """A text in a Lark rule."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """A text in a regular expression of Lark, which ends at a slash."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _pattern(pattern: str) -> str:
    """A user's regular expression in Lark, where it stands between slashes on one line."""
    return f"/{_OF_PATTERN.sub(_on_one_line, pattern)}/" if pattern else '""'


def _on_one_line(found: re.Match[str]) -> str:
    """A character of a pattern; a slash or the end of a line as its number."""
    char = found[0].removeprefix("\\")
    return f"\\x{{{ord(char):x}}}" if char in ("/", "\n", "\r") else found[0]


_WRITERS: dict[type[Dialect], Callable[[Function, str], tuple[str, list[str]]]] = {
    HermesCall: _hermes,
    Qwen3CoderCall: _qwen3_coder,
}
"""How a call is written in each dialect: for a function and the name of its rule, the call between
the newline after its opening tag and its closing tag, and more rules."""
