"""Explanations over a stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from camserve._async.connection import Calls
from camserve._show.progress import CallbackProgress, OnProgress, ProgressReporter
from camserve._transport import aio as transport
from camserve._transport.stream import END, InFlightWindow, Outcome, prepare_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterable
    from contextlib import AbstractContextManager

    from camserve._codec.explain import ExplainRequest
    from camserve._values.options import ExplainOptions, ImageItem, ImageLike
    from camserve._values.result import Result


class StreamCalls(Calls):
    """Explanations over a stream: of many images, or of one image with its progress."""

    async def _explain_stream(
        self,
        images: Iterable[ImageItem] | AsyncIterable[ImageItem],
        question: ExplainRequest,
        window: InFlightWindow,
        progress: AbstractContextManager[ProgressReporter],
        options: ExplainOptions | None = None,
    ) -> AsyncGenerator[Outcome, None]:
        source = transport.iterate(images)
        with progress as reporter:
            async with transport.Streams(self._pool, self._settings) as streams:
                while not window.done:
                    if window.has_room:
                        item = await anext(source, END)
                        window.add(
                            await transport.run_blocking(
                                prepare_request, question, self._named(item), self._file_of, options
                            )
                        )
                    await streams.send(window.take_due())
                    window.handle(await streams.next_event(window.seconds_to_wait()))
                    self._notice_start(waiting=window.server_starts)
                    if rows := window.take_progress():
                        reporter.rows_done(rows)
                    for outcome in window.pop_finished():
                        reporter.image_done()
                        yield outcome
                await streams.finish()

    async def _explain_with_progress(
        self,
        image: ImageLike,
        question: ExplainRequest,
        on_progress: OnProgress,
        timeout: float | None,
    ) -> Result:
        window = InFlightWindow(1, self._settings.retry, self._settings.timeout_for(timeout), "raise")
        question.progress = True
        outcomes = self._explain_stream((image,), question, window, nullcontext(CallbackProgress(on_progress)))
        # The whole stream is consumed, so that it ends without being cancelled.
        (result,) = [outcome async for outcome in outcomes]
        return cast("Result", result)
