"""Saved states: how their entries are checked, and the checkpoint file that holds them."""

REGISTERED_BY: dict[str, str] = {}  # the module that registers a name, or all names that begin with it and a dot
