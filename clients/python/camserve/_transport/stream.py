"""State of the images that a client explains over streams: those in flight and what to do next.

This module does no I/O, so both clients share it. A client repeats four steps: add an image if the window has room,
send the requests that are due, handle the next event, and yield the finished outcomes. The window makes every decision,
except which stream a request is sent on: a client has one on each of its connections.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import grpc
from PIL import Image

from camserve._codec.explain import explain_request, with_image
from camserve._codec.images import image_bytes
from camserve._codec.results import decode_outcome
from camserve._core.errors import CamserveError, DeadlineExceeded, InvalidArgument, StatusLost, Unavailable
from camserve._transport.retry import Retry, StreamAttempts, is_starting
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from camserve._show.progress import Rows
    from camserve._values.options import ExplainOptions
    from camserve._values.result import Result

Outcome: TypeAlias = "Result | CamserveError"
"""Result of one image, or its error."""

Event: TypeAlias = "explain_pb2.ExplainStreamResponse | StreamBreak | None"
"""A response, the end of a stream, or None if neither arrived in time."""

PreparedRequest: TypeAlias = "explain_pb2.ExplainRequest | CamserveError | None"
"""Request for one image, the error of an image that cannot be read, or None after the last image."""

T = TypeVar("T")

END: Final = object()
"""Takes the place of an image after the last one."""

MAX_WINDOW_BYTES: Final = 128 << 20
"""Bytes of requests that are read and not yet answered, after which no other image is read.

