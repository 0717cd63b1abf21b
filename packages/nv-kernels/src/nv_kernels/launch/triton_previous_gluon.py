"""The device's half of programmatic dependent launch, for kernels in Gluon.

Owns two device functions, as `triton_previous` does for Triton's own dialect. Imports Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_previous():
    """Wait until the kernel ahead has ended and its writes are seen."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_start():
    """Let the next kernel's programs start; they wait for this one's end themselves."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
