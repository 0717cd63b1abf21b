"""Python's cycle collector, kept still while a device waits for its first step.

A list of prompts makes thousands of objects, none of them garbage; the collector would look
through them all, a millisecond and more, before anything runs.

Owns the pause. Never collects.
"""

import gc


class CollectorPause:
    """Holds the collector from now until `end`; a second `end` does nothing."""

    def __init__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Let the collector work again, if it did before."""
        if self._was_enabled:
            self._was_enabled = False
            gc.enable()
