"""The output of a model for a batch, on the graph, from which scores are computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from camserve_server.core.errors import FailedPrecondition
from camserve_server.models.values import ModelInfo

OBJECT_COLUMNS = 6
"""Columns that describe an object of a detector; those after them are its scores in each class."""


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The output of a model for a batch.

    Attributes:
        info: the description of the model.
        values: float32 [B, classes]; [B, classes, h, w] for the task "segment"; the embeddings [B, E] for "embed"; for
            "detect" the objects [B, n, 6] by descending score: class, score, left, top, right, bottom in the input's
            pixels. Detectors that return `class_scores` have more columns, [B, n, 6 + classes]: the score that the
            object has in each class. Images with fewer objects are padded with class -1.
        embedding: float32 [B, E]; None if the model has no embedding.
    """

    info: ModelInfo
    values: Tensor
    embedding: Tensor | None = None

    def __getitem__(self, places: slice | Tensor) -> "Outputs":
        """Return the output for some images of the batch."""
        embedding = None if self.embedding is None else self.embedding[places]
        return Outputs(self.info, self.values[places], embedding)

    def embeddings(self) -> Tensor:
        """Return the embeddings of the images, [B, E].

        Raises:
            FailedPrecondition: the model has no embedding.
        """
        embedding = self.values if self.info.task == "embed" else self.embedding
        if embedding is None:
            raise FailedPrecondition(f"{self.info.name} gives no embedding", field="targets")
        return embedding


def join_outputs(parts: Sequence[Outputs]) -> Outputs:
    """Join the outputs for several batches; images with fewer objects are padded."""
    if len(parts) == 1:
        return parts[0]
    values = pad_sequence([image for part in parts for image in part.values], batch_first=True, padding_value=-1.0)
    embeddings = [part.embedding for part in parts if part.embedding is not None]
    return Outputs(parts[0].info, values, torch.cat(embeddings) if embeddings else None)
