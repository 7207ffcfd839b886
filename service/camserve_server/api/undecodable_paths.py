"""Paths of calls that are not UTF-8, which are unknown methods.

grpcio 1.84.0 to 1.85.3 decodes the path of every call in the one task that accepts calls. An error there ended the
task, and with it the server, before any token was checked. The task is compiled, and nothing in it can be replaced but
what Python itself calls: the handler of decoding errors.
"""

import asyncio
import codecs

ACCEPTING = "AioServer._server_main_loop"  # name of the coroutine that accepts calls


def accept() -> None:
    """Answer calls whose path is not UTF-8 with UNIMPLEMENTED. Everywhere else a decoding error stays an error."""
    codecs.register_error("strict", _handle)


def _handle(error: UnicodeError) -> tuple[str, int]:
    if isinstance(error, UnicodeDecodeError) and _accepts_calls():
        return "\N{REPLACEMENT CHARACTER}", error.end
    raise error


def _accepts_calls() -> bool:
    """Return whether the current thread runs the task that accepts calls."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and getattr(task.get_coro(), "__qualname__", "") == ACCEPTING
