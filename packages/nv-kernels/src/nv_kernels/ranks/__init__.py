"""Sums over the ranks of one machine, through buffers that all ranks can write."""
