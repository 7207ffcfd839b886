"""The statuses, reasons and verdicts, from the tables of the server, the client and HTTP."""

from collections.abc import Mapping

from grpc import StatusCode

from camserve._core.errors import STATUS as EXCEPTIONS
from camserve._transport.retry import RETRYABLE
from camserve.web import connect
from camserve_server.api.statuses import STATUS
from camserve_server.jobs.verdict import Verdict
from camserve_server.telemetry.prometheus import SHED_REASONS
from reference.markdown import code, table


def parts() -> Mapping[str, str]:
    """Return a table of the statuses, and one of the verdicts. Their links lead to the sections of the page."""
    headings = ("gRPC status", "Python exception", "code over HTTP", "HTTP status", "client tries again")
    known = {*STATUS.values(), *EXCEPTIONS, StatusCode.UNIMPLEMENTED}
    verdicts = ((link(verdict.name), f"{verdict.value[0].upper()}{verdict.value[1:]}.") for verdict in Verdict)
    return {
        "statuses": table(headings, (row(status) for status in StatusCode if status in known)),
        "reasons": ", ".join(link(reason.upper()) for reason in SHED_REASONS),
        "verdicts": table(("verdict", "meaning"), verdicts),
    }


def row(status: StatusCode) -> tuple[str, ...]:
    """Return the row of a status."""
    exception = EXCEPTIONS[status].__name__ if status in EXCEPTIONS else "CamserveError"
    retried = "yes" if status in RETRYABLE else "no"
    return (
        link(status.name),
        code(exception),
        code(connect.code_name(status)),
        str(connect.HTTP_STATUS[status]),
        retried,
    )


def link(name: str) -> str:
    """Return a link to the section of a status or verdict."""
    return f"[{name}](#{name.lower()})"
