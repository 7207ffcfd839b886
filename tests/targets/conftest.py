"""Tests of this folder compute with few threads."""

from few_threads import few_threads

__all__ = ["few_threads"]
