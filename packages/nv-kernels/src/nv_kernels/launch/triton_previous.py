"""The device's half of programmatic dependent launch, and a prefetch for the time before it.

Owns device functions of a few lines. The host's half is nv_kernels.launch.dependent.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel ahead has ended and its writes are seen, then let the next one start.

    Every program of a kernel waits, here or by a wait of its own, also one with nothing to do: the
    end of this kernel promises its successor that all before it have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_and_hold(PDL: tl.constexpr):
    """Wait likewise, but let the next kernel start only when this one has ended.

    For writers of what attention reads before its wait: the plan, and keys but a row's newest.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(pointer, wanted):
    """Fetch the 128-byte lines of a tensor of pointers into L2, where wanted; a hint."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [pointer.to(tl.int64), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
