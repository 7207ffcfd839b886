"""A bare gRPC server with replies of a given length: what a request costs before a server does anything for it."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import grpc

from benchmarks.serving import Process

SERVICE = "camserve.v1.ExplainService"  # so that the load generator needs no other requests


class _Bare(grpc.GenericRpcHandler):
    """Answer unary requests, and those of a stream with their own ids, and parse nothing else."""

    def __init__(self, size: int) -> None:
        self._reply = bytes(size)
        self._explained = b"\x12" + bytes(size)  # of a stream's reply, what follows the id

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return the handler of a method."""
        if details.method == f"/{SERVICE}/ExplainStream":
            return grpc.stream_stream_rpc_method_handler(self._answer_all)
        return grpc.unary_unary_rpc_method_handler(self._answer)

    async def _answer(self, _request: bytes, _context: object) -> bytes:
        return self._reply

    async def _answer_all(self, requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request[:10] + self._explained


@contextlib.contextmanager
def echoing(size: int) -> Iterator[Process]:
    """Run a bare server with replies of `size` bytes inside the block."""
    command = [sys.executable, "-m", "benchmarks.front.echo", str(size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:  # noqa: S603 -- our own program
        try:
            if process.stdout is None:
                raise ValueError("the bare server has no pipes")
            yield Process(process.pid, process.stdout.readline().strip(), process)
        finally:
            process.kill()


async def _serve(size: int) -> None:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((_Bare(size),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
