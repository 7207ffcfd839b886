"""Calls that evaluate explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._async.connection import Calls
from camserve._codec.evaluation import decode_evaluation, decode_metric, evaluation_request, metrics_request
from camserve._codec.explain import explain_request, with_image
from camserve._transport import aio as transport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from camserve._values.evaluation import Evaluation, MetricInfo, MetricLike
    from camserve._values.options import ExplainOptions, ImageLike
    from camserve._values.targets import BoxLike


class EvaluationCalls(Calls):
    """Calls that evaluate explanations by metrics."""

    async def evaluate(
        self,
        image: ImageLike,
        *,
        metrics: MetricLike | Sequence[MetricLike] = (),
        box: BoxLike | None = None,
        timeout: float | None = None,
        **options: Unpack[ExplainOptions],
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
        question = explain_request(**self._named(options))
        question = await transport.run_blocking(lambda: with_image(question, self._file_of(image)))
        request = evaluation_request(question, metrics, box)
        return decode_evaluation(await self._call(lambda stubs: stubs.evaluate.Evaluate, request, timeout))

    async def metrics(self) -> tuple[MetricInfo, ...]:
        """List the server's metrics and their parameters.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> metrics = await client.metrics()
            >>> [metric.name for metric in metrics if metric.needs_box]
            ['pointing_game', 'energy_in_box']
        """
        response = await self._call(lambda stubs: stubs.evaluate.ListMetrics, metrics_request())
        return tuple(map(decode_metric, response.metrics))
