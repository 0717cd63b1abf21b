"""Abilities: what the model of a server can do, and which routes are for it.

Owns the sentences about routes that the model has no use for. Never refuses a request.
"""

from collections.abc import Collection
from dataclasses import dataclass

ROUTES = {
    "embed": ("/v1/embeddings", "/v1/score", "/v1/rerank"),
    "classify": ("/classify",),
    "score": ("/v1/score", "/v1/rerank"),
    "token_embed": ("/pooling",),
    "token_classify": ("/pooling",),
}
"""Of each task of pooling; /pooling takes all of them."""
TEXT_ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Abilities:
    """The abilities of a model.

    Attributes:
        tasks: of pooling; none: it generates text.
    """

    tasks: tuple[str, ...]

    @property
    def routes(self) -> tuple[str, ...]:
        """Routes of a model that pools; none: it generates text."""
        return tuple(dict.fromkeys(route for task in self.tasks for route in ROUTES[task]))

    @property
    def no_text(self) -> str | None:
        """Why routes that generate are refused; None: they are not."""
        if not self.tasks:
            return None
        return (
            f"the model of this server pools ({', '.join(self.tasks)}) and generates no text: use "
            f"{_listed(self.routes)}"
        )

    @property
    def no_pooling(self) -> str | None:
        """Why routes that pool are refused; None: they are not."""
        if self.tasks:
            return None
        return (
            f"the model of this server generates text and does not pool: use "
            f"{_listed(TEXT_ROUTES)}, or start a server with a model that embeds or classifies, or "
            "with --runner pooling"
        )

    def lacks(self, *wanted: str) -> str | None:
        """Why a route is refused that needs one of some tasks; None: it is not."""
        if {*wanted} & {*self.tasks}:
            return None
        return (
            f"the model of this server has {_listed(self.tasks)}, and this route needs "
            f"{_listed(wanted, 'or')}: use {_listed(self.routes)}"
        )


def _listed(names: Collection[str], word: str = "and") -> str:
    """Names as a sentence has them."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last
