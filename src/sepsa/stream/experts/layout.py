"""The name of the layout of the experts in pickles of version 0.2. Kept for one version."""

from sepsa.stream.engine.layout import Layout as ExpertLayout  # noqa: F401
