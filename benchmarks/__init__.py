"""The benchmarks, by subject, as README.md lists them: `.venv/bin/python benchmarks/heads/forms.py` in a clone."""
