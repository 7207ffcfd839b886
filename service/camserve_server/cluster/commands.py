"""Run the commands of `camserve-server ray`: connect to a cluster, serve, and stop."""

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
WARN_AFTER = 15.0  # seconds of waiting for the cluster after which the reason is logged
STOP_TIMEOUT = 15.0  # seconds that Ray Serve may take to stop, in addition to the drain
PROXY_TIMEOUT = 60.0  # seconds that Ray's proxy may take to find the application after Ray reports it as running

_CONFIG_ERROR = re.compile(r"\bConfigError: (.+)")


def engines_of(count: str, rows: int, cpus: int, gpus: float) -> Engines:
    """Parse the number of engines: a number, or a minimum and a maximum with a dash between them.

    Raises:
        ConfigError: the number is invalid.
    """
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", count, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"engines = {count}: write a number such as 2, or a minimum and a maximum such as 1-4")
    return Engines(least, most, rows, cpus, gpus)


@contextmanager
def cluster(address: str | None, engines: Engines, device: str) -> Iterator[Engines]:
    """Connect to a Ray cluster inside the block, or start one on this machine.

    Args:
        address: address of the cluster's head, "auto" for the cluster that this machine belongs to, or None to start
            one.
        engines: number and resources of the engines; with a negative number of GPUs, it is chosen here.
        device: device of the engines, in the format of the setting.

    Yields:
        The engines. If the number of GPUs was not given, each has one if the cluster has any and the device is no CPU.

    Raises:
        ConfigError: the cluster does not exist, or Ray is not installed.
    """
    ray_ = ray()
    _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics without consent
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
        available = 0 if device == "cpu" else ray_.cluster_resources().get("GPU", 0)
        yield engines if engines.gpus >= 0 else replace(engines, gpus=min(1, available))
    finally:
        ray_.shutdown()


def _job() -> Any:
    """Return a job configuration that keeps the current folder out of the workers' module search path.

    Ray puts the current folder first in the search path, unless the job has its own working directory, which would have
    to be copied. If a model needs a user's own module, the engines get the folder as the last entry, by their `path`.
    """
    job = ray("job_config").JobConfig()
    job._runtime_env_has_working_dir = lambda: True  # noqa: SLF001 -- Ray has no public setting
    return job


def _check_reachable(address: str | None) -> None:
    """Check that a server listens at HOST:PORT. Ray itself would retry for minutes.

    Raises:
        ConfigError: no server listens there.
    """
    match = re.fullmatch(r"([\w.-]+):(\d{1,5})", address or "")
    if match:
        try:
            socket.create_connection((match[1], int(match[2])), timeout=5).close()
        except OSError as error:
            raise ConfigError(f"no cluster at {address}: {error}") from error


def serve(settings: Settings, engines: Engines) -> int:
    """Serve on the cluster until SIGTERM or Ctrl-C.

    Returns:
        The exit code: 0 after a signal.

    Raises:
        ConfigError: a setting is not supported, the models cannot be loaded, or Ray's proxy is on another port already.
    """
    stop, serve_ = Event(), ray("serve")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    port = _port(settings.address)
    app = application(settings, engines)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    already_running = bool(serve_.status().proxies)
    serve_.start(
        http_options={"host": "127.0.0.1", "port": 0},
        grpc_options={"port": port, "grpc_servicer_functions": list(SERVICERS)},
        logging_config={"log_level": "WARNING"},
    )
    try:
        # It does not wait, so that a signal can stop it and a missing model is reported at once.
        serve_.run_many(
            [serve_.RunTarget(app, name=NAME, route_prefix=f"/{NAME}")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _wait_until_running(serve_, stop)
        _wait_for_proxy(f"127.0.0.1:{port}", stop)
        if not stop.is_set():
            log.info("serving", extra=logs.fields(port=port, engines=engines.least, models=",".join(settings.models)))
        stop.wait()
    finally:
        log.info("draining")
        if already_running:
            serve_.delete(NAME)  # other applications continue
        else:
            stop_ray_serve(ray(), settings.drain_seconds + STOP_TIMEOUT)
    return 0


def stop_ray_serve(ray_: Any, timeout: float) -> None:
    """Tell Ray Serve's controller to stop everything, and wait until the controller itself has ended.

    `serve.shutdown()` would wait in a call to the controller that never returns, because the controller ends by being
    killed. Ray then reports "Task ServeController.graceful_shutdown failed. There are infinite retries remaining" at
    every stop. This makes the same call without waiting in it.

    Args:
        ray_: the module `ray`.
        timeout: seconds to wait for the controller.
    """
    controller = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
    deadline = time.monotonic() + timeout
    try:
        ray_.get(ray_.get_actor(**controller).graceful_shutdown.remote(wait=False))
        while time.monotonic() < deadline:
            ray_.get_actor(**controller)
            time.sleep(0.1)
    except ValueError:  # the controller has ended
        return
    log.warning("Ray Serve did not stop within %d s", timeout)


def _port(address: str) -> int:
    """Return the port of an address.

    Raises:
        ConfigError: the address has no port.
    """
    match = re.search(r":([1-9]\d{0,4})$", address, re.ASCII)
    if not match:
        raise ConfigError(f"address = {address}: Ray's proxy needs a port, as in 0.0.0.0:50051")
    return int(match[1])


def _wait_until_running(serve_: Any, stop: Event) -> None:
    """Wait until the application runs. Log the reason for a long wait once.

    Raises:
        ConfigError: an engine failed with a ConfigError, which a retry would not change; or Ray gave up.
    """
    warn_at, logged = time.monotonic() + WARN_AFTER, ""
    while not stop.wait(0.2):
        status = serve_.status().applications[NAME]
        if status.status == "RUNNING":
            return
        message = "\n".join(deployment.message for deployment in status.deployments.values() if deployment.message)
        if status.status == "DEPLOY_FAILED" or _CONFIG_ERROR.search(message):
            raise ConfigError(reason([message, status.message]))
        if message and message != logged and time.monotonic() > warn_at:
            log.warning("waiting for the cluster: %s", message)
            logged = message


def reason(messages: Iterable[str]) -> str:
    """Extract an engine's own error message from Ray's messages on its deployments, which contain tracebacks."""
    match = _CONFIG_ERROR.search("\n".join(messages))
    return match[1] if match else "the application could not be started: see Ray's log"


def _wait_for_proxy(address: str, stop: Event) -> None:
    """Wait until the proxy passes calls on: it learns of the application some time after it is running.

    Raises:
        ConfigError: the proxy does not respond in time.
    """
    deadline = time.monotonic() + PROXY_TIMEOUT
    with Client(address, metadata={"application": NAME}) as client:
        while not stop.is_set():
            try:
                client.health()
            except CamserveError as error:
                if time.monotonic() > deadline:
                    hint = "Ray's proxy does not respond; was Ray Serve already running, with another port or services?"
                    raise ConfigError(f"{address}: {hint} ({error.message})") from error
                stop.wait(0.1)
            else:
                return


def settings_for_job(models: tuple[str, ...], device: str, cpus: int) -> dict[str, Any]:
    """Return the settings of the server inside an actor, which only the actor calls."""
    return {
        "models": models,
        "device": device,
        "threads": cpus,
        "isolation": "thread",
        "drain_seconds": 1,
        "max_message_mib": 1024,
        "log_level": "warning",
    }
