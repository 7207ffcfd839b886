"""Explanations over a stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

from camserve import _codec, _stream
from camserve import _transport_async as transport
from camserve._async.connection import Calls
from camserve._progress import CallbackProgress

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Iterable
    from contextlib import AbstractContextManager

    from camserve._progress import OnProgress, ProgressReporter
    from camserve._result import Result
    from camserve.v1 import explain_pb2


class StreamCalls(Calls):
    """Explanations over a stream: of many images, or of one image with its progress."""

    async def _explain_stream(
        self,
        images: Iterable[_codec.ImageItem] | AsyncIterable[_codec.ImageItem],
        question: explain_pb2.ExplainRequest,
        window: _stream.InFlightWindow,
        progress: AbstractContextManager[ProgressReporter],
        options: _codec.ExplainOptions | None = None,
    ) -> AsyncGenerator[_stream.Outcome, None]:
        source = transport.iterate(images)
        with progress as reporter:
            async with transport.Streams(self._pool, self._settings) as streams:
                while not window.done:
                    if window.has_room:
                        item = await anext(source, _stream.END)
                        window.add(
                            await transport.run_blocking(
                                _stream.prepare_request, question, self._named(item), self._file_of, options
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
        image: _codec.ImageLike,
        question: explain_pb2.ExplainRequest,
        on_progress: OnProgress,
        timeout: float | None,
    ) -> Result:
        window = _stream.InFlightWindow(1, self._settings.retry, self._settings.timeout_for(timeout), "raise")
        question.progress = True
        outcomes = self._explain_stream((image,), question, window, nullcontext(CallbackProgress(on_progress)))
        # The whole stream is consumed, so that it ends without being cancelled.
        (result,) = [outcome async for outcome in outcomes]
        return cast("Result", result)