They are those of 16 images with the 8 MiB that a server accepts by default, and are held several times.
"""

STREAM_END_TIMEOUT: Final = 1.0
"""Seconds that the server may take to end a stream after its last response."""

MAX_PROGRESS_WAITING: Final = 8
"""Messages of progress on a stream that may wait for the program. Each may be as large as a response."""

_MAX_WAIT: Final = 3600.0  # seconds

# Streams that may break with an image in flight, for each try that its retries allow, although other images have been
# answered meanwhile. Without a limit, an image that crashes every process it reaches would be sent forever.
_BREAKS_PER_RETRY: Final = 5

# A stream that ends with one of these codes would end the same way again, whatever is sent.
_FATAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def stream_ended() -> Unavailable:
    """Return the error of a stream that ended with status OK before the last response, as when a server drains."""
    return Unavailable("the server ended the stream")


def is_final(response: explain_pb2.ExplainStreamResponse) -> bool:
    """Return True if a response is the last one to its request: a result or an error, but not progress."""
    return response.WhichOneof("outcome") in {"response", "error"}


@dataclass(frozen=True, slots=True)
class StreamBreak:
    """The end of a stream.

    Attributes:
        error: The error that ended it.
        unanswered: Ids of the requests that were sent on it and have no response.
    """

    error: CamserveError
    unanswered: frozenset[str]


@dataclass(slots=True)
class _Slot:
    """State of one image: waiting to be sent, in flight, or finished.

    Attributes:
        request: The request; None once the image is finished.
        send_at: The time from which to send it; None while it is in flight or finished.
        tries: The number of times it was sent.
        outcome: The result or the error; None until the image is finished.
        rows: The last progress that the server reported.
        size: Size of the request in bytes; 0 once the image is finished.
    """

    request: explain_pb2.ExplainRequest | None
    send_at: float | None = None
    tries: int = 0
    outcome: Outcome | None = None
    rows: Rows | None = None
    size: int = 0

    @property
    def in_flight(self) -> bool:
        return self.send_at is None and self.outcome is None


class InFlightWindow:
    """Bounded window of images between the input iterable and the consumer, in their order.

    After a stream breaks, the client opens another one, and the window sends its images in flight again. If the
    status shows that a request caused the break, the images that were in flight are sent one at a time. Only the image
    that breaks the stream again fails.

    Args:
        limit: The largest number of images that are read and not yet yielded. Fewer are read if their requests have
            ``MAX_WINDOW_BYTES``.
        retry: The rule for sending a request again.
        timeout: Seconds that the server may take for one image.
        on_error: How ``pop_finished`` reports the error of an image: "raise" or "return".

    Raises:
        InvalidArgument: An argument is out of range.
    """

    def __init__(self, limit: int, retry: Retry, timeout: float, on_error: str) -> None:
        if limit < 1:
            raise InvalidArgument(f"in_flight must be at least 1, not {limit}")
        if on_error not in {"raise", "return"}:
            raise InvalidArgument(f"on_error must be 'raise' or 'return', not {on_error!r}")
        self._raises = on_error == "raise"
        self._limit = limit
        self._retry = retry
        self._timeout = timeout
        self._id_prefix = uuid.uuid4().hex
        self._slots: dict[str, _Slot] = {}
        self._suspects: set[str] = set()
        self._images_added = 0
        self._last_activity = 0.0
        self._input_ended = False
        self._progress_changed = False
        self._attempts = StreamAttempts(retry, timeout)

    @property
    def server_starts(self) -> bool:
        """True if the window waits because the server is starting."""
        return self._attempts.wait_for_start

    @property
    def has_room(self) -> bool:
        """True if another image may be added."""
        size = sum(slot.size for slot in self._slots.values())
        return not self._input_ended and len(self._slots) < self._limit and size < MAX_WINDOW_BYTES

    @property
    def done(self) -> bool:
        """True once the input has ended and every outcome was yielded."""
        return self._input_ended and not self._slots

    def add(self, prepared: PreparedRequest) -> None:
        """Add the request or the error of the next image, or None after the last one."""
        if prepared is None:
            self._input_ended = True
            return
        key = f"{self._id_prefix}-{self._images_added}"
        if isinstance(prepared, CamserveError):
            self._slots[key] = _Slot(None, outcome=prepared)
        else:
            self._slots[key] = _Slot(prepared, send_at=0.0, size=prepared.ByteSize())
        self._images_added += 1

    def take_due(self) -> list[explain_pb2.ExplainStreamRequest]:
        """Return the requests to send now, and mark them as in flight."""
        now = time.monotonic()
        free = (1 if self._suspects else self._limit) - len(self._keys_in_flight())
        waiting = [key for key, slot in self._slots.items() if slot.send_at is not None and slot.send_at <= now]
        due = waiting[: max(free, 0)]
        for key in due:
            self._slots[key].send_at = None
            self._slots[key].tries += 1
            self._last_activity = now
        return [explain_pb2.ExplainStreamRequest(request_id=key, request=self._slots[key].request) for key in due]

    def seconds_to_wait(self) -> float:
        """Return the number of seconds to wait for the next event; 0 while the window has room."""
        if self.has_room:
            return 0.0
        times = [slot.send_at for slot in self._slots.values() if slot.send_at is not None]
        if self._keys_in_flight():
            # A request that is already due waits for those in flight, not for the clock.
            times = [send_at for send_at in times if send_at > time.monotonic()]
            times.append(self._silence_deadline())
        return min(_MAX_WAIT, max(0.0, min(times, default=0.0) - time.monotonic()))

    def handle(self, event: Event) -> None:
        """Process a response, the end of a stream, or the absence of both.

        Raises:
            CamserveError: The explanation of the images cannot continue.
        """
        if isinstance(event, explain_pb2.ExplainStreamResponse):
            self._handle_response(event)
        elif event is not None:
            self._handle_break(event)
        elif self._keys_in_flight() and time.monotonic() >= self._silence_deadline():
            silence = time.monotonic() - self._last_activity
            raise DeadlineExceeded(f"the server sent nothing for {silence:.3g} s")

    def pop_finished(self) -> Iterator[Outcome]:
        """Yield finished outcomes in the order of the images, up to the first image that is not finished.

        Raises:
            CamserveError: The error of an image, if errors are to be raised.
        """
        while self._slots:
            key, slot = next(iter(self._slots.items()))
            if slot.outcome is None:
                return
            del self._slots[key]
            if self._raises and isinstance(slot.outcome, CamserveError):
                raise slot.outcome
            yield slot.outcome

    def take_progress(self) -> list[Rows]:
        """Return the last reported progress of each image in flight; empty if unchanged since the last call."""
        if not self._progress_changed:
            return []
        self._progress_changed = False
        return [slot.rows for slot in self._slots.values() if slot.in_flight and slot.rows]

    def _keys_in_flight(self) -> list[str]:
        return [key for key, slot in self._slots.items() if slot.in_flight]

    def _silence_deadline(self) -> float:
        # A server may work on all images in flight at once and finish them together.
        return self._last_activity + self._timeout * len(self._keys_in_flight())

    def _handle_response(self, response: explain_pb2.ExplainStreamResponse) -> None:
        slot = self._slots.get(response.request_id)
        if slot is None or not slot.in_flight:
            return  # it answers no open request, so it does not count as a sign of life
        self._last_activity = time.monotonic()
        if response.WhichOneof("outcome") == "progress":
            slot.rows = (response.progress.rows_done, response.progress.rows_total)
            self._progress_changed = True
            return
        outcome = decode_outcome(response, slot.request.targets if slot.request else ())
        if outcome is None:
            return
        # Progress does not reset the count. Otherwise a request that crashes the server halfway is sent forever.
        self._attempts.succeeded()
        if isinstance(outcome, CamserveError):
            self._retry_or_fail(response.request_id, outcome)
        else:
            self._finish(response.request_id, outcome)

    def _retry_or_fail(self, key: str, error: CamserveError) -> None:
        slot = self._slots[key]
        pause = self._retry.pause(slot.tries, error)
        if pause is None or pause > self._timeout:
            self._finish(key, error)
        else:
            slot.send_at = time.monotonic() + pause

    def _finish(self, key: str, outcome: Outcome) -> None:
        slot = self._slots[key]
        # Drop the request: it holds the photo's bytes, and the consumer may be slow.
        slot.outcome, slot.request, slot.size = outcome, None, 0
        self._suspects.discard(key)

    def _handle_break(self, end: StreamBreak) -> None:
        error = end.error
        lost = [key for key in self._keys_in_flight() if key in end.unanswered]
        if error.code in _FATAL_CODES:
            raise error
        if not lost:
            return
        if error.code is grpc.StatusCode.UNAVAILABLE:
            # Sent one at a time, a request is fully written before the server responds, so gRPC keeps the status.
            self._suspects.update(lost if isinstance(error, StatusLost) else ())
            self._resend(lost, error)
        elif len(lost) == 1:
            self._retry_or_fail(lost[0], error)
        else:
            self._suspects.update(lost)
            for key in lost:
                self._slots[key].send_at = 0.0

    def _resend(self, lost: list[str], error: CamserveError) -> None:
        send_at = time.monotonic() + self._attempts.pause(error)
        for key in lost:
            slot = self._slots[key]
            slot.tries -= is_starting(error)
            if slot.tries > _BREAKS_PER_RETRY * (self._retry.attempts + 1):
                self._finish(key, error)
            else:
                slot.send_at = send_at


def prepare_request(
    question: explain_pb2.ExplainRequest,
    item: object,
    file_of: Callable[[Any], bytes] = image_bytes,
    options: ExplainOptions | None = None,
) -> PreparedRequest:
    """Build the request for an image; return the error of an image that cannot be read, and None for ``END``.

    Args:
        question: The request without its image.
        item: The image; an ``ImageWithOptions`` if there are options.
        file_of: Function that returns an image as the bytes of a file.
        options: The options of all images, with which the question was built.
    """
    if item is END:
        return None
    try:
        if options is not None and isinstance(item, Mapping):
            question, item = _own_question(dict(cast("Mapping[str, Any]", item)), options, question)
        return with_image(question, file_of(item))
    except CamserveError as error:
        return error


def _own_question(
    own: dict[str, Any], options: ExplainOptions, question: explain_pb2.ExplainRequest
) -> tuple[explain_pb2.ExplainRequest, object]:
    """Return the request and the image of an item with options of its own."""
    if "image" not in own:
        raise InvalidArgument('an item of images is an image, or a dict with "image" and options')
    image = own.pop("image")
    merged: dict[str, Any] = {**options, **own}
    own_question = explain_request(**merged)
    own_question.progress = question.progress
    return own_question, image


def refuse_single_image(images: T, call: str = "explain_many", single: str = "explain") -> T:
    """Return the images of a call, unless they are one image: a path would be read letter by letter.

    Raises:
        InvalidArgument: It is one image.
    """
    if isinstance(images, str | bytes | os.PathLike | Image.Image | Mapping):
        raise InvalidArgument(f"{call} takes several images; {single} takes one")
    return images
