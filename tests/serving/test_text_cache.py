"""The cache of texts: bounded by bytes, and divided by the version of a model."""

import asyncio
from types import SimpleNamespace

import numpy as np

from camserve_server.engine.values import RowResult
from camserve_server.jobs import embed_texts
from camserve_server.serving.text_cache import TextCache
from camserve_server.targets.values import TextTarget

ENTRY = 4 * 4 + 4  # bytes: an embedding of four numbers, and a text of one letter


class Asked:
    """A cache, the texts that it ran, and the embeddings that callers get."""

    def __init__(self, entries):
        self.cache, self.ran = TextCache(limit=entries * ENTRY), ""

    def __call__(self, version, texts):
        model = SimpleNamespace(key=f"net@{version}", texts=tuple(texts))
        return asyncio.run(embed_texts(model, texts, self.submit)).classes[:, 0].tolist()

    async def submit(self, pass_, rows, collect):
        async def run(_pass, missing, keep):
            for index, row in enumerate(missing):
                self.ran += row.target.text
                keep(index, RowResult(np.full(4, ord(row.target.text), np.float32), TextTarget(row.target.text), 0.0))

        await self.cache.submit(pass_, rows, collect, run)


def test_cached_texts_are_answered_in_the_order_of_the_request():
    asked = Asked(entries=8)

    assert asked(1, "abc") == [*map(ord, "abc")]
    assert asked(1, "cxa") == [*map(ord, "cxa")]
    assert asked.ran == "abcx"


def test_text_that_was_used_longest_ago_leaves_a_full_cache():
    asked = Asked(entries=3)
    for texts in ("abc", "a", "d", "a", "b"):
        asked(1, texts)

    assert asked.ran == "abcdb"
    assert asked.cache.size == 3 * ENTRY


def test_another_version_of_a_model_has_texts_of_its_own():
    asked = Asked(entries=8)
    asked(1, "a")
    asked(2, "a")
    asked(1, "a")

    assert asked.ran == "aa"


def test_more_texts_than_fit_are_answered_all_the_same():
    asked = Asked(entries=2)

    assert asked(1, "abcdef") == [*map(ord, "abcdef")]
    assert asked.cache.size == 2 * ENTRY
