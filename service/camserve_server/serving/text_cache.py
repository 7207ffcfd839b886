"""Cache of the embeddings of texts, so that a text costs nothing when it is named again."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Row, RowResult
from camserve_server.jobs import Collect, Submit
from camserve_server.models.values import Pass

if TYPE_CHECKING:
    from camserve_server.targets.values import TextTarget

TEXT_CACHE = 64 * 2**20  # bytes: 32,000 texts for embeddings of 512 numbers

Key: TypeAlias = tuple[str, str]
"""The key of a model, which differs for each version, and a text."""


class TextCache:
    """The embeddings that were used last, by version of a model and text.

    Args:
        limit: the largest number of bytes of the embeddings and texts together.
    """

    def __init__(self, limit: int = TEXT_CACHE) -> None:
        self._limit = limit
        self._embeddings: OrderedDict[Key, Map] = OrderedDict()
        self.size = 0

    def before(self, run: Submit) -> Submit:
        """Return a function that answers rows with texts from the cache, and runs all others."""

        async def submit(pass_: Pass, rows: Sequence[Row], collect: Collect) -> None:
            if pass_.kind == "text":
                await self.submit(pass_, rows, collect, run)
            else:
                await run(pass_, rows, collect)

        return submit

    async def submit(self, pass_: Pass, rows: Sequence[Row], collect: Collect, run: Submit) -> None:
        """Answer rows with texts from the cache, and run the others.

        Args:
            pass_: a pass over texts.
            rows: the rows.
            collect: callback that receives the index of each row and its result.
            run: runs rows.
        """
        targets = [cast("TextTarget", row.target) for row in rows]
        missing = []
        for index, target in enumerate(targets):
            if (embedding := self._find((pass_.model, target.text))) is None:
                missing.append(index)
            else:
                collect(index, RowResult(embedding, replace(target, embedding=embedding), 0.0))

        def keep(position: int, result: RowResult) -> None:
            index = missing[position]
            self._add((pass_.model, targets[index].text), result.logits)
            collect(index, result)

        if missing:
            await run(pass_, [rows[index] for index in missing], keep)

    def _find(self, key: Key) -> Map | None:
        embedding = self._embeddings.get(key)
        if embedding is not None:
            self._embeddings.move_to_end(key)
        return embedding

    def _add(self, key: Key, embedding: Map) -> None:
        if key in self._embeddings:  # another request has run the same text meanwhile
            return
        self._embeddings[key] = embedding
        self.size += _bytes_of(key, embedding)
        while self.size > self._limit:
            self.size -= _bytes_of(*self._embeddings.popitem(last=False))


def _bytes_of(key: Key, embedding: Map) -> int:
    return embedding.nbytes + 4 * len(key[1])  # a character of a str takes up to 4 bytes
