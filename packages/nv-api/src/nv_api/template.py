"""Template: the form of content that a chat template reads, found in its syntax tree.

Owns this decision (vLLM's `chat_template_content_format`). Never renders a template.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Literal, TypeAlias

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

ContentForm: TypeAlias = Literal["string", "openai", "either"]
"""The form of a message's content: a text, a list of parts, or the one that the user gave."""

NUM_TEMPLATES = 32
"""Templates whose form is cached, with their texts."""

MESSAGES, MESSAGE, CONTENT, PART = "messages", "message", "content", "part"
"""Kinds of values that an expression of a template may have."""
Kinds: TypeAlias = frozenset[str]
NONE: Kinds = frozenset()

OF_ITEMS = {"groupby", "map", "rejectattr", "selectattr"}
"""Filters that read attributes of a list's items."""
OF_ONE_ITEM = {"first", "last"}
"""Filters that return one item of a list."""
OF_PARTS = {"text", "type"}
"""Attributes that a part has, and a text does not have."""


@lru_cache(NUM_TEMPLATES)
def content_form(template: str) -> ContentForm:
    """The form of content that a chat template reads.

    "openai": somewhere it loops over a message's content as a list of parts, and a text may come
    there. "either": it does so only after it has tested that the content is not a string.
    "string": no such place was found. vLLM decides in the same way, without "either".

    A template with a syntax error reads "string": rendering it reports the error.
    """
    try:
        tree = _environment().parse(template)
    except TemplateSyntaxError:
        return "string"
    readers = [*_Readers(tree).guards()]
    if not readers:
        return "string"
    return "either" if all(readers) else "openai"


