"""OneProcess: an object with an engine, which cannot be copied or sent to another process.

Owns the error. Never knows the engine.
"""

from typing import NoReturn


class OneProcess:
    """The base of `LLM` and `AsyncLLM`."""

    def __reduce__(self) -> NoReturn:
        """Refuse `pickle` and `copy`, which would take the engine's memory apart.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} holds a running engine, so it is not pickled or copied: make "
            "one in the process that uses it"
        )
