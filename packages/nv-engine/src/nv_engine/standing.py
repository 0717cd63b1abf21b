"""Standing: whether an engine may be used, in this process and still.

Owns the three facts that end its use: it was closed, this is a fork of its process, its device is
lost. Never touches a device.
"""

import os


class Standing:
    """Of an engine that is made here and now."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self.is_closed = False
        self.loss: str | None = None
        """Why nothing can run any more; None while it can."""

    @property
    def is_here(self) -> bool:
        """False in a fork of the process in which the engine was made."""
        return os.getpid() == self._process_id

    def check_process(self) -> None:
        """Refuse a fork: threads, ranks and CUDA contexts stay in the process that made them.

        Raises:
            RuntimeError: the engine was made in another process.
        """
        if not self.is_here:
            raise RuntimeError(
                f"this LLM was made in another process ({self._process_id}, and this one is "
                f"{os.getpid()}): make it after the fork, or use the spawn start method"
            )

    def check_usable(self) -> None:
        """Refuse what could not run.

        Raises:
            RuntimeError: the engine was made in another process, or its device is lost.
        """
        self.check_process()
        if self.loss is not None:
            raise RuntimeError(self.loss)
