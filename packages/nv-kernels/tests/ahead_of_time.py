"""Compiles a kernel for a card that need not be present, and reads the resources it will use."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that a block may use


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. registers, stack and local are per thread."""

    ptx: str
    shared: int
    registers: int
    stack: int
    local: int


def compile_for(kernel, types, constants, capability, divisible=(), **options) -> Compiled:
    """Compile one specialisation.

    Args:
        kernel: a triton.jit function.
        types: by argument name: "*bf16", "i32", "fp32", … or a tensor descriptor; arguments
            that are not named are constexprs.
        constants: values of the constexprs.
        capability: 80, 90 or 100.
        divisible: arguments that are multiples of 16, as the launcher would find.
        options: num_warps, num_stages.
    """
    names = kernel.arg_names
    kinds = {
        name: kind if isinstance(kind, str) else mangle_type(kind) for name, kind in types.items()
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            compiled = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run(
            [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return Compiled(
        ptx=compiled.asm["ptx"],
        shared=compiled.metadata.shared,
        registers=found["REG"],
        stack=found["STACK"],
        local=found["LOCAL"],
    )


def assert_fits(compiled: Compiled, capability: int, spilled: int = 0) -> None:
    """Shared memory within the card's; on sm_90 no more spilled bytes per thread than expected."""
    assert compiled.shared <= SHARED_LIMIT[capability]
    if capability == 90:
        assert compiled.stack <= spilled
        assert compiled.local == 0
