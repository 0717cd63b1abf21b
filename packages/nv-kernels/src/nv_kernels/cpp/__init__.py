"""The C++ kernels and their calls; the sources are compiled for this processor at first use.

The kernels compute in fp32 and bf16. Without a compiler, or for arguments that a kernel does not
support, a call runs the op's definition.
"""
