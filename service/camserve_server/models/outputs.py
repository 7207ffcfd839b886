"""What a model answered to a batch, still on the graph: what scores are made of."""

from dataclasses import dataclass

from torch import Tensor

from camserve_server.core.errors import FailedPrecondition
from camserve_server.models.values import ModelInfo


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What a model answered to a batch.

    Attributes:
        info: of the model.
        values: float32 [B, classes]; of every pixel [B, classes, h, w] where the task is "segment"; the embedding
            [B, E] where it is "embed"; and where it is "detect" the objects [B, n, 6], most certain first: class,
            score, left, top, right, bottom in the input's pixels. Class -1 fills up where an image has fewer.
        embedding: float32 [B, E]; None where there is none.
    """

    info: ModelInfo
    values: Tensor
    embedding: Tensor | None = None

    def __getitem__(self, places: slice | Tensor) -> "Outputs":
        """Return what it answered to some images of the batch."""
        embedding = None if self.embedding is None else self.embedding[places]
        return Outputs(self.info, self.values[places], embedding)

    def embeddings(self) -> Tensor:
        """Return the images' embeddings [B, E].

        Raises:
            FailedPrecondition: the model gives none.
        """
        found = self.values if self.info.task == "embed" else self.embedding
        if found is None:
            raise FailedPrecondition(f"{self.info.name} gives no embedding", field="targets")
        return found
