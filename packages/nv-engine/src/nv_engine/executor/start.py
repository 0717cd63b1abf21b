"""Start: the executor that an engine's options ask for.

Owns the choice. Never runs a step.
"""

from nv_engine.config import EngineConfig
from nv_engine.executor.executor import Executor
from nv_engine.executor.local import LocalExecutor
from nv_engine.executor.process import ProcessExecutor


def start_executor(config: EngineConfig) -> Executor:
    """The executor that the options ask for."""
    if config.distributed_executor_backend == "ray":
        return _ray_executor(config)
    if config.tensor_parallel_size > 1:
        return ProcessExecutor(config)
    return LocalExecutor(config)


def _ray_executor(config: EngineConfig) -> Executor:
    """An extra: imported when it is asked for."""
    try:
        from nv_engine.executor.ray import RayExecutor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'distributed_executor_backend="ray" needs Ray: pip install "nv-engine[ray]"',
            name=error.name,
        ) from error
    return RayExecutor(config)
