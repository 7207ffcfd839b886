"""What `camserve-server ray` does: it begins, waits, and lets go."""

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

from camserve import CamserveError, Client
from camserve_server.cluster.application import SERVICERS, Engines, application, ray
from camserve_server.core import logs
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "camserve"
PATIENCE = 15.0  # seconds after which is said what is waited for
LONGEST_STOP = 15.0  # seconds that Ray Serve takes to stop, in addition to the drain
LONGEST_START = 60.0  # seconds from when Ray says that it is ready until its proxy knows where calls go

_CANNOT = re.compile(r"\bConfigError: (.+)")


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
def cluster(address: str | None, engines: Engines, device: str) -> Iterator[Engines]:
    """Be connected to a cluster inside the block, or begin one of this machine alone.

    Args:
        address: of the cluster's head, "auto" for the one that this machine is of, or None.
        engines: how many, and what each has.
        device: what each computes on, as the setting has it.

    Yields:
        The engines, each with a GPU where the cluster has any, none was said and the device is not a CPU.

    Raises:
        ConfigError: there is no such cluster, or Ray is not installed.
    """
    ray_ = ray()
    _reached(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked whether he wants to tell
    try:
        ray_.init(
            address=address,
            namespace=NAME,
            logging_level="error",
            log_to_driver=False,
            include_dashboard=False if not address else None,
            job_config=_job(),
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"no cluster at {address}: {error}") from error
    try:
        there = 0 if device == "cpu" else ray_.cluster_resources().get("GPU", 0)
        yield engines if engines.gpus >= 0 else replace(engines, gpus=min(1, there))
    finally:
        ray_.shutdown()


def _job() -> Any:
    """Return the job's configuration for Ray, with which workers do not search the current folder for modules first.

    Ray puts the current folder first in the search path, unless the job has its own working directory, which would have
    to be copied. If a model names a user's own module, the engines get the folder as the last place, by their `path`.
    """
    job = ray("job_config").JobConfig()
    job._runtime_env_has_working_dir = lambda: True  # noqa: SLF001 -- Ray has no setting for it
    return job


def _reached(address: str | None) -> None:
    """Find out whether anything listens at HOST:PORT: Ray itself would try for minutes.

    Raises:
        ConfigError: nothing does.
    """
    form = re.fullmatch(r"([\w.-]+):(\d{1,5})", address or "")
    if form:
        try:
            socket.create_connection((form[1], int(form[2])), timeout=5).close()
        except OSError as error:
            raise ConfigError(f"no cluster at {address}: {error}") from error


def serve(settings: Settings, engines: Engines) -> int:
    """Serve on the cluster until SIGTERM or Ctrl-C.

    Returns:
        The exit code: 0 after a stop that was asked for.

    Raises:
        ConfigError: a setting has no meaning on a cluster, the models cannot be loaded, or the cluster's Ray Serve has
            its proxy elsewhere.
    """
    stop, serve_ = Event(), ray("serve")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    port = _port(settings.address)
    app = application(settings, engines)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    others = bool(serve_.status().proxies)
    serve_.start(
        http_options={"host": "127.0.0.1", "port": 0},
        grpc_options={"port": port, "grpc_servicer_functions": list(SERVICERS)},
        logging_config={"log_level": "WARNING"},
    )
    try:
        # It waits for nothing, so that a stop is heeded and a model that there is none of is told at once.
        serve_.run_many(
            [serve_.RunTarget(app, name=NAME, route_prefix=f"/{NAME}")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _until_running(serve_, stop)
        _until_known(f"127.0.0.1:{port}", stop)
        if not stop.is_set():
            log.info("serving", extra=logs.fields(port=port, engines=engines.least, models=",".join(settings.models)))
        stop.wait()
    finally:
        log.info("draining")
        serve_.delete(NAME) if others else stop_ray_serve(ray(), settings.drain_seconds + LONGEST_STOP)
    return 0


def stop_ray_serve(ray_: Any, timeout: float) -> None:
    """Make Ray Serve's controller stop everything, and wait until the controller itself has ended.

    `serve.shutdown()` would wait in a call to the controller that never returns, because the controller ends by being
    killed. Ray then reports "Task ServeController.graceful_shutdown failed. There are infinite retries remaining" at
    every stop. This makes the same call without waiting in it.

    Args:
        ray_: Ray.
        timeout: in seconds, after which the controller is left alone.
    """
    named = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
    late = time.monotonic() + timeout
    try:
        ray_.get(ray_.get_actor(**named).graceful_shutdown.remote(wait=False))
        while time.monotonic() < late:
            ray_.get_actor(**named)
            time.sleep(0.1)
    except ValueError:  # the controller has ended
        return
    log.warning("Ray Serve did not stop within %d s", timeout)


def _port(address: str) -> int:
    """Return the port of an address.

    Raises:
        ConfigError: it has none.
    """
    form = re.search(r":([1-9]\d{0,4})$", address, re.ASCII)
    if not form:
        raise ConfigError(f"address = {address}: Ray's proxy wants a port, as in 0.0.0.0:50051")
    return int(form[1])


def _until_running(serve_: Any, stop: Event) -> None:
    """Wait until all is in place; log what it waits for, once.

    Raises:
        ConfigError: an engine said that it cannot begin, which it would say again; or Ray gave up.
    """
    late, said = time.monotonic() + PATIENCE, ""
    while not stop.wait(0.2):
        one = serve_.status().applications[NAME]
        if one.status == "RUNNING":
            return
        words = "\n".join(each.message for each in one.deployments.values() if each.message)
        if one.status == "DEPLOY_FAILED" or _CANNOT.search(words):
            raise ConfigError(reason([words, one.message]))
        if words and words != said and time.monotonic() > late:
            log.warning("waiting for the cluster: %s", words)
            said = words


def reason(messages: Iterable[str]) -> str:
    """Find in what Ray says of its deployments, tracebacks and all, what an engine said when it could not begin."""
    found = _CANNOT.search("\n".join(messages))
    return found[1] if found else "the application could not be started: Ray's log says why"


def _until_known(address: str, stop: Event) -> None:
    """Wait until the proxy, which learns it some time later, passes calls on.

    Raises:
        ConfigError: it does not.
    """
    late = time.monotonic() + LONGEST_START
    with Client(address, metadata={"application": NAME}) as client:
        while not stop.is_set():
            try:
                client.health()
            except CamserveError as error:
                if time.monotonic() > late:
                    words = (
                        "Ray's proxy does not answer for it; did Ray Serve run already, with another port or services?"
                    )
                    raise ConfigError(f"{address}: {words} ({error.message})") from error
                stop.wait(0.1)
            else:
                return


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