class _Generation(Extension):
    """The block {% generation %} of transformers, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> Environment:
    return Environment(extensions=[loopcontrols, _Generation])


class _Readers:
    """The places of a template that read a message's content as parts.

    Names are followed through assignments, loops and macros in the whole template: a name that
    holds a content at one place counts as a content at every place.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._names: defaultdict[str, set[str]] = defaultdict(set, {"messages": {MESSAGES}})
        while self._follow():
            pass

    def guards(self) -> Iterator[bool]:
        """For each such place, whether it is reached only if the content is not a string."""
        return self._guards(self._tree, guarded=False)

    def _follow(self) -> bool:
        """Add the kinds that are assigned to names; True if that added a kind."""
        before = sum(map(len, self._names.values()))
        for block in self._tree.find_all(nodes.With):
            for target, value in zip(block.targets, block.values, strict=True):
                self._assign(target, value)
        for assign in self._tree.find_all(nodes.Assign):
            self._assign(assign.target, assign.node)
            if isinstance(assign.node, nodes.Call):  # of namespace(…)
                for pair in assign.node.kwargs:
                    self._names[f"{_name_of(assign.target)}.{pair.key}"] |= self._kinds(pair.value)
        for loop in self._tree.find_all(nodes.For):
            self._name(loop.target, _items(self._kinds(loop.iter)))
        for macro in self._tree.find_all(nodes.Macro):
            for call in self._tree.find_all(nodes.Call):
                if _name_of(call.node) == macro.name:
                    self._pass(macro, call)
        return sum(map(len, self._names.values())) > before

    def _pass(self, macro: nodes.Macro, call: nodes.Call) -> None:
        """Add the kinds that a call passes to a macro's arguments."""
        for argument, value in zip(macro.args, call.args, strict=False):
            self._name(argument, self._kinds(value))
        for pair in call.kwargs:
            self._names[pair.key] |= self._kinds(pair.value)

    def _assign(self, target: nodes.Node, value: nodes.Node) -> None:
        match target, value:
            case nodes.Tuple(items=targets), nodes.Tuple(items=values):
                for each, its_value in zip(targets, values, strict=False):
                    self._assign(each, its_value)
            case _:
                self._name(target, self._kinds(value))

    def _name(self, target: nodes.Node, kinds: Kinds) -> None:
        if kinds:
            self._names[_name_of(target)] |= kinds

    def _kinds(self, node: nodes.Node | None) -> Kinds:
        """The kinds of values that an expression may have."""
        match node:
            case nodes.Name():
                return frozenset(self._names.get(node.name, ()))
            case nodes.Getattr() | nodes.Getitem() | nodes.Call():
                return self._kinds_of_access(node)
            case nodes.Filter():
                kinds = self._kinds(node.node)
                return _items(kinds) if node.name in OF_ONE_ITEM else kinds
            case (
                nodes.CondExpr(expr1=left, expr2=right)
                | nodes.Or(left=left, right=right)
                | nodes.And(left=left, right=right)
            ):
                return self._kinds(left) | self._kinds(right)
            case nodes.Add() | nodes.List():
                return self._kinds_of_list(node)
        return NONE

    def _kinds_of_list(self, node: nodes.Add | nodes.List) -> Kinds:
        """The same for a sum of lists, and for a list of items."""
        if isinstance(node, nodes.Add):
            return (self._kinds(node.left) | self._kinds(node.right)) & {MESSAGES}
        holds_messages = any(MESSAGE in self._kinds(item) for item in node.items)
        return frozenset({MESSAGES}) if holds_messages else NONE

    def _kinds_of_access(self, node: nodes.Getattr | nodes.Getitem | nodes.Call) -> Kinds:
        """The same for x.name, x["name"], x[0], x[1:] and x.get("name")."""
        match node:
            case nodes.Getattr():
                assigned = self._names.get(f"{_name_of(node.node)}.{node.attr}", ())
                return _member(self._kinds(node.node), node.attr) | frozenset(assigned)
            case nodes.Getitem(arg=nodes.Slice()):
                return self._kinds(node.node)
            case nodes.Getitem(arg=nodes.Const(value=str() as name)):
                return _member(self._kinds(node.node), name)
            case nodes.Getitem():
                return _items(self._kinds(node.node))
            case nodes.Call(
                node=nodes.Getattr(attr="get") as method, args=[nodes.Const(value=name), *_]
            ):
                return _member(self._kinds(method.node), str(name))
        return NONE

    def _guards(self, node: nodes.Node, *, guarded: bool) -> Iterator[bool]:
        if self._reads_parts(node):
            yield guarded
        match node:
            case nodes.If():
                yield from self._branches(node, guarded)
            case nodes.CondExpr():
                yield from self._guards(node.test, guarded=guarded)
                yes = guarded or self._excludes_text(node.test, True)
                no = guarded or self._excludes_text(node.test, False)
                yield from self._guards(node.expr1, guarded=yes)
                if node.expr2 is not None:
                    yield from self._guards(node.expr2, guarded=no)
            case nodes.And() | nodes.Or():
                yield from self._guards(node.left, guarded=guarded)
                first = self._excludes_text(node.left, isinstance(node, nodes.And))
                yield from self._guards(node.right, guarded=guarded or first)
            case _:
                for child in node.iter_child_nodes():
                    yield from self._guards(child, guarded=guarded)

    def _branches(self, node: nodes.If, guarded: bool) -> Iterator[bool]:
        """The branches of an if: in each, the tests before it were false."""
        for branch in [node, *node.elif_]:
            yield from self._guards(branch.test, guarded=guarded)
            inside = guarded or self._excludes_text(branch.test, True)
            for child in branch.body:
                yield from self._guards(child, guarded=inside)
            guarded = guarded or self._excludes_text(branch.test, False)
        for child in node.else_:
            yield from self._guards(child, guarded=guarded)

    def _reads_parts(self, node: nodes.Node) -> bool:
        """Whether a node loops over a content as a list, or reads an attribute of parts."""
        match node:
            case nodes.For():
                return CONTENT in self._kinds(node.iter)
            case nodes.Filter(name="join") if node.args[1:] or node.kwargs:
                return CONTENT in self._kinds(node.node)
            case nodes.Filter() if node.name in OF_ITEMS:
                return CONTENT in self._kinds(node.node)
            case nodes.Getattr() if node.attr in OF_PARTS:
                return PART in self._kinds(node.node)
            case nodes.Getitem(arg=nodes.Const(value=name)) if name in OF_PARTS:
                return PART in self._kinds(node.node)
        return False

    def _excludes_text(self, test: nodes.Node, outcome: bool) -> bool:
        """Whether this outcome of a test means that the content is not a string."""
        match test:
            case nodes.Test(name="string"):
                return not outcome and CONTENT in self._kinds(test.node)
            case nodes.Not():
                return self._excludes_text(test.node, not outcome)
            case nodes.And() | nodes.Or():
                sides = (self._excludes_text(side, outcome) for side in (test.left, test.right))
                return any(sides) if isinstance(test, nodes.And) == outcome else all(sides)
        return False


def _items(kinds: Kinds) -> Kinds:
    """The kinds of an item of a list of these kinds."""
    of = {MESSAGES: MESSAGE, CONTENT: PART}
    return frozenset(of[kind] for kind in kinds if kind in of)


def _member(kinds: Kinds, name: str) -> Kinds:
    """The kinds of a member of an object of these kinds."""
    return frozenset({CONTENT}) if MESSAGE in kinds and name == "content" else NONE


def _name_of(target: nodes.Node) -> str:
    """The name of a target or an expression, as "name" or "name.attribute"; "" if it has none."""
    match target:
        case nodes.Name():
            return target.name
        case nodes.NSRef():
            return f"{target.name}.{target.attr}"
    return ""
