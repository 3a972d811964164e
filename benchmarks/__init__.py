"""Measurements of the library, each run by `python -m benchmarks.NAME`."""
