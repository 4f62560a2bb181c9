"""What head solvers share: the head's parameters as one matrix, checks of samples, posteriors, health."""
