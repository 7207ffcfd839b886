"""The asynchronous client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._async.evaluation import EvaluationCalls
from camserve._async.explanations import ExplanationCalls
from camserve._async.inspection import InspectionCalls
from camserve._async.models import ModelCalls
from camserve._transport.retry import Retry
from camserve._transport.settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT, ClientOptions, make_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self, Unpack

    import grpc.aio

    from camserve._transport.access import AccessOptions


class AsyncClient(ExplanationCalls, InspectionCalls, EvaluationCalls, ModelCalls):
    """Asynchronous client of a camserve server, for use in one event loop.

    The examples use ``await`` outside of a coroutine, as notebooks and ``python -m asyncio`` allow.

    Args:
        address: HOST:PORT. To call several servers in turn, use ``dns:///NAME:PORT`` for all addresses
            of a name, or ``ipv4:HOST:PORT,HOST:PORT`` for a list.
        timeout: Seconds that a call may take, including retries and pauses; ``math.inf`` for no
            limit.
        retries: The largest number of retries of a call if the server is unavailable or its queue is
            full; a ``Retry`` also sets the pauses. While the server starts, calls are retried until the
            timeout.
        credentials: gRPC's channel credentials, in place of ``tls``. Default: no encryption.
        metadata: Metadata that is sent with every call.
        channel: A channel to use instead of one to the address: for interceptors, for tests, or for
            a server in the same process. The client closes it. The address then only appears in
            errors, and a token is sent whether or not the channel is encrypted. The page "The channel
            of a Python client" lists the methods that a channel needs.
        connections: The number of connections to the server. Calls and images go to the one with the
            fewest in flight. Default: one, or one to each process if the server has several.
        **access: TLS and the token: see ``AccessOptions``.

    Raises:
        InvalidArgument: An argument is out of range.

    Example:
        >>> async with camserve.AsyncClient("localhost:50051") as client:
        ...     result = await client.explain("cat.jpg", methods=["gradcam"])
        ...     async for other in client.explain_many(["cat.jpg", "cat.jpg"]):
        ...         print(other.predictions[0].label)
        Egyptian cat
        Egyptian cat
        >>> result.explanations[0].heading
        'Egyptian cat · gradcam'
    """

    def __init__(  # noqa: PLR0913 -- every one is an option of the client
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int | Retry = Retry(),  # noqa: B008 -- a frozen value
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        channel: grpc.aio.Channel | None = None,
        connections: int | None = None,
        **access: Unpack[AccessOptions],
    ) -> None:
        own_channel = channel is not None
        options = ClientOptions(timeout, retries, credentials, metadata, own_channel, connections)
        super().__init__(make_settings(address, options, access), channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
