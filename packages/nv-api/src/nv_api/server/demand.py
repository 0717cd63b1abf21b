"""Demand: the form that the text of an answer must have.

Owns what response_format, forced calls and vLLM's structured_outputs mean as a form, this server's
limits of a schema, and the field that an error of the engine names. Never compiles a grammar.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nv_engine import StructuredOutputsParams
from nv_engine.values import shown

from nv_api.gbnf import to_lark
from nv_api.said import Place
from nv_api.said.forms import (
    ANY_OBJECT,
    MAX_SPACE,
    Form,
    Tags,
    calls_form,
    choice_form,
    either,
    grammar,
    json_form,
    lark_form,
    one_call_form,
    regex_form,
)
from nv_api.said.tool_calls import Dialect
from nv_api.server.errors import ApiError, invalid, unsupported
from nv_api.server.options import ServeOptions
from nv_api.server.parsers import Parsers
from nv_api.server.protocol.fields import Json, Sampling
from nv_api.server.schema_limits import check_depth, check_size
from nv_api.server.tools import Tools, check_strict
from nv_api.structured import fault


class Part(NamedTuple):
    """A field of a request that asks for a form."""

    field: str
    value: object
    form: Form
    """The form that the field alone asks for, for a model whose tags are plain text."""


@dataclass(frozen=True)
class Demand:
    """A form, and the fields that ask for it: at least one."""

    form: Form
    parts: tuple[Part, ...]

    def params(self, place: Place, tags: Tags) -> StructuredOutputsParams:
        """The form as the engine takes it.

        Args:
            place: where the text begins; a thought may come before the form.
            tags: the tokenizer's.

        Raises:
            ApiError: 400, it is larger than the engine compiles.
        """
        text = grammar(self.form, place, tags)
        try:
            return StructuredOutputsParams(grammar=text)
        except ValueError as error:
            reason = str(error).removeprefix("structured_outputs.grammar ")
            raise invalid(f"{self._name}, as a grammar, {reason}", self._name) from None

    async def explained(self, error: ApiError, sent: StructuredOutputsParams) -> ApiError:
        """The engine's error about a grammar that was sent, with the field that is wrong.

        Another error stays as it is.
        """
        start = f"structured_outputs.grammar is {shown(sent.grammar)}: "
        if not error.message.startswith(start):
            return error
        reason = error.message.removeprefix(start)
        for part in self.parts:
            own = await asyncio.to_thread(fault, grammar(part.form, Place.AFTER, Tags()))
            if own is not None:
                return invalid(f"{part.field} is {shown(part.value)}: {own}", part.field)
        return invalid(f"{self._name} cannot be compiled: {reason}", self._name)

    @property
    def _name(self) -> str:
        """The field of all parts."""
        first = self.parts[0].field
        return first if len(self.parts) == 1 else first.partition("[")[0]


def demand_of(
    asked: Sampling, tools: Tools, parsers: Parsers, options: ServeOptions
) -> Demand | None:
    """The form that response_format and the tools of a request ask for; None: they leave it free.

    Raises:
        ApiError: 400, a field is not a form, larger than this server compiles, or contradicts
            another.
    """
    answer = response_demand(asked, options)
    has_own = any(value is not None for value in (asked.structured_outputs or {}).values())
    if tools.is_forced:
        if has_own:
            raise invalid(
                "the request has structured_outputs and a tool_choice that forces a call: give one "
                "of them",
                "structured_outputs",
            )
        if parsers.dialect is None:
            raise unsupported(
                "tool_choice forces a call and this server has no parser of calls: start it with "
                "--tool-call-parser",
                "tool_choice",
            )
        return _calls(tools, parsers.dialect, parsers.tags, options)
    if parsers.dialect is None or not tools.functions or has_own:
        return answer
    if answer is not None:
        calls = _calls(tools, parsers.dialect, parsers.tags, options)
        return Demand(either(answer.form, calls.form), answer.parts + calls.parts)
    if not tools.is_single:
        return None
    parts = _parts(tools, parsers.dialect, options)
    return Demand(one_call_form(parsers.dialect, [*tools.functions.values()], parsers.tags), parts)


def response_demand(asked: Sampling, options: ServeOptions) -> Demand | None:
    """The form that response_format asks for.

    Raises:
        ApiError: 400, it is not a form, or larger than this server compiles.
    """
    given = asked.response_format
    if given is None or given.get("type") == "text":
        return None
    if any(value is not None for value in (asked.structured_outputs or {}).values()):
        raise invalid(
            "the request has response_format and structured_outputs: give one of them",
            "response_format",
        )
    schema = _schema(given)
    _checked_size("response_format", schema, options)
    form = json_form(schema)
    return Demand(form, (Part("response_format", schema, form),))


def own_demand(asked: StructuredOutputsParams) -> Demand:
    """The form of vLLM's structured_outputs, where it comes after a thought.

    Raises:
        ApiError: 400, a grammar of neither notation.
    """
    source = asked.source
    form = _own_form(asked)
    return Demand(form, (Part(f"structured_outputs.{source.kind}", source.text, form),))


def _own_form(asked: StructuredOutputsParams) -> Form:
    source = asked.source
    if source.kind in ("json", "json_object"):
        return json_form(json.loads(source.text), 0 if source.is_compact else MAX_SPACE)
    if source.kind == "regex":
        return regex_form(source.text)
    if source.kind == "choice":
        return choice_form(json.loads(source.text))
    try:
        return lark_form(to_lark(source.text))
    except ValueError as error:
        raise invalid(
            f"structured_outputs.grammar is {shown(source.text)}: {error}", "structured_outputs"
        ) from None


def _calls(tools: Tools, dialect: type[Dialect], tags: Tags, options: ServeOptions) -> Demand:
    """Calls and nothing else."""
    form = calls_form(
        dialect, [*tools.functions.values()], tags, num_calls="" if tools.is_single else "+"
    )
    return Demand(form, _parts(tools, dialect, options))


def _parts(tools: Tools, dialect: type[Dialect], options: ServeOptions) -> tuple[Part, ...]:
    """The fields of the functions' schemas.

    Raises:
        ApiError: 400, they are larger than this server compiles.
    """
    parts = []
    room = options.max_grammar_bytes
    for index, function in tools.functions.items():
        name = f"tools[{index}].function.parameters"
        schema = function.parameters or {}
        room -= _checked_size(name, schema, options)
        if room < 0:
            raise invalid(
                f"{name} and those before it are {options.max_grammar_bytes - room} bytes long: "
                f"this server takes at most {options.max_grammar_bytes}, so give smaller ones",
                name,
            )
        parts.append(Part(name, schema, calls_form(dialect, [function], Tags())))
    return tuple(parts)


def _checked_size(name: str, schema: Mapping[str, Any], options: ServeOptions) -> int:
    """The bytes of a schema; raises ApiError if it is too long or too deep."""
    check_depth(name, schema, options)
    return check_size(name, json.dumps(schema, ensure_ascii=False), options)


def _schema(given: Json) -> Mapping[str, Any]:
    """The schema of a response_format that is not text."""
    kind = given.get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise invalid(
            f"response_format.type is {shown(kind)}: it must be text, json_object or json_schema",
            "response_format.type",
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(named, dict) or not isinstance(schema, dict):
        raise invalid(
            f"response_format.json_schema is {shown(named)}: it must be an object whose `schema` "
            "is a JSON schema",
            "response_format.json_schema",
        )
    check_strict(named, "response_format.json_schema")
    return schema
