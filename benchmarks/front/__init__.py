"""Benchmark of the front: the work of a server process around its models, on any machine and without a GPU."""
