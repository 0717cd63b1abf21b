"""Sums over the ranks of one machine, through memory that they write into each other."""
