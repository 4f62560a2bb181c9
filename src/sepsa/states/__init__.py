"""Saved states: how their entries are checked, and the checkpoint file that holds them."""
