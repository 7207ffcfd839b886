"""Use cases on plain values: explain, evaluate and inspect; the model repository and the worker pool.

Read `explain` first: it runs a request from start to end, with `photos`, `drawing` and `memory`.

This package may import `scheduling` and the packages below.
"""
