"""Calls that evaluate explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve import _codec, _metrics
from camserve import _transport_async as transport
from camserve._async.connection import Calls
from camserve.v1 import evaluate_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from camserve._evaluation import Evaluation, MetricInfo
    from camserve._targets import BoxLike


class EvaluationCalls(Calls):
    """Calls that evaluate explanations by metrics."""

    async def evaluate(
        self,
        image: _codec.ImageLike,
        *,
        metrics: _metrics.MetricLike | Sequence[_metrics.MetricLike] = (),
        box: BoxLike | None = None,
        timeout: float | None = None,
        **options: Unpack[_codec.ExplainOptions],
    ) -> Evaluation:
        """Explain one image, and evaluate every map by every metric.

        Args:
            image: An image as for ``explain``.
            metrics: One metric or several, each a name, a ``Metric``, or a pair of name and
                parameters. Default: deletion and insertion.
            box: Position of the object in pixels of the photo, for metrics that test whether the map
                finds it: a ``Box``, or left, top, right, bottom.
            timeout: Timeout in seconds, instead of the client's.
            **options: Options of the explanation: see ``ExplainOptions``.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> metrics = [("insertion", {"steps": 5}), "sparseness"]
            >>> evaluation = await client.evaluate("cat.jpg", methods=["gradcam", "edges"], metrics=metrics)
            >>> print(evaluation.table())
                     insertion ↑  sparseness ↑
            gradcam  0.549 *      0.266
            edges    0.302        0.427 *
        """
        question = _codec.explain_request(**self._named(options))
        question = await transport.run_blocking(lambda: _codec.with_image(question, self._file_of(image)))
        request = _metrics.request(question, metrics, box)
        return _metrics.evaluation(await self._call(lambda stubs: stubs.evaluate.Evaluate, request, timeout))

    async def metrics(self) -> tuple[MetricInfo, ...]:
        """List the server's metrics and their parameters.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> metrics = await client.metrics()
            >>> [metric.name for metric in metrics if metric.needs_box]
            ['pointing_game', 'energy_in_box']
        """
        response = await self._call(lambda stubs: stubs.evaluate.ListMetrics, evaluate_pb2.ListMetricsRequest())
        return tuple(map(_metrics.metric, response.metrics))
