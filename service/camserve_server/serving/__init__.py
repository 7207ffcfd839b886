"""Use cases on plain values: explain, evaluate and inspect; the model repository and the worker pool.

It may import `scheduling` and the rooms below.
"""
