"""Hooks for every test run."""

import gc

from skipped import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


def pytest_collection_finish():
    """Take the libraries and pytest's own objects out of the garbage collector's rounds.

    Tests and the code under test run the collector themselves: it took 0.3 s each time with all of them.
    """
    gc.collect()
    gc.freeze()
