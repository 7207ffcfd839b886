"""Interface of a worker, in this process or in its own."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from camserve_server.engine.values import Partition, Row, RowResult
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Kind, ModelInfo, Pass
from camserve_server.telemetry import Memory


class WorkerProtocol(Protocol):
    """Worker and its models. Arguments and results are plain values, and calls block their thread."""

    def load(self, name: str, spec: ModelSpec) -> ModelInfo:
        """Load a model and warm it up. Rows may name it afterwards. Batches of other models run meanwhile.

        Args:
            name: name of the model in rows.
            spec: source and options of the model.

        Raises:
            ConfigError: the model cannot be loaded, or cannot be explained.
        """

    def drop(self, name: str) -> None:
        """Drop a model, and free its memory."""

    def run(self, pass_: Pass, rows: Sequence[Row], partition: Partition | None = None) -> list[RowResult]:
        """Run one batch; see `engine.Engine.run`.

        Args:
            pass_: pass that all rows share.
            rows: at least one row.
            partition: half of the cores, or stream, to run on while the other one runs another batch; None for the
                whole worker.

        Raises:
            WorkerLost: the process that ran the batch ended.
            ServiceError: any other failure.
        """

    def row_bytes(self, name: str) -> Mapping[Kind, int]:
        """Measure how many bytes one input of a model takes in each kind of pass, while no batch runs.

        Raises:
            WorkerLost: the process ended.
        """

    def free_bytes(self) -> int:
        """Return how many bytes of GPU memory batches can take together; 0 without a GPU, or if it is unknown.

        Raises:
            WorkerLost: the process ended.
        """

    def memory(self) -> Memory | None:
        """Return how much memory the worker uses, or None if that is unknown. It does not block; from any thread."""

    def close(self) -> None:
        """Release everything. No method may be called afterwards."""
