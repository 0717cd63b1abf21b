"""The CPU's own kernels: C++ that is compiled for this processor when it is first used.

Owns a layer's ops in fp32 and bf16, and where the compiled library lies. Where there is no
compiler, or an op gets what its kernel was not written for, `nv_kernels.reference` computes.
"""
