"""Composition root: build a running server from its settings, and serve its metrics.

It may import `api` and the rooms below.
"""
