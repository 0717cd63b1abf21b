"""Schema limits: the sizes of schemas and grammars that this server compiles.

Owns the two checks and their sentences.
"""

from typing import Any

from nv_api.server.errors import invalid
from nv_api.server.options import ServeOptions


def check_size(name: str, text: str, options: ServeOptions) -> int:
    """The bytes of a schema or grammar; `name` is its field.

    Raises:
        ApiError: 400, they are too many.
    """
    size = len(text.encode())
    if size > options.max_grammar_bytes:
        raise invalid(
            f"{name} is {size} bytes long: this server takes at most "
            f"{options.max_grammar_bytes}, so give a smaller one",
            name,
        )
    return size


def check_depth(name: str, schema: object, options: ServeOptions) -> None:
    """Check how deep a schema is nested; `name` is its field.

    Raises:
        ApiError: 400, too deep.
    """
    depth = _depth(schema)
    if depth > options.max_grammar_depth:
        raise invalid(
            f"{name} is nested {depth} levels deep: this server takes at most "
            f"{options.max_grammar_depth}, so put inner schemas under $defs",
            name,
        )


def _depth(value: Any) -> int:  # noqa: ANN401
    """Brackets open at the deepest point; the body's depth is bounded."""
    members = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, members), default=0)
