"""The compiled kernels of the forecaster."""
