"""Grammars as text: GBNF or Lark, and GBNF translated to Lark.

Owns the notation of GBNF, as in llama.cpp's grammars/README.md, and the rule that distinguishes it
from Lark. Never compiles a grammar.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = r"[A-Za-z0-9_-]+"
_GBNF_RULE = re.compile(rf"^[ \t\ufeff]*{_NAME}[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(
    r"^[ \t\ufeff]*([?!]*)[ \t]*([A-Za-z_][A-Za-z0-9_]*)(\.-?\d+)?"
    r"((?:\{[^}\n]*\})?(?:\[[^\]\n]*\])?[ \t]*:)(?!:)",
    re.MULTILINE,
)
_LARK_DIRECTIVE = re.compile(r"^[ \t\ufeff]*%[a-z]", re.MULTILINE)
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n\ufeff]+|\#[^\r\n]*)
    |(?P<rule>{_NAME}(?=[ \t]*::=))|(?P<becomes>::=)|(?P<name>{_NAME})
    |"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<set>(?:\\.|[^\]\\])*)\]
    |\{{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}}|(?P<repeat>[*+?])
    |(?P<sign>[()|])|(?P<any>\.)""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})"
    r"|\\(?P<escaped>[^xuU])|(?P<plain>[^\\])",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPES |= {char: char for char in "\"'\\[]-^/?"}
_MOST_ALTERNATIVES = 1000
"""A root with more becomes one terminal: llguidance follows at most 2,000 items at once."""


def to_lark(text: str) -> str:
    """A grammar in Lark, whichever of the two notations it is in.

    Lark's modifiers (`?`, `!`) and priorities (`start.2:`) change the tree of a parse, not the
    texts that fit, so they are removed.

    Raises:
        ValueError: it is neither or both, or it is GBNF with an error.
    """
    return gbnf_to_lark(text) if is_gbnf(text) else _LARK_RULE.sub(r"\2\4", text.lstrip("\ufeff"))


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF; if not, it is Lark.

    It is GBNF if a line begins with `name ::=`, and Lark if one begins with `name:` (the name after
    any of `?` and `!`, and before a priority) or with a directive such as `%ignore`.

    Raises:
        ValueError: it is neither or both.
    """
    has_gbnf = _GBNF_RULE.search(text) is not None
    has_lark = (_LARK_RULE.search(text) or _LARK_DIRECTIVE.search(text)) is not None
    if has_gbnf and has_lark:
        raise ValueError("it has rules of GBNF (`name ::= …`) and of Lark (`name: …`): use one")
    if not has_gbnf and not has_lark:
        raise ValueError("it has no rule: write GBNF (`root ::= …`) or Lark (`start: …`)")
    return has_gbnf


@dataclass
class _Rule:
    """A rule, partly translated to Lark."""

    parts: list[str] = field(default_factory=list)
    """Lark, in order; names of rules are those of GBNF, after a `$`."""
    names: set[str] = field(default_factory=set)
    """The rules that it names."""
    depth: int = 0
    """Open groups."""
    num_alternatives: int = 1
    """At depth 0."""
    last: list[int] = field(default_factory=lambda: [0])
    """Per depth: the index in `parts` at which the newest item begins."""

    @property
    def is_empty(self) -> bool:
        """True where an alternative begins."""
        return not self.parts or self.parts[-1] in ("(", "|")

    def item(self, part: str) -> None:
        self.last[-1] = len(self.parts)
        self.parts.append(part)

    def open(self) -> None:
        self.item("(")
        self.last.append(len(self.parts))
        self.depth += 1

    def alternative(self) -> None:
        """End an alternative: one without items is the empty text."""
        if self.is_empty:
            self.parts.append('""')

    def repeat(self, operator: str) -> None:
        begin = self.last[-1]
        if operator == "{0,0}":  # Lark has no such repeat
            self.parts[begin:] = ['""']
            return
        if self.parts[-1].startswith(("*", "+", "?", "{")):  # `a*+`: a repeat of a repeat
            self.parts.insert(begin, "(")
            self.parts.append(")")
        self.parts.append(operator)


def gbnf_to_lark(text: str) -> str:
    """GBNF as Lark: one rule per line; rules that match a regular language become terminals.

    The notation is llama.cpp's; as in xgrammar, an alternative may also begin on a new line, and
    `{,n}` repeats from 0 on.

    Raises:
        ValueError: it is not GBNF, a rule is missing, or two rules have one name.
    """
    rules = _parse(text)
    if "root" not in rules:
        raise ValueError("it has no rule named root, where GBNF begins")
    for rule in rules.values():
        for name in sorted(rule.names - rules.keys()):
            raise ValueError(f"rule {name!r} not found")
    terminals = _terminals(rules)
    is_wide = rules["root"].num_alternatives > _MOST_ALTERNATIVES and "root" in terminals
    called = _lark_names(rules, terminals if is_wide else terminals - {"root"})
    lines = ["%llguidance {}", *([f"start: {called['root']}"] if is_wide else [])]
    for name, rule in rules.items():
        parts = (called[part[1:]] if part.startswith("$") else part for part in rule.parts)
        lines.append(f"{called[name]}: {' '.join(parts)}")
    return "\n".join(lines) + "\n"


