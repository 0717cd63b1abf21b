"""The C++ kernels and their calls; the sources are compiled for this processor at first use.

Owns ops in fp32 and bf16, and the place of the compiled library. Without a compiler, or for
arguments that a kernel does not take, a call runs the op's definition.
"""
