"""Python's cycle collector, kept still while a device waits for its first step.

A list of prompts makes thousands of objects, none of them garbage; the collector would look
through them all, a millisecond and more, before anything runs.

Owns the pause. Never collects.
"""

import gc


class CollectorPause:
    """Holds the collector from `begin` to the first `end`; it is then as it was before."""

    def __init__(self) -> None:
        self._was_enabled = False

    def begin(self) -> None:
        """Stop the collector."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Let the collector work again, if it did before; a second call does nothing."""
        if self._was_enabled:
            gc.enable()
            self._was_enabled = False
