"""Triton kernels of FP8: quantising operators and products."""
