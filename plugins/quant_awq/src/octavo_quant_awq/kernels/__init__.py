"""Kernels for 1 to 64 rows on 4-bit weights, and the one that makes 16-bit weights of them for more."""
