"""CollectorPause: stops Python's cycle collector until the first step of a list of prompts.

Such a list makes thousands of objects, none of them garbage. The collector would visit them all,
for a millisecond or more, while the device waits.

Owns the pause. Never collects.
"""

import gc


class CollectorPause:
    """Stops the collector from `begin` to the first `end`, which restores its earlier state."""

    def __init__(self) -> None:
        self._was_enabled = False

    def begin(self) -> None:
        """Stop the collector."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Start the collector again, if it ran before; a second call does nothing."""
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False
