"""What a kernel is, the library of compiled kernels, and what builds it."""
