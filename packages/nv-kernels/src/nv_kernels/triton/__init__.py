"""Triton kernels, one file an op; each launches what `nv_kernels.reference` defines."""
