"""What is under way on a stream, and what to do next: no I/O, so that both clients share it.

A client turns in a circle: take an image if there is room, send what is due, hear what came, hand
on what is ready. The window decides; the client only does.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import grpc
from PIL import Image

from camserve import _codec
from camserve._errors import (
    CamserveError,
    DeadlineExceeded,
    InvalidArgument,
    StatusLost,
    Unavailable,
)
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from camserve._progress import Rows
    from camserve._result import Result
    from camserve._retry import Retry

Outcome: TypeAlias = "Result | CamserveError"
Event: TypeAlias = "explain_pb2.ExplainStreamResponse | CamserveError | None"

Asked: TypeAlias = "explain_pb2.ExplainRequest | CamserveError | None"

T = TypeVar("T")

END: Final = object()

# Seconds that a server has to end a stream after its last answer.
FAREWELL: Final = 1.0

_LONGEST_WAIT: Final = 3600.0

# A stream that ends with one of these would end so again, whatever is sent.
_HOPELESS: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def ended() -> Unavailable:
    """Return what a stream that ended well, yet too early, comes to: a server that drains."""
    return Unavailable("the server ended the stream")


@dataclass(slots=True)
class _Slot:
    """One image: waiting to be sent from ``due`` on, or under way, or answered."""

    request: explain_pb2.ExplainRequest | None
    due: float | None = None
    tries: int = 0
    outcome: Outcome | None = None
    rows: Rows | None = None

    @property
    def under_way(self) -> bool:
        return self.due is None and self.outcome is None


class InFlightWindow:
    """The images between the reader and the consumer, at most so many, in their order.

    A stream that breaks is opened again and what was under way is sent again. Where the status
    says that a request was at fault, not the connection, those that were under way are sent one at
    a time until the culprit is found: it alone fails.

    Args:
        limit: How many images may be taken and not yet handed on.
        retry: When to send again.
        timeout: Seconds that the server may take for one image.
        on_error: What ``ready`` does with the error of an image: "raise", or "return" it.

    Raises:
        InvalidArgument: An argument is out of range.
    """

    def __init__(self, limit: int, retry: Retry, timeout: float, on_error: str) -> None:
        if limit < 1:
            raise InvalidArgument(f"in_flight must be at least 1, not {limit}")
        if on_error not in {"raise", "return"}:
            raise InvalidArgument(f"on_error is 'raise' or 'return', not {on_error!r}")
        self._raising = on_error == "raise"
        self._limit = limit
        self._retry = retry
        self._timeout = timeout
        self._name = uuid.uuid4().hex
        self._slots: dict[str, _Slot] = {}
        self._suspects: set[str] = set()
        self._taken = 0
        self._breaks = 0
        self._heard = 0.0
        self._ended = False
        self._news = False

    @property
    def room(self) -> bool:
        """Whether to take another image."""
        return not self._ended and len(self._slots) < self._limit

    @property
    def done(self) -> bool:
        """Whether every image was handed on and no more will come."""
        return self._ended and not self._slots

    def take(self, request: Asked) -> None:
        """Accept the request of one more image, or why there is none; None after the last."""
        if request is None:
            self._ended = True
            return
        if isinstance(request, CamserveError):
            self._add(_Slot(None, outcome=request))
        else:
            self._add(_Slot(request, due=0.0))

    def _add(self, slot: _Slot) -> None:
        self._slots[f"{self._name}-{self._taken}"] = slot
        self._taken += 1

    def due(self) -> list[explain_pb2.ExplainStreamRequest]:
        """Return what to send now, and hold it for under way."""
        now = time.monotonic()
        free = (1 if self._suspects else self._limit) - len(self._under_way())
        waiting = [k for k, v in self._slots.items() if v.due is not None and v.due <= now]
        chosen = waiting[: max(free, 0)]
        for key in chosen:
            self._slots[key].due = None
            self._slots[key].tries += 1
            self._heard = now
        return [explain_pb2.ExplainStreamRequest(request_id=k, request=self._slots[k].request) for k in chosen]

    def patience(self) -> float:
        """Return how many seconds to wait for the next event; 0 while there is room."""
        if self.room:
            return 0.0
        ends = [slot.due for slot in self._slots.values() if slot.due is not None]
        if self._under_way():
            # What is due already waits for those under way, not for the clock.
            ends = [due for due in ends if due > time.monotonic()]
            ends.append(self._silent_until())
        return min(_LONGEST_WAIT, max(0.0, min(ends, default=0.0) - time.monotonic()))

    def hear(self, event: Event) -> None:
        """Take in an answer, the error that a stream broke with, or that nothing came.

        Raises:
            CamserveError: The stream cannot go on.
        """
        if isinstance(event, explain_pb2.ExplainStreamResponse):
            self._answered(event)
        elif event is not None:
            self._broken(event)
        elif self._under_way() and time.monotonic() >= self._silent_until():
            silence = time.monotonic() - self._heard
            raise DeadlineExceeded(f"the server said nothing for {silence:.3g} s")

    def ready(self) -> Iterator[Outcome]:
        """Hand on what comes next in the order of the images, as far as it is there.

        Raises:
            CamserveError: That of an image, where errors are to be raised.
        """
        while self._slots:
            key, slot = next(iter(self._slots.items()))
            if slot.outcome is None:
                return
            del self._slots[key]
            if self._raising and isinstance(slot.outcome, CamserveError):
                raise slot.outcome
            yield slot.outcome

    def news(self) -> list[Rows]:
        """Return how far each image under way has come, as far as known; nothing if it is no news."""
        if not self._news:
            return []
        self._news = False
        return [slot.rows for slot in self._slots.values() if slot.under_way and slot.rows]

    def _under_way(self) -> list[str]:
        return [key for key, slot in self._slots.items() if slot.under_way]

    def _silent_until(self) -> float:
        # A server may work on all of them at once and end them together.
        return self._heard + self._timeout * len(self._under_way())

    def _answered(self, reply: explain_pb2.ExplainStreamResponse) -> None:
        slot = self._slots.get(reply.request_id)
        if slot is None or not slot.under_way:
            return  # not an answer to any open request, so it does not count as a sign of life
        self._heard = time.monotonic()
        if reply.WhichOneof("outcome") == "progress":
            slot.rows, self._news = (reply.progress.rows_done, reply.progress.rows_total), True
            return
        outcome = _codec.outcome(reply, slot.request.targets if slot.request else ())
        if outcome is None:
            return
        # Not by progress: a request that brings the server down half way would be sent for ever.
        self._breaks = 0
        if isinstance(outcome, CamserveError):
            self._failed(reply.request_id, outcome)
        else:
            self._settle(reply.request_id, outcome)

    def _failed(self, key: str, error: CamserveError) -> None:
        slot = self._slots[key]
        pause = self._retry.pause(slot.tries, error)
        if pause is None or pause > self._timeout:
            self._settle(key, error)
        else:
            slot.due = time.monotonic() + pause

    def _settle(self, key: str, outcome: Outcome) -> None:
        slot = self._slots[key]
        # The photo's bytes are not needed any more, and the consumer may be slow.
        slot.outcome, slot.request = outcome, None
        self._suspects.discard(key)

    def _broken(self, error: CamserveError) -> None:
        lost = self._under_way()
        if error.code in _HOPELESS:
            raise error
        if not lost:
            return
        if error.code is grpc.StatusCode.UNAVAILABLE:
            # One at a time a request is written whole before the server answers it.
            self._suspects.update(lost if isinstance(error, StatusLost) else ())
            self._send_again(lost, error)
        elif len(lost) == 1:
            self._failed(lost[0], error)
        else:
            self._suspects.update(lost)
            for key in lost:
                self._slots[key].due = 0.0

    def _send_again(self, lost: list[str], error: CamserveError) -> None:
        self._breaks += 1
        pause = self._retry.pause(self._breaks, error)
        if pause is None or pause > self._timeout:
            raise error
        for key in lost:
            self._slots[key].due = time.monotonic() + pause


def asked(
    question: explain_pb2.ExplainRequest, image: object, file_of: Callable[[Any], bytes] = _codec.image_bytes
) -> Asked:
    """Build the request for an image; for one that cannot be read, say why; None for END."""
    if image is END:
        return None
    try:
        return _codec.with_image(question, file_of(image))
    except CamserveError as error:
        return error


def many(images: T) -> T:
    """Refuse one image where many are expected; a path would be taken letter by letter.

    Raises:
        InvalidArgument: That.
    """
    if isinstance(images, str | bytes | os.PathLike | Image.Image):
        raise InvalidArgument("explain_many takes several images; explain takes one")
    return images
