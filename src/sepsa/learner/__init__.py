"""Streams: one sample at a time at compiled speed, behind the interfaces of scikit-learn and River."""
