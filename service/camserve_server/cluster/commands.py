"""What `camserve-server ray` does: it begins, waits, and lets go."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

from camserve import CamserveError, Client
from camserve_server import logs
from camserve_server.cluster.application import SERVICERS, Engines, application, ray
from camserve_server.config import Settings
from camserve_server.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "camserve"
LONGEST_START = 60.0  # seconds from when Ray says that it is ready until its proxy knows where calls go


def engines_of(count: str, rows: int, cpus: int, gpus: float) -> Engines:
    """Read how many engines there shall be: a number, or the least and the most with a dash between.

    Raises:
        ConfigError: it is neither.
    """
    form = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", count, re.ASCII)
    least, most = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"engines = {count}: write a number such as 2, or the least and the most, as 1-4")
    return Engines(least, most, rows, cpus, gpus)


@contextmanager
def cluster(address: str | None, engines: Engines) -> Iterator[Engines]:
    """Be connected to a cluster inside the block, or begin one of this machine alone.

    Args:
        address: of the cluster's head, "auto" for the one that this machine is of, or None.
        engines: how many, and what each has.

    Yields:
        The engines, each with a GPU where the cluster has any and none was said.

    Raises:
        ConfigError: there is no such cluster, or Ray is not installed.
    """
    ray_ = ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked whether he wants to tell
    try:
        ray_.init(
            address=address,
            namespace=NAME,
            logging_level="error",
            log_to_driver=False,
            include_dashboard=False if not address else None,
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"no cluster at {address}: {error}") from error
    try:
        there = ray_.cluster_resources().get("GPU", 0)
        yield (
            engines
            if engines.gpus >= 0
            else Engines(engines.least, engines.most, engines.rows, engines.cpus, min(1, there))
        )
    finally:
        ray_.shutdown()


def serve(settings: Settings, engines: Engines) -> int:
    """Serve on the cluster until SIGTERM or Ctrl-C.

    Returns:
        The exit code: 0 after a stop that was asked for.

    Raises:
        ConfigError: a setting has no meaning on a cluster, or the models cannot be loaded.
    """
    stop, serve_ = Event(), ray("serve")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    port = int(settings.address.rpartition(":")[2])
    app = application(settings, engines)
    serve_.start(
        http_options={"host": "127.0.0.1", "port": 0},
        grpc_options={"port": port, "grpc_servicer_functions": list(SERVICERS)},
        logging_config={"log_level": "WARNING"},
    )
    try:
        serve_.run(app, name=NAME, route_prefix=f"/{NAME}")
        _until_known(f"127.0.0.1:{port}", stop)
        log.info("serving", extra=logs.fields(port=port, engines=engines.least, models=",".join(settings.models)))
        stop.wait()
    except RuntimeError as error:
        applications = serve_.status().applications.values()
        messages = (each.message for one in applications for each in one.deployments.values())
        raise ConfigError(reason(messages)) from error
    finally:
        log.info("draining")
        serve_.shutdown()
    return 0


def reason(messages: Iterable[str]) -> str:
    """Find in what Ray says of its deployments, tracebacks and all, what an engine said when it could not begin."""
    found = re.search(r"\bConfigError: (.+)", "\n".join(messages))
    return found[1] if found else "the application could not be started: Ray's log says why"


def _until_known(address: str, stop: Event) -> None:
    """Wait until the proxy, which learns it some time later, passes calls on."""
    late = time.monotonic() + LONGEST_START
    with Client(address) as client:
        while not stop.is_set() and time.monotonic() < late:
            with suppress(CamserveError):
                client.health()
                return
            time.sleep(0.1)


def settings_for_job(models: tuple[str, ...], device: str, cpus: int) -> dict[str, Any]:
    """Return the settings of an actor's own server: nobody else calls it."""
    return {
        "models": models,
        "device": device,
        "threads": cpus,
        "isolation": "thread",
        "drain_seconds": 1,
        "max_message_mib": 1024,
        "log_level": "warning",
    }
