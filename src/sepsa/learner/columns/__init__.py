"""Columns of any kind as the inputs of a learner."""
