"""Composition root: builds a running server from settings, and serves its metrics.

It may import `api` and the rooms below.
"""
