"""The mathematics of the head solvers, faster: compiled by numba, recorded as CUDA graphs, written in Triton."""
