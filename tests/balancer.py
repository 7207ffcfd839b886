"""HAProxy with the project's configuration, and a DNS server that tells it the addresses of the servers."""

import contextlib
import os
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from server_process import reserved_port
from support import wait_until

CONFIG = Path(__file__).parents[1] / "deploy/haproxy/haproxy.cfg"
HOST = "camserve.test"
PROCESSES = (
    ('    server-template server 1-16 "${CAMSERVE_SERVERS}" resolvers dns init-addr none\n', ""),
    ("    # server-template process", "    server-template process"),
)
"""Changes of the configuration for a server of several processes."""


@contextlib.contextmanager
def dns_server(addresses):
    """Answer every question for IPv4 addresses with this list, which may change; yield HOST:PORT."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=_answer_all, args=(server, addresses))
        thread.start()
        try:
            yield "{}:{}".format(*server.getsockname())
        finally:
            server.sendto(b"", server.getsockname())
            thread.join()


def _answer_all(server, addresses):
    while True:
        query, client = server.recvfrom(4096)
        if not query:
            return
        server.sendto(_answer(query, addresses), client)


def _answer(query, addresses):
    end = query.index(0, 12) + 5  # after the name, its type and its class
    found = list(addresses) if query[end - 4 : end - 2] == b"\0\1" else []
    header = query[:2] + b"\x84\0\0\1" + len(found).to_bytes(2) + bytes(4)
    records = (b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(address) for address in found)
    return header + query[12:end] + b"".join(records)


@dataclass(frozen=True)
class Balancer:
    """A running HAProxy.

    Attributes:
        pid: its process id.
        address: address for clients.
        status: address of the status pages.
    """

    pid: int
    address: str
    status: str

    def ready(self):
        """Return True if HAProxy reports that a server is ready."""
        with contextlib.suppress(urllib.error.HTTPError):
            return self._get("ready").status == 200
        return False

    def states(self):
        """Return the states of the servers that have an address: UP, DOWN or NOLB, in alphabetical order."""
        return sorted(state for state in self._server_states("status") if state != "MAINT")

    def passed_checks(self):
        """Return the number of servers that have passed their last health check. Unchecked ones are UP, too."""
        return self._server_states("check_status").count("L7OK")

    def _server_states(self, metric):
        return re.findall(
            rf'^haproxy_server_{metric}{{proxy="camserve",.*state="(\w+)"}} 1', self.metrics(), re.MULTILINE
        )

    def metrics(self):
        return self._get("metrics").read().decode()

    def _get(self, path):
        return urllib.request.urlopen(f"http://{self.status}/{path}")


def changed(*changes):
    """Return the configuration with changes: pairs of a text and its replacement."""
    text = CONFIG.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def balancer(folder, servers, *changes, dns="127.0.0.1:53", binary="haproxy"):
    """Run HAProxy inside the block.

    Args:
        folder: folder for the configuration and the log.
        servers: HOST:PORT of the servers.
        changes: pairs of a text of the configuration and its replacement.
        dns: address of the DNS server.
        binary: the program.

    Yields:
        The balancer, once it listens.
    """
    (folder / "haproxy.cfg").write_text(changed(*changes))
    with reserved_port() as port, reserved_port() as status_port, (folder / "haproxy.log").open("wb") as log:
        address, status = f"127.0.0.1:{port}", f"127.0.0.1:{status_port}"
        variables = {"CAMSERVE_BIND": address, "CAMSERVE_STATUS_BIND": status, "CAMSERVE_SERVERS": servers}
        process = subprocess.Popen(
            [binary, "-f", folder / "haproxy.cfg"],
            env=os.environ | variables | {"CAMSERVE_DNS": dns},
            stdout=log,
            stderr=log,
        )

        def listens():
            assert process.poll() is None, (folder / "haproxy.log").read_text()
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", status_port)):
                return True
            return False

        try:
            wait_until(listens)
            yield Balancer(process.pid, address, status)
        finally:
            process.kill()  # it has nothing to finish
            process.wait()
