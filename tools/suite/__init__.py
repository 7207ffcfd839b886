"""Runs of the test suite: its parts, their processes, and their results."""
