"""The Ray Serve application: doors, and engines that come and go with the rows in flight."""

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

ONGOING = (
    256  # requests that Ray hands to an engine at once: far above a batch, so that ours has something to choose from
)
LOOK_BACK, PATIENCE = 20.0, 10.0  # seconds over which rows in flight are averaged, and before engines are added

INGRESS_REPLICAS = 2  # where there may be more than one engine: if one dies, the other goes on

SERVICERS = ("camserve_server.cluster.proxy.add_services_to_server",)
"""What Ray's gRPC proxy is told of our services: `grpc_servicer_functions`."""

_SECURITY = ("tls_cert", "tls_key", "tls_client_ca", "tokens_file")
_ONE_ENGINE = ("admin", "model_folder", "metrics_address", "traces")


@dataclass(frozen=True, slots=True)
class Engines:
    """How many engines there are, and what each has.

    Attributes:
        least: there always are.
        most: there ever are.
        rows: in flight for each, above which there shall be more.
        cpus: cores of each.
        gpus: of each; 0 for a CPU.
    """

    least: int = 1
    most: int = 1
    rows: int = 64
    cpus: int = 1
    gpus: float = 0


def ray(module: str = "") -> Any:
    """Return Ray, or a module of it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(f"ray.{module}" if module else "ray")
    except ModuleNotFoundError as error:
        raise ConfigError('this needs Ray: `pip install "camserve[server,ray]"`') from error


def check(settings: Settings) -> None:
    """Refuse what would not be so behind Ray's proxy, and models of which the name alone says that they are none.

    Raises:
        ConfigError: that.
    """
    why = dict.fromkeys(_SECURITY, "its proxy knows no TLS and no tokens")
    why |= dict.fromkeys(_ONE_ENGINE, "engines come and go, and one of them alone would have it")
    for name, reason in why.items():
        if getattr(settings, name):
            raise ConfigError(f"{name} has no meaning behind Ray: {reason}")
    if not settings.insecure:
        words = (
            "Ray's proxy listens on every interface, without TLS and tokens: say insecure if only they reach it who may"
        )
        raise ConfigError(words)
    from camserve_server.models.spec import parse  # noqa: PLC0415 -- it needs torch, which a door need not

    for model in settings.models:
        parse(model)


def application(settings: Settings, engines: Engines) -> Any:
    """Return the application, for `serve.run`.

    Raises:
        ConfigError: a setting has no meaning here, or Ray is not installed.
    """
    check(settings)
    serve, errors, serving = ray("serve"), ray("exceptions"), ray("serve.exceptions")
    refusals = {
        errors.RayActorError: "UNAVAILABLE",
        serving.DeploymentUnavailableError: "UNAVAILABLE",
        serving.BackPressureError: "RESOURCE_EXHAUSTED",
    }
    # A program that is run from elsewhere has its modules where it was begun.
    engine = serve.deployment(_engine_class()).options(**_options(settings, engines))
    door = serve.deployment(Ingress).options(
        name="door",
        num_replicas=min(INGRESS_REPLICAS, engines.most),
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    bound = engine.bind(_settings_of(settings, engines), tuple(sys.path))
    return door.bind(bound, refusals, settings.max_message_mib * 2**20, settings.stream_in_flight)


def _engine_class() -> type:
    from camserve_server.cluster.engine import Engine  # noqa: PLC0415 -- it needs torch, which a door need not

    return Engine


def device_of(device: str, gpus: float) -> str:
    """Return the device of an engine, by the setting and the number of GPUs that Ray reserves for the engine.

    Ray sets CUDA_VISIBLE_DEVICES to the GPUs that it reserved, so that "cuda" is these and no others. Where it reserves
    none it leaves the variable alone: every GPU of the machine could be used, whoever has it.

    Raises:
        ConfigError: the setting names a GPU, and none is reserved.
    """
    if device == "auto":
        return "cuda" if gpus else "cpu"  # not the CPU where the GPU that was reserved cannot be used
    if "cuda" in device and not gpus:
        raise ConfigError(f"device = {device}: Ray reserves no GPU for an engine here (gpus = 0)")
    return device


def _settings_of(settings: Settings, engines: Engines) -> dict[str, Any]:
    ours = settings.model_dump(exclude={"address", "insecure", *_SECURITY, *_ONE_ENGINE})
    device = device_of(settings.device, engines.gpus)
    return ours | {"isolation": "thread", "device": device, "threads": settings.threads or engines.cpus}


def _options(settings: Settings, engines: Engines) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": "engine",
        "max_ongoing_requests": ONGOING,
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
        "upscale_delay_s": PATIENCE,
        "policy": policy,
    }
    return options | {"autoscaling_config": scaling}


def app(args: Mapping[str, Any]) -> Any:
    """Build the application from the `args` of Ray's own YAML: settings by their names, and what `Engines` has.

    Raises:
        ConfigError: one of them is unknown or out of range.
    """
    ours = {name: kind(args[name]) for name, kind in Engines.__annotations__.items() if name in args}
    settings = {name: value for name, value in args.items() if name not in ours}
    return application(load_settings(flags=settings, environment={}), Engines(**ours))
