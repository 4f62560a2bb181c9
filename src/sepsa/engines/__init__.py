"""Adapters to engines, one a module, which imports its engine when it is used."""
