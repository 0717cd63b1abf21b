"""Device functions of programmatic dependent launch, and a prefetch to use before the wait.

The host's part is nv_kernels.launch.dependent.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel's writes are visible, then let the next kernel start.

    Every program of a kernel must wait, also one without work: the next kernel assumes that if this
    kernel has ended, all kernels before it have ended too.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_and_hold(PDL: tl.constexpr):
    """Wait for the previous kernel, and let the next one start only when this one has ended.

    For kernels that write what attention reads before its wait: the plan, and older keys.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(pointer, wanted):
    """Prefetch the 128-byte lines of a tensor of pointers into L2, where the mask is set."""
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
