"""Products by a weight in Triton and Gluon; `nv_kernels.linear.tuned` chooses among them."""
