"""What can go wrong, in camserve's own words; `statuses.STATUS` says what each is on the wire.

ServiceError
├── InvalidArgument      a field or the image is wrong, whatever the server's state
├── NotFound             no such model, layer, label or method
├── FailedPrecondition   it exists, but not together: a method that cannot explain a layer
├── ResourceExhausted    no room now; `retry_after` says when to come again
│   └── OutOfMemory      on the device, for a batch of this size
├── DeadlineExceeded     too late to be worth computing
├── Unauthenticated      no token, or none that is known
├── PermissionDenied     a token that is not for this
├── Unavailable          starting, draining, or the engine is gone
│   └── WorkerLost       while it ran this
└── Internal             our fault; the log has the rest
"""

import difflib
import re
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Self

LONGEST_NAME = 200  # characters; the comparison takes time that grows with their square
MANY_NAMES = 1000  # compared letter by letter
SUGGESTED = 4

_WORD = re.compile(r"\w+")


class ServiceError(Exception):
    """A refusal or failure that a caller may read.

    Args:
        message: what is wrong, in words for the caller; never a path, an address or a traceback.
        field: path of the request's field at fault, such as `targets[0].label`; empty if none is.
        retry_after: seconds after which trying again makes sense.
        shed: where the server's state is to blame and not the request, which state that is, in a word that is counted.

    Attributes:
        fault: the message without the name of the field that it begins with; empty where it begins with no field.
    """

    shed = ""
    fault = ""

    def __init__(self, message: str, *, field: str = "", retry_after: float | None = None, shed: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after
        self.shed = shed or self.shed

    @classmethod
    def of_field(cls, field: str, fault: str) -> Self:
        """Return an error whose message is the name of a field and what is wrong with it."""
        error = cls(f"{field} {fault}", field=field)
        error.fault = fault
        return error


class InvalidArgument(ServiceError):
    """A field or the image is wrong, whatever the server's state."""


class NotFound(ServiceError):
    """No such model, layer, label or method."""


class FailedPrecondition(ServiceError):
    """The parts exist, but cannot be used together."""


class ResourceExhausted(ServiceError):
    """No room now."""


class OutOfMemory(ResourceExhausted):
    """The device has no memory for a batch of this size."""

    shed = "out_of_memory"


class DeadlineExceeded(ServiceError):
    """The caller's deadline passed before the work was done."""


class Unauthenticated(ServiceError):
    """The caller showed no token, or none that is known."""


class PermissionDenied(ServiceError):
    """The caller's token is not for this."""


class Unavailable(ServiceError):
    """The server is starting, draining, or has lost its engine."""


class WorkerLost(Unavailable):
    """The worker process of an engine ended before it answered.

    Args:
        message: why it ended.
        process_id: the process that was working on this request; 0 if none was.
        others: how many other requests the process had.
    """

    shed = "engine_lost"

    def __init__(self, message: str, *, process_id: int = 0, others: int = 0) -> None:
        super().__init__(message, retry_after=1.0)
        self.process_id = process_id
        self.others = others


class Internal(ServiceError):
    """Our fault; the log has the rest."""


class ConfigError(Exception):
    """The configuration, or a model that it names, cannot be used; for the operator, never on the wire."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean "…"?)` with the known names that have all words of a name, else with the nearest name.

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
    by_lower = {k.lower(): k for k in known}
    near = _with_words_of(name.lower(), by_lower) or _spelled_like(name.lower(), by_lower)
    named = [f'"{by_lower[each]}"' for each in near]
    return f" (did you mean {' or '.join(filter(None, (', '.join(named[:-1]), named[-1])))}?)" if named else ""


def _with_words_of(name: str, known: Collection[str]) -> list[str]:
    """Return a few known names that have all words of a name; names that end with its last word come first."""
    words = list(dict.fromkeys(_WORD.findall(name)))
    if not words:
        return []
    likely = [each for each in known if all(word in each for word in words)]
    likely.sort(key=lambda each: (not each.endswith(words[-1]), len(each), each))
    whole = [re.compile(rf"\b{word}\b") for word in words]
    return list(islice((each for each in likely if all(word.search(each) for word in whole)), SUGGESTED))


def _spelled_like(name: str, known: Collection[str]) -> list[str]:
    """Return the most similar known name, if one is similar enough."""
    names = known
    if len(names) > MANY_NAMES:  # the comparison blocks the event loop: 50 us a name
        names = [each for each in names if each[:1] == name[:1]]
        names = sorted(names, key=lambda each: abs(len(each) - len(name)))[:MANY_NAMES]
    return difflib.get_close_matches(name, names, n=1, cutoff=0.6)
