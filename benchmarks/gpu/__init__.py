"""Benchmarks on a GPU: `python -m benchmarks.gpu`, one run of some minutes that needs no network."""
