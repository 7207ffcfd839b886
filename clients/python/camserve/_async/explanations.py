"""Calls that explain images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from camserve._async.streams import StreamCalls
from camserve._codec.explain import ExplainRequest, cost_request, explain_request, with_image
from camserve._codec.images import image_bytes
from camserve._codec.receipts import replay_request
from camserve._codec.results import decode_cost, decode_result
from camserve._show.progress import OnProgress, progress_bar
from camserve._transport import aio as transport
from camserve._transport.settings import DEFAULT_IN_FLIGHT
from camserve._transport.stream import InFlightWindow, refuse_single_image
from camserve._values.photo_source import PhotoSource
from camserve._values.replay import Replay, compare_with_receipt, only_explanation
from camserve._values.result_comparison import ResultComparison, compare_results, targets_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterable
    from typing import Unpack

    from camserve._core.errors import CamserveError
    from camserve._values.methods import Cost
    from camserve._values.options import ExplainOptions, ImageItem, ImageLike
    from camserve._values.receipt import Receipt
    from camserve._values.result import Result
    from camserve._values.targets import BoxLike


class ExplanationCalls(StreamCalls):
    """Calls that explain images: one, many, or the image of a receipt again."""

    async def explain(
        self,
        image: ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[ExplainOptions],
    ) -> Result:
        """Explain a model's predictions for one image.

        Args:
            image: A path, bytes of a JPEG, PNG, WebP, BMP, TIFF or NPY file, a PIL image, or an array: uint8
                [H, W, 3] in RGB, or uint8, uint16 or floats with the channels of the model, [H, W, C] or
                [H, W] for one. Floats are sent as float32.
            on_progress: Callback for the progress of a long method. Its arguments are the number of
                rows (copies of the image through the model) computed so far, and the total.
            timeout: Timeout in seconds, instead of the client's. With ``on_progress``, the longest time in
                seconds without a message from the server.
            **options: Options of the explanation: see ``ExplainOptions``.

        Raises:
            CamserveError: The subclass gives the reason. Options that are certainly invalid are
                not sent.

        Example:
            >>> result = await client.explain("cat.jpg", targets=["tabby", "lynx"], max_side=200)
            >>> [(explanation.title, round(explanation.score, 1)) for explanation in result.explanations]
            [('tabby', 8.1), ('lynx', 6.5)]
            >>> result.explanations[0].save("why.jpg").exists()
            True
        """
        request = explain_request(**self._named(options))
        result = await self._explain_one(request, image, on_progress, timeout)
        return replace(result, source=PhotoSource(image, image_bytes))

    async def replay(
        self,
        receipt: Receipt,
        image: ImageLike,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Replay:
        """Repeat the explanation of a receipt, and compare the two.

        Args:
            receipt: The receipt, such as ``Receipt.load("why.receipt.json")`` or ``e.receipt``.
            image: The receipt's photo, in any form that ``explain`` takes.
            on_progress: As for ``explain``.
            timeout: As for ``explain``.

        Raises:
            CamserveError: The subclass gives the reason: ``NotFound`` if the server has no model of
                that name. A difference between the two explanations is not an error.

        Example:
            >>> result = await client.explain("cat.jpg", targets=["tabby"])
            >>> replay = await client.replay(result.explanations[0].receipt, "cat.jpg")
            >>> replay.same, replay.differences
            (True, ())
        """
        result = await self._explain_one(replay_request(receipt), image, on_progress, timeout)
        return compare_with_receipt(receipt, only_explanation(result))

    async def compare(
        self,
        image: ImageLike,
        baseline: str,
        candidate: str,
        *,
        box: BoxLike | None = None,
        timeout: float | None = None,
        **options: Unpack[ExplainOptions],
    ) -> ResultComparison:
        """Explain one image with two models, and compare where they look.

        Without targets, both models explain the classes that the first one predicts.

        Args:
            image: An image as for ``explain``.
            baseline: Name of the first model.
            candidate: Name of the second model.
            box: Position of the object in pixels of the photo, to compare the evidence in it: a
                ``Box``, or left, top, right, bottom.
            timeout: Seconds for each of the two explanations, instead of the client's.
            **options: Options of the explanation: see ``ExplainOptions``. The layers must be
                layers of both models.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> both = await client.compare("cat.jpg", "segmenter", "segmenter-2", targets=camserve.segment("red"))
            >>> both.same_prediction
            True
            >>> round(both.comparisons[0].spearman, 1)  # 1 if both models rank all places the same
            0.8
        """
        options["heatmap"] = True
        options["model"] = baseline
        first = await self.explain(image, timeout=timeout, **options)
        options["model"] = candidate
        options["targets"] = options.get("targets") or targets_of(first)
        second = await self.explain(image, timeout=timeout, **options)
        return compare_results(first, second, box)

    async def estimate_cost(self, *, timeout: float | None = None, **options: Unpack[ExplainOptions]) -> Cost:
        """Return the cost of a request without running it. It needs no image.

        Args:
            timeout: Timeout in seconds, instead of the client's.
            **options: The options of ``explain``.

        Raises:
            CamserveError: ``explain`` would reject these options too.

        Example:
            >>> await client.estimate_cost(methods=["gradcam", ("rise", {"samples": 1000})], top_k=2)
            Cost(rows=2002, explanations=4, max_rows=16384)
        """
        request = cost_request(**self._named(options))
        return decode_cost(await self._call(lambda stubs: stubs.explain.EstimateCost, request, timeout))

    @overload
    def explain_many(
        self,
        images: Iterable[ImageItem] | AsyncIterable[ImageItem],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        **options: Unpack[ExplainOptions],
    ) -> AsyncGenerator[Result, None]: ...
    @overload
    def explain_many(
        self,
        images: Iterable[ImageItem] | AsyncIterable[ImageItem],
        *,
        progress: bool = ...,
        in_flight: int = ...,
        on_error: Literal["return"],
        timeout: float | None = ...,
        **options: Unpack[ExplainOptions],
    ) -> AsyncGenerator[Result | CamserveError, None]: ...
    def explain_many(
        self,
        images: Iterable[ImageItem] | AsyncIterable[ImageItem],
        *,
        progress: bool = False,
        in_flight: int = DEFAULT_IN_FLIGHT,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        **options: Unpack[ExplainOptions],
    ) -> AsyncGenerator[Any, None]:
        """Explain many images over one stream; yield the results in the order of the images.

        Images are read as they are needed, so the iterable may be endless. A stream that breaks is
        opened again, and unanswered images are sent again.
        To leave the loop early, use ``contextlib.aclosing``: otherwise the stream ends only when
        Python collects the generator.

        Args:
            images: Images as for ``explain``, in an iterable or an asynchronous iterable. An image with
                options of its own is a dict: ``{"image": "cat.jpg", "targets": ["tabby"]}``.
            progress: True to draw a progress bar on standard error.
            in_flight: The largest number of images that are read ahead of the last yielded result. No further
                one is read while their files have 128 MiB.
            on_error: "raise", or "return" to yield an image's error in place of its result. The
                loss of the server is always raised.
            timeout: Seconds that the server may take for one image, instead of the client's. The server
                may work on all images in flight at once, so it may be silent for that time for each.
            **options: Options of the explanation: see ``ExplainOptions``.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> images = ["cat.jpg", {"image": "cat.jpg", "targets": ["tiger cat"]}, b"no image"]
            >>> async for result in client.explain_many(images, on_error="return", max_side=200):
            ...     print(repr(result) if isinstance(result, camserve.CamserveError) else result.explanations[0].title)
            Egyptian cat
            tiger cat
            InvalidArgument(...)
        """
        seconds = self._settings.timeout_for(timeout)
        window = InFlightWindow(in_flight, self._settings.retry, seconds, on_error)
        question = explain_request(**self._named(options))
        question.progress = progress
        images = refuse_single_image(images)
        bar = progress_bar(images, shown=progress)
        return self._explain_stream(images, question, window, bar, self._named(options))

    async def _explain_one(
        self,
        question: ExplainRequest,
        image: ImageLike,
        on_progress: OnProgress | None,
        timeout: float | None,
    ) -> Result:
        if on_progress is not None:
            return await self._explain_with_progress(image, question, on_progress, timeout)
        request = await transport.run_blocking(lambda: with_image(question, self._file_of(image)))
        return decode_result(await self._call(lambda stubs: stubs.explain.Explain, request, timeout), request.targets)
