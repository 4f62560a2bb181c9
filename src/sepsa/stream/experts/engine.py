"""The name of the engine with experts in pickles of version 0.2. Kept for one version."""

from sepsa.stream.engine.compiled import Engine as ExpertEngine  # noqa: F401
