"""What a server knows of an engine, wherever it lives."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.telemetry import Memory


class WorkerProtocol(Protocol):
    """An engine with the models that it was given; plain values go in and come out. Each call blocks its thread."""

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model, warm it up, and only then let rows name it; those of other models run meanwhile.

        Args:
            name: by which rows mean it.
            spec: which one.

        Raises:
            ConfigError: it cannot be loaded, or cannot explain.
        """

    def drop(self, name: str) -> None:
        """Forget a model, and give its memory back."""

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `engine.Engine.run`.

        Args:
            pass_: what the rows have in common.
            rows: at least one.
            partition: of the engine's cores, or of its streams, while the other partition runs another batch; None for
                all.

        Raises:
            WorkerLost: the process that ran it is gone.
            ServiceError: whatever else went wrong.
        """

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how much memory one input of a model takes in each kind of pass, while no batch runs.

        Raises:
            WorkerLost: the process is gone.
        """

    def free_bytes(self) -> int:
        """Return how much memory of the engine's GPU batches can take together; 0 if it has none, or does not tell.

        Raises:
            WorkerLost: the process is gone.
        """

    def memory(self) -> Memory | None:
        """Return how much memory it has, as far as that is known; from any thread, and at once."""

    def close(self) -> None:
        """Let everything go; nothing is called afterwards."""
