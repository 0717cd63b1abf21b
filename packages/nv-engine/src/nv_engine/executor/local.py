"""LocalExecutor: one rank, in the caller's own process.

Owns the runner. Steps run in order: at once on a CPU, queued on a CUDA stream.
"""

from typing import TYPE_CHECKING, NamedTuple

from nv_engine.batch import Batch, StepResult
from nv_engine.config import EngineConfig
from nv_engine.device.start import start_runner
from nv_engine.executor.executor import Pending
from nv_engine.log import LOGGER

if TYPE_CHECKING:
    from nv_engine.device.head import HeadResult
    from nv_engine.device.runner import Runner
    from nv_engine.facts import ModelFacts


class LocalExecutor:
    """Runs batches on this process's device."""

    def __init__(self, config: EngineConfig) -> None:
        runner = start_runner(config)
        self.facts: ModelFacts = runner.facts
        self._runner: Runner | None = runner
        self._num_submitted = 0
        LOGGER.info("ranks: 1, in this process")

    def submit(self, batch: Batch) -> Pending:
        """Queue one step."""
        if self._runner is None:
            raise RuntimeError("the engine is closed: make a new one")
        result = self._runner.run(batch)
        self._num_submitted += 1
        return _Step(self, result, self._num_submitted)

    def wait_for(self, result: "HeadResult", number: int) -> StepResult:
        """Wait for the step of that number; meanwhile the host goes on with a capture.

        After the newest step no capture is left half done.
        """
        if self._runner is not None:
            self._runner.use_wait(result)
        found = result.result()
        if number == self._num_submitted:
            self.rest()
        return found

    def rest(self) -> None:
        """End a capture that was begun: until then no program may wait for the whole device."""
        if self._runner is not None:
            self._runner.finish_capture()

    def close(self) -> None:
        """Drop the model and the KV cache; a second call does nothing."""
        self._runner = None


class _Step(NamedTuple):
    """A step in flight."""

    executor: LocalExecutor
    on_device: "HeadResult"
    number: int

    def result(self) -> StepResult:
        """Wait for the step."""
        return self.executor.wait_for(self.on_device, self.number)
