"""The version of the package, for its metadata and for what it saves."""

__version__ = "0.2.0"
