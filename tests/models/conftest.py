"""Tests of this room compute with few threads, and share small models."""

import pytest

import support
from few_threads import few_threads

__all__ = ["few_threads"]


@pytest.fixture(scope="session")
def resnet():
    """A small model for tests that only read it, instead of the one with this name for all rooms."""
    return support.loaded("timm:test_resnet?weights=none&size=64")
