"""LocalExecutor: one rank, in the caller's own process.

Owns a worker. Steps run in order: at once on a CPU, queued on a CUDA stream.
"""

from nv_engine.batch import Batch
from nv_engine.config import EngineConfig
from nv_engine.device.worker import Worker
from nv_engine.executor.base import ModelFacts, Pending, facts_of
from nv_engine.log import LOGGER


class LocalExecutor:
    """Runs batches on this process's device."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: Worker | None = Worker(config)
        self._facts = facts_of(self._worker)
        LOGGER.info("ranks: 1, in this process")

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts."""
        return self._facts

    def submit(self, batch: Batch) -> Pending:
        """Queue one step."""
        if self._worker is None:
            raise RuntimeError("the engine is closed: make a new one")
        return self._worker.run(batch)

    def close(self) -> None:
        """Drop the model and the KV cache; a second call does nothing."""
        self._worker = None
