"""A call whose path is not UTF-8 gets UNIMPLEMENTED, and others are answered; decoding errors elsewhere stay errors."""

import asyncio
import socket

import pytest

from api.running_server import request
from camserve_server.api import undecodable_paths
from robustness.http2_flood import Connection
from support import wait_in_loop_until


@pytest.mark.parametrize("path", ["\udcff", "camserve.v1.ExplainService/\udcc3(Explain", "\udced\udca0\udc80"])
async def test_call_whose_path_is_not_utf8_leaves_the_server_as_it_was(server, path, caplog):
    connection = Connection("127.0.0.1", server.port)
    for _ in range(3):
        connection.send(path, b"")
    await wait_in_loop_until(lambda: connection.statuses == 3)
    response = await server.explain(request())
    connection.socket.shutdown(socket.SHUT_RDWR)
    connection.listener.join()
    connection.socket.close()

    assert len(response.explanations) == 1
    assert not server.task.done()
    assert caplog.messages == []


async def test_decoding_errors_elsewhere_stay_errors():
    undecodable_paths.accept()
    for decode in (bytes.decode, lambda data: data.decode("ascii", "strict"), lambda data: str(data, "utf-16")):
        with pytest.raises(UnicodeDecodeError):
            decode(b"/\xff\xfe")
        with pytest.raises(UnicodeDecodeError):
            await asyncio.to_thread(decode, b"/\xff\xfe")
    with pytest.raises(UnicodeEncodeError):
        "\udcff".encode()
