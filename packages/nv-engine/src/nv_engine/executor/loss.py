"""Loss: the errors after which an executor runs nothing more.

Owns how they are recognised, and that nothing of a lost device is freed. Never touches the device.
"""

import ctypes

FATAL = (
    "an illegal memory access was encountered",
    "misaligned address",
    "device-side assert triggered",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "context is destroyed",
)
"""CUDA's messages of the errors after which, by its manual, the process must end: every later
call returns the same one (cudaError_t of the CUDA Runtime API). Others leave the context usable."""


class DeviceLost(RuntimeError):
    """No step can run any more; the message has the cause, and what to make anew."""


def loss_of(error: RuntimeError) -> str | None:
    """The sentence of an error after which nothing runs; None if a later step may run."""
    if isinstance(error, DeviceLost):
        return str(error)
    first = next((line for line in str(error).splitlines() if _is_fatal(line)), None)
    if first is None:
        return None
    return (
        f"the CUDA context of this process is lost by an error that it does not survive ({first}): "
        "make the LLM in a new process"
    )


def keep_for_ever(*things: object) -> None:
    """Never free these: what lies on a lost device is freed by calls to it, which may abort."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _is_fatal(line: str) -> bool:
    return "CUDA" in line and any(name in line for name in FATAL)
