"""Hooks for every test run."""

from skipped import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
