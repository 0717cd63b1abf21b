"""Attention on a CUDA card: the `triton` backend and the batch-invariant one, and their kernels."""
