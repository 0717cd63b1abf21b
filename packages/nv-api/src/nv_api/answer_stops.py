"""AnswerStops: stop strings in the answer of a model that thinks first.

Owns where the search begins: after the thought. Never finds a stop string itself.
"""

from nv_api.said import Place, ThoughtScope
from nv_api.stopping import Stopped, StopStrings


class AnswerStops:
    """A `StopSearch` of the text after a thought.

    A stop string that begins in the thought is not found, even if its end is after the thought.

    Args:
        place: where the text begins.
        stops: searches the rest.
    """

    def __init__(self, place: Place, stops: StopStrings) -> None:
        self._scope = ThoughtScope(place)
        self._stops = stops

    @property
    def state(self) -> tuple[tuple[Place, str, str, str], str]:
        """Of the scope, and of the search."""
        return self._scope.state, self._stops.state

    @state.setter
    def state(self, state: tuple[tuple[Place, str, str, str], str]) -> None:
        self._scope.state, self._stops.state = state

    def push(self, piece: str, *, armed: bool = True) -> Stopped:
        """Add a piece of text, and return what may be shown; see `StopStrings.push`."""
        if self._scope.is_over:  # nearly always
            return self._stops.push(piece, armed=armed)
        thought, rest = self._scope.push(piece)
        found = self._stops.push(rest, armed=armed)
        return Stopped(thought + found.text, found.stop)

    def flush(self, *, armed: bool = True) -> Stopped:
        """Return the text held back: the search has not seen what may have begun a thought."""
        found = self._stops.push(self._scope.finish().rest, armed=armed)
        return Stopped(found.text + self._stops.flush().text, found.stop)
