"""LocalExecutor: one rank, in the caller's own process.

Owns a worker. Steps run in order: at once on a CPU, queued on a CUDA stream.
"""

from nv_engine.batch import Batch
from nv_engine.config import EngineConfig
from nv_engine.device.worker import Worker
from nv_engine.executor.base import ModelFacts, Pending


class LocalExecutor:
    """Runs batches on this process's device."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: Worker | None = Worker(config)
        self._facts = ModelFacts(
            vocab_size=self._worker.vocab_size,
            eos_token_ids=self._worker.eos_token_ids,
            max_model_len=self._worker.max_model_len,
            num_blocks=self._worker.num_blocks,
            block_size=self._worker.block_size,
        )

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
