"""The paper's data, networks, methods and experiments."""
