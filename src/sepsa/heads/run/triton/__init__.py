"""Triton kernels for captured steps on a GPU."""
