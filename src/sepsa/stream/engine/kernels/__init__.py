"""The mathematics of the network and of its robustness, compiled, and the views by which kernels see their memory."""
