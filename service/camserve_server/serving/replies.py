"""Memory of the replies that are not sent yet."""

import asyncio
import math
from contextlib import ExitStack
from dataclasses import dataclass, field

from camserve_server.core.errors import ResourceExhausted
from camserve_server.scheduling.admission import Admission

REPLY_LIMIT = 96 * 2**20  # bytes of all unsent replies, with their copies; other requests wait before they are drawn
REPLY_TIMEOUT = 300.0  # seconds for which a reply waits for memory that others hold until their callers read them


@dataclass(frozen=True, slots=True)
class Replies:
    """Memory of the replies that are not sent yet.

    Attributes:
        limit: limit on their bytes.
    """

    limit: Admission = field(default_factory=lambda: Admission(REPLY_LIMIT, 0, line=math.inf, headroom=True))

    async def reserve(self, size: int, caller: str, until_sent: ExitStack) -> None:
        """Reserve memory for a reply; wait until there is enough.

        Args:
            size: bytes of the reply and its copies.
            caller: its caller.
            until_sent: stack that the calling code closes when the reply is sent, to release the memory.

        Raises:
            ResourceExhausted: earlier replies were not read in time.
        """
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                until_sent.callback(await self.limit.hold(size, caller=caller, wait=True))
        except TimeoutError:
            message = f"there was no memory for the reply for {REPLY_TIMEOUT:g} s: earlier replies have not been read"
            raise ResourceExhausted(message, retry_after=1.0, shed_reason="replies_unread") from None
