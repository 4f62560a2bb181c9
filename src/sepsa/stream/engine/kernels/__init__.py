"""The compiled kernels: `learn` and `predict` of a multilayer perceptron with recursive-least-squares heads."""

from sepsa.stream.engine.kernels.step import learn as learn
from sepsa.stream.engine.kernels.step import predict as predict
