"""Embeddings of the texts that a request names, as its classes or in its targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from camserve_server.core.arrays import Map
from camserve_server.engine.values import Row
from camserve_server.jobs.values import Submit
from camserve_server.models.values import ModelInfo, Pass
from camserve_server.targets import kind_of
from camserve_server.targets.values import Target, TextTarget

NO_IMAGE = (0, 0, 3)
"""The shape of the image of a row that has only a text."""


@dataclass(frozen=True, slots=True)
class TextEmbeddings:
    """Embeddings of texts, of length 1, float32 [E].

    Attributes:
        by_text: the embedding of each text.
        classes: those of the model's classes, [n,E]; None if its classes are no texts.
    """

    by_text: Mapping[str, Map] = field(default_factory=dict)
    classes: Map | None = None

    def fill(self, target: Target) -> Target:
        """Return a target of a text with the text's embedding, and any other target as it is."""
        unread = kind_of(target).text(target)
        return replace(unread, embedding=self.by_text[unread.text]) if unread else target


async def embed_texts(model: ModelInfo, texts: Sequence[str], submit: Submit) -> TextEmbeddings:
    """Compute the embeddings of texts.

    Args:
        model: the model, with those of the texts that are its classes.
        texts: the distinct texts.
        submit: runs rows.
    """
    if not texts:
        return TextEmbeddings()
    found: dict[str, Map] = {}
    # Each row has an array of its own, because a batch counts its distinct images.
    rows = [Row(np.empty(NO_IMAGE, np.uint8), TextTarget(text)) for text in texts]
    await submit(text_pass(model), rows, lambda index, result: found.update({texts[index]: result.logits}))
    return TextEmbeddings(found, np.stack([found[text] for text in model.texts]) if model.texts else None)


def text_pass(model: ModelInfo) -> Pass:
    """Return the pass over texts. It has the size of no image, so that all texts for a model share batches."""
    return Pass(model.key, "text", NO_IMAGE[:2])
