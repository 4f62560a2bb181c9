"""The mathematics of the head solvers as pure functions of tensors: a new state out, nothing changed in place."""
