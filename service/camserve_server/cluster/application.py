"""The Ray Serve application: ingresses, and engines that are scaled by the rows in flight."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from camserve_server.cluster.calls import RowsInFlight
from camserve_server.cluster.ingress import Ingress
from camserve_server.core.config import Settings
from camserve_server.core.config import load as load_settings
from camserve_server.core.errors import ConfigError

MAX_ONGOING = 256  # requests that Ray passes to an engine at a time: far more than a batch, so that it can choose
LOOK_BACK = 20.0  # seconds over which the rows in flight are averaged
UPSCALE_DELAY = 10.0  # seconds of high load before engines are added

INGRESS_REPLICAS = 2  # if there may be several engines: when one ingress dies, the other one continues

SERVICERS = ("camserve_server.cluster.proxy.add_services_to_server",)
"""Functions that add our services to Ray's gRPC proxy: its option `grpc_servicer_functions`."""

_SECURITY_SETTINGS = ("tls_cert", "tls_key", "tls_client_ca", "tokens_file")
_PER_ENGINE_SETTINGS = ("admin", "model_folder", "metrics_address", "traces")


@dataclass(frozen=True, slots=True)
class Engines:
    """Number and resources of the engines.

    Attributes:
        least: minimum number of engines.
        most: maximum number of engines.
        rows: rows in flight per engine above which an engine is added.
        cpus: cores per engine.
        gpus: GPUs per engine; 0 to run on CPUs.
    """

    least: int = 1
    most: int = 1
    rows: int = 64
    cpus: int = 1
    gpus: float = 0


def ray(module: str = "") -> Any:
    """Import Ray, or one of its modules.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        return import_module(f"ray.{module}" if module else "ray")
    except ModuleNotFoundError as error:
        raise ConfigError('this needs Ray: `pip install "camserve[server,ray]"`') from error


def check(settings: Settings) -> None:
    """Check settings: refuse those that Ray's proxy does not support, and models with invalid names.

    Raises:
        ConfigError: a setting or a model is refused.
    """
    reasons = dict.fromkeys(_SECURITY_SETTINGS, "its proxy has no TLS and no tokens")
    reasons |= dict.fromkeys(_PER_ENGINE_SETTINGS, "it would apply to a single engine, and engines come and go")
    for name, reason in reasons.items():
        if getattr(settings, name):
            raise ConfigError(f"{name} is not supported with Ray: {reason}")
    if settings.processes != 1:
        raise ConfigError("processes is not supported with Ray: set the number of engines")
    if not settings.insecure:
        raise ConfigError(
            "Ray's proxy listens on every interface, without TLS and tokens: set insecure if its network is trusted"
        )
    from camserve_server.models.spec import parse  # noqa: PLC0415 -- it imports torch, which an ingress does not need

    for model in settings.models:
        parse(model)


def application(settings: Settings, engines: Engines) -> Any:
    """Return the application for `serve.run`.

    Raises:
        ConfigError: a setting is not supported, or Ray is not installed.
    """
    check(settings)
    serve, errors, serving = ray("serve"), ray("exceptions"), ray("serve.exceptions")
    refusals = {
        errors.RayActorError: "UNAVAILABLE",
        serving.DeploymentUnavailableError: "UNAVAILABLE",
        serving.BackPressureError: "RESOURCE_EXHAUSTED",
    }
    engine = serve.deployment(_engine_class()).options(**_options(settings, engines))
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=min(INGRESS_REPLICAS, engines.most),
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    # Engines get this process's `sys.path`, as users' modules may be in the folder where the command was started.
    bound_engine = engine.bind(_settings_of(settings, engines), tuple(sys.path))
    return ingress.bind(bound_engine, refusals, settings.max_message_mib * 2**20, settings.stream_in_flight)


def _engine_class() -> type:
    from camserve_server.cluster.engine import Engine  # noqa: PLC0415 -- it imports torch, which an ingress does not need

    return Engine


def device_of(device: str, gpus: float) -> str:
    """Return the device of an engine.

    Ray sets CUDA_VISIBLE_DEVICES to the GPUs that it reserves for an engine, so "cuda" means exactly these. If it
    reserves none, it leaves the variable alone, and the engine could use GPUs that are reserved for others.

    Args:
        device: the setting.
        gpus: number of GPUs that Ray reserves for the engine.

    Raises:
        ConfigError: the setting names a GPU, and none is reserved.
    """
    if device == "auto":
        return "cuda" if gpus else "cpu"  # an unusable GPU is an error: no silent fallback to the CPU
    if "cuda" in device and not gpus:
        raise ConfigError(f"device = {device}: Ray reserves no GPU for an engine here (gpus = 0)")
    return device


def _settings_of(settings: Settings, engines: Engines) -> dict[str, Any]:
    supported = settings.model_dump(exclude={"address", "insecure", *_SECURITY_SETTINGS, *_PER_ENGINE_SETTINGS})
    device = device_of(settings.device, engines.gpus)
    return supported | {"isolation": "thread", "device": device, "threads": settings.threads or engines.cpus}


def _options(settings: Settings, engines: Engines) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": "engine",
        "max_ongoing_requests": MAX_ONGOING,
        "max_queued_requests": settings.max_queue_rows,
        "graceful_shutdown_timeout_s": settings.drain_seconds,
        "ray_actor_options": {"num_cpus": engines.cpus, "num_gpus": engines.gpus},
    }
    if engines.least == engines.most:
        return options | {"num_replicas": engines.most}
    policy = ray("serve.config").AutoscalingPolicy(
        policy_function=f"{RowsInFlight.__module__}:{RowsInFlight.__name__}", policy_kwargs={"rows": engines.rows}
    )
    scaling = {
        "min_replicas": engines.least,
        "max_replicas": engines.most,
        "look_back_period_s": LOOK_BACK,
        "upscale_delay_s": UPSCALE_DELAY,
        "policy": policy,
    }
    return options | {"autoscaling_config": scaling}


def app(args: Mapping[str, Any]) -> Any:
    """Build the application from the `args` in a YAML file of Ray: settings, and the attributes of `Engines`.

    Raises:
        ConfigError: an argument is unknown or out of range.
    """
    engines = {name: kind(args[name]) for name, kind in Engines.__annotations__.items() if name in args}
    settings = {name: value for name, value in args.items() if name not in engines}
    return application(load_settings(flags=settings, environment={}), Engines(**engines))
