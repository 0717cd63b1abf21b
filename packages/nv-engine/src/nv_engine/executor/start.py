"""Start: the executor that an engine's options ask for.

Owns the choice. Never runs a step.
"""

from nv_engine.config import EngineConfig
from nv_engine.executor.base import Executor
from nv_engine.executor.local import LocalExecutor
from nv_engine.executor.process import ProcessExecutor


def start_executor(config: EngineConfig) -> Executor:
    """The executor that the options ask for."""
    if config.distributed_executor_backend == "ray":
        from nv_engine.executor.ray import RayExecutor  # noqa: PLC0415  # an extra

        return RayExecutor(config)
    if config.tensor_parallel_size > 1:
        return ProcessExecutor(config)
    return LocalExecutor(config)
