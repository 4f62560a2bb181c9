"""The mathematics of the head solvers, faster: compiled, recorded as CUDA graphs, written in Triton."""
