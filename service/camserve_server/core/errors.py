"""Errors of the server. `api.statuses.STATUS` maps each one to its gRPC status.

ServiceError
├── InvalidArgument      a field or the image is invalid, whatever the server's state
├── NotFound             no such model, layer, label or method
├── FailedPrecondition   valid parts that cannot be combined, such as a method and a layer that it cannot explain
├── ResourceExhausted    no capacity now; `retry_after` says when to retry
│   └── OutOfMemory      the device has no memory for a batch of this size
├── DeadlineExceeded     the caller's deadline has passed
├── Unauthenticated      no token, or an unknown one
├── PermissionDenied     the token's roles do not allow the call
├── Unavailable          the server is starting or draining, or has lost its worker
│   └── WorkerLost       the worker process ended while it ran the request
└── Internal             a fault of the server; the log has the details
"""

import difflib
import heapq
import re
from collections.abc import Collection, Iterable
from typing import Self

LONGEST_NAME = 200  # characters of a name that gets a hint or is in one
MANY_NAMES = 300  # names whose letters are counted, at most; this takes some microseconds each
LONGEST_SPELLED = 40  # characters of names that are compared letter by letter; the time may grow with their cube
MANY_SPELLED = 8  # names that are compared letter by letter, at most
SUGGESTED = 4  # names in one hint

_WORD = re.compile(r"\w+")


class ServiceError(Exception):
    """Base of the errors that are returned to callers.

    Args:
        message: the fault, in words for the caller; never contains a path, an address or a traceback.
        field: path of the request's invalid field, such as `targets[0].label`; empty if no field is at fault.
        retry_after: seconds after which a retry makes sense.
        shed_reason: the state of the server that made it refuse a valid request, as one word for the metrics.

    Attributes:
        fault: the message without the field's name; empty if the message does not begin with a field's name.

    Example:
        >>> from camserve_server import models
        >>> from camserve_server.core.errors import NotFound
        >>> try:
        ...     raise NotFound('unknown layer "layer5"', field="layers[0]")
        ... except ServiceError as error:
        ...     print(f"{error.field}: {error.message}")
        layers[0]: unknown layer "layer5"
    """

    shed_reason = ""
    fault = ""

    def __init__(
        self, message: str, *, field: str = "", retry_after: float | None = None, shed_reason: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.shed_reason = shed_reason or self.shed_reason

    @classmethod
    def of_field(cls, field: str, fault: str) -> Self:
        """Return an error whose message is the name of a field followed by its fault.

        Example:
            >>> error = InvalidArgument.of_field("top_k", "must be 1 to 16, not 17")
            >>> error.message, error.field, error.fault
            ('top_k must be 1 to 16, not 17', 'top_k', 'must be 1 to 16, not 17')
        """
        error = cls(f"{field} {fault}", field=field)
        error.fault = fault
        return error


class InvalidArgument(ServiceError):
    """A field or the image is invalid, whatever the server's state."""


class NotFound(ServiceError):
    """The model, layer, label or method does not exist."""


class FailedPrecondition(ServiceError):
    """The parts of the request are valid, but cannot be combined."""


class ResourceExhausted(ServiceError):
    """The server has no capacity now."""


class OutOfMemory(ResourceExhausted):
    """The device has no memory for a batch of this size."""

    shed_reason = "out_of_memory"


class DeadlineExceeded(ServiceError):
    """The caller's deadline passed before the work was done."""


class Unauthenticated(ServiceError):
    """The caller sent no token, or an unknown one."""


class PermissionDenied(ServiceError):
    """The roles of the caller's token do not allow the call."""


class Unavailable(ServiceError):
    """The server is starting or draining, or has lost its worker."""


class WorkerLost(Unavailable):
    """The worker process ended before it answered.

    Args:
        message: the reason why it ended.
        process_id: ID of the process that ran the request; 0 if none did.
        others: number of other requests that the process had.
    """

    shed_reason = "engine_lost"

    def __init__(self, message: str, *, process_id: int = 0, others: int = 0) -> None:
        super().__init__(message, retry_after=1.0)
        self.process_id = process_id
        self.others = others


class Internal(ServiceError):
    """A fault of the server; the log has the details."""


class ConfigError(Exception):
    """The configuration or one of its models cannot be used. It is shown to operators and never sent to callers.

    Example:
        >>> from camserve_server import models
        >>> try:
        ...     models.parse("timm:resnet50?wieghts=none")
        ... except ConfigError as error:
        ...     print(error)
        model "timm:resnet50?wieghts=none" has no option "wieghts" (did you mean "weights"?): weights, ...
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint ` (did you mean "…"?)` with the known names that have all words of a name, else with the nearest.

    Names of more than LONGEST_NAME characters get no hint, and are in none.

    Example:
        >>> did_you_mean("cat", ["crate", "tiger cat", "cat flap", "Egyptian cat"])
        ' (did you mean "tiger cat", "Egyptian cat" or "cat flap"?)'
        >>> did_you_mean("grdcam", ["gradcam", "saliency"])
        ' (did you mean "gradcam"?)'
        >>> did_you_mean("xyz", ["gradcam"])
        ''
    """
    if len(name) > LONGEST_NAME:
        return ""
    by_lower = {candidate.lower(): candidate for candidate in known if len(candidate) <= LONGEST_NAME}
    matches = _with_words_of(name.lower(), by_lower) or _spelled_like(name.lower(), by_lower)
    quoted = [f'"{by_lower[match]}"' for match in matches]
    return f" (did you mean {' or '.join(filter(None, (', '.join(quoted[:-1]), quoted[-1])))}?)" if quoted else ""


def _with_words_of(name: str, known: Collection[str]) -> list[str]:
    """Return up to four known names that have all words of a name, those that end with its last word first."""
    words = list(dict.fromkeys(_WORD.findall(name)))
    if not words:
        return []
    candidates = list(known)
    for word in words:
        candidates = [candidate for candidate in candidates if word in candidate]
    candidates = [candidate for candidate in candidates if not set(words).difference(_WORD.findall(candidate))]
    candidates.sort(key=lambda candidate: (not candidate.endswith(words[-1]), len(candidate), candidate))
    return candidates[:SUGGESTED]


def _spelled_like(name: str, known: Iterable[str]) -> list[str]:
    """Return the most similar known name, if one is similar enough.

    This runs on the event loop, and `known` may come from a caller. So only the names that have most letters in common
    with `name` are compared with it letter by letter, and no long ones.
    """
    if len(name) > LONGEST_SPELLED:
        return []
    names = [candidate for candidate in known if len(candidate) <= LONGEST_SPELLED]
    if len(names) > MANY_NAMES:
        names = [candidate for candidate in names if candidate.startswith(name[:1])]
        names = sorted(names, key=lambda candidate: abs(len(candidate) - len(name)))[:MANY_NAMES]
    letters = difflib.SequenceMatcher(b=name)

    def in_common(candidate: str) -> float:
        letters.set_seq1(candidate)
        return letters.quick_ratio()

    return difflib.get_close_matches(name, heapq.nlargest(MANY_SPELLED, names, key=in_common), n=1, cutoff=0.6)