def _parse(text: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    rule: _Rule | None = None
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        is_of_rule = found and (rule is not None or found["rule"] or found["space"])
        if found is None or not is_of_rule:
            line, shown = 1 + text.count("\n", 0, position), text[position : position + 20]
            raise ValueError(f"line {line} has {shown!r}, which is not part of a rule")
        position = found.end()
        if found["rule"]:
            _end(rules, rule)
            if found["rule"] in rules:
                raise ValueError(f"it has two rules {found['rule']!r}: write one, with `|`")
            rule = rules[found["rule"]] = _Rule()
        elif rule is not None and not found["space"] and not found["becomes"]:
            _take(rule, found)
    _end(rules, rule)
    return rules


def _end(rules: dict[str, _Rule], rule: _Rule | None) -> None:
    if rule is None:
        return
    rule.alternative()
    if rule.depth:
        raise ValueError(f"rule {list(rules)[-1]!r} has a '(' without its ')'")


def _take(rule: _Rule, found: re.Match[str]) -> None:
    """Add a token to a rule."""
    sign = found["sign"]
    if found["name"]:
        rule.names.add(found["name"])
        rule.item(f"${found['name']}")
    elif found["text"] is not None:
        rule.item(json.dumps("".join(char for char, _ in _chars(found["text"]))))
    elif found["set"] is not None:
        rule.item(_char_class(found["set"]))
    elif found["any"]:
        rule.item("/(?s:.)/")
    elif sign == "(":
        rule.open()
    elif sign == "|":
        rule.alternative()
        rule.parts.append("|")
        rule.num_alternatives += rule.depth == 0
    elif sign == ")":
        if not rule.depth:
            raise ValueError("it has a ')' without its '('")
        rule.alternative()
        rule.parts.append(")")
        rule.depth -= 1
        rule.last.pop()
    elif rule.is_empty:
        raise ValueError(f"{found[0]!r} repeats nothing: put it after an item")
    else:
        rule.repeat(found["repeat"] or _counts(found))


def _counts(found: re.Match[str]) -> str:
    least, most = found["least"], found["most"]
    if not least and not most:
        raise ValueError(f"{found[0]!r} has no number: write {{m}}, {{m,}} or {{m,n}}")
    if not found["comma"]:
        most = least = least or most
    if most and int(most) < int(least or 0):
        raise ValueError(f"{found[0]!r} has its bounds in the wrong order: write {{least,most}}")
    return f"{{{int(least or 0)},{most}}}"


def _chars(text: str) -> Iterator[tuple[str, bool]]:
    """The characters of a literal or a class, and whether each was escaped."""
    position = 0
    while position < len(text):
        found = _CHAR.match(text, position)
        escaped = found and found["escaped"]
        if found is None or (escaped and escaped not in _ESCAPES):
            raise ValueError(
                f"{text[position : position + 2]!r} is not an escape: use \\n, \\r, \\t, \\\\, "
                '\\", \\[, \\], \\xNN, \\uNNNN or \\UNNNNNNNN'
            )
        position = found.end()
        digits = found["x"] or found["u"] or found["U"]
        if digits is None:
            yield (_ESCAPES[escaped] if escaped else found["plain"]), bool(escaped)
            continue
        point = int(digits, 16)
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:  # no scalar value of Unicode
            raise ValueError(
                f"{found[0]} is not a character: write those above ffff as \\UNNNNNNNN"
            )
        yield chr(point), True


def _char_class(text: str) -> str:
    """`[…]` as a regular expression of Rust's."""
    is_negated = text.startswith("^")
    chars = list(_chars(text[is_negated:]))
    if not chars:
        raise ValueError(f"[{text}] holds no character: name one")
    inner, position = "", 0
    while position < len(chars):
        first, last = chars[position][0], chars[position][0]
        is_range = position + 2 < len(chars) and chars[position + 1] == ("-", False)
        if is_range:
            last = chars[position + 2][0]
            if last < first:
                raise ValueError(f"[{text}] has the range {first!r} to {last!r}: swap the two")
        inner += _point(first) + (f"-{_point(last)}" if is_range else "")
        position += 3 if is_range else 1
    return f"/[{'^' * is_negated}{inner}]/"


def _point(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that name only other such rules, or none: each matches a regular language."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    for user, rule in rules.items():
        for name in rule.names:
            users[name].append(user)
    missing = {name: len(rule.names) for name, rule in rules.items()}
    ready = [name for name, count in missing.items() if not count]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return found


def _lark_names(rules: dict[str, _Rule], terminals: set[str]) -> dict[str, str]:
    """A distinct Lark name for each rule; names of terminals are in capitals."""
    names, taken = {}, {"start"}
    for name in rules:
        if name == "root" and name not in terminals:
            names[name] = "start"
            continue
        plain = re.sub("[^a-z0-9]", "_", name.lower())
        plain = plain if plain[0].isalpha() else f"r{plain}"
        while plain in taken:
            plain += "_"
        taken.add(plain)
        names[name] = plain.upper() if name in terminals else plain
    return names
