"""LocalExecutor: one rank, in the caller's own process.

Owns the runner. Steps run in order: at once on a CPU, queued on a CUDA stream.
"""

from typing import TYPE_CHECKING

from nv_engine.batch import Batch
from nv_engine.config import EngineConfig
from nv_engine.device.start import start_runner
from nv_engine.executor.executor import Pending
from nv_engine.log import LOGGER

if TYPE_CHECKING:
    from nv_engine.device.runner import Runner
    from nv_engine.facts import ModelFacts


class LocalExecutor:
    """Runs batches on this process's device."""

    def __init__(self, config: EngineConfig) -> None:
        runner = start_runner(config)
        self.facts: ModelFacts = runner.facts
        self._runner: Runner | None = runner
        LOGGER.info("ranks: 1, in this process")

    def submit(self, batch: Batch) -> Pending:
        """Queue one step."""
        if self._runner is None:
            raise RuntimeError("the engine is closed: make a new one")
        return self._runner.run(batch)

    def close(self) -> None:
        """Drop the model and the KV cache; a second call does nothing."""
        self._runner = None
