"""Commands of `camserve-server`: serve, check settings, tune, and explain files without a server."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import click

from camserve import cli as client_cli
from camserve.diff.run import LiveModel
from camserve.terminal import echo, print_table
from camserve_server.api import tokens
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError

if TYPE_CHECKING:
    from camserve.diff.command import DiffFlags
    from camserve_server.app.explainer import Explainer
    from camserve_server.models.values import ModelInfo
    from camserve_server.tuning import TuningResult

# Share of the cores that other programs may use before `tune` warns: a parallel computation ends with its last thread.
MAX_LOAD = 0.25

F = TypeVar("F", bound=Callable[..., Any])


def _settings_options(command: F) -> F:
    """Give a command a flag for every setting."""
    for name, setting in reversed(config.Settings.model_fields.items()):
        text = f"{setting.description}{_default_text(setting.default)}"
        if name == "models":
            option = click.option("--model", "models", multiple=True, metavar="MODEL", help=text)
        elif setting.annotation is bool:
            option = click.option(f"--{name}", name, is_flag=True, default=None, help=text)
        else:
            option = click.option(f"--{name.replace('_', '-')}", name, metavar=_metavar(setting.annotation), help=text)
        command = option(command)
    return click.option("--config", "path", metavar="FILE", help="TOML file with settings.")(command)


def _default_text(default: object) -> str:
    """Return a setting's default as the help shows it; the options themselves have none, as files come before it."""
    if default is False or default in ("", ()):
        return ""
    text = (
        ", ".join(default) if isinstance(default, tuple) else f"{default:g}" if isinstance(default, float) else default
    )
    return f"  [default: {text}]"


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Union:
        return "|".join(_metavar(part).strip("[]") for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"[{'|'.join(get_args(annotation))}]"
    return {int: "INTEGER", float: "FLOAT"}.get(getattr(annotation, "__origin__", annotation), "TEXT")


def _settings(path: str | None, flags: dict[str, Any]) -> config.Settings:
    """Load the settings of a command; its models are not parsed yet."""
    flags["models"] = flags["models"] or None
    return config.load(path, flags)


def _search_current_folder(specs: Iterable[str]) -> None:
    """Make users' own model modules importable from the current folder."""
    from camserve_server import models  # noqa: PLC0415 -- it imports torch, which takes seconds

    for text in specs:
        models.search_current_folder(models.parse(text))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report a ConfigError as one line, without a traceback."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


@click.group(cls=client_cli.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def program() -> None:
    """Explain what vision models see, with Grad-CAM and saliency heatmaps over gRPC."""


@program.command()
@_settings_options
def serve(path: str | None, **flags: Any) -> int:
    """Start the server.

    It runs until SIGTERM or Ctrl-C, and then finishes the calls that it accepted. A second signal stops it at once.

    Every setting can also be set in the TOML file, such as max_queue_rows = 64, or in the environment, such as
    CAMSERVE_MAX_QUEUE_ROWS=64. Flags override the environment, and the environment overrides the file.
    """
    from camserve_server.app import sharing, start, supervisor  # noqa: PLC0415 -- only this command needs them

    with _usage_errors():
        settings = _settings(path, flags)
        logs.configure(settings.log_level, settings.log_format)
        processes = sharing.processes_of(settings)
        if processes > 1:
            return supervisor.run(settings, processes)
        return start.run(settings.model_copy(update={"processes": 1}))


@program.command("check-config")
@click.argument("path", metavar="[FILE]", required=False)
@click.option("--load", is_flag=True, help="Also load every model, and show its properties.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of settings files, and check nothing.")
def check_config(path: str | None, *, load: bool, schema: bool) -> int:
    """Check a settings file.

    FILE is a TOML file for `serve --config`. Every fault is printed with its line, and the exit code is 1 if there are
    any. Models are not loaded, unless --load is given. Environment variables and flags are ignored.

    Editors such as VS Code check and complete the file while you write it: save the output of --schema as
    camserve.schema.json, and begin the file with `#:schema ./camserve.schema.json`.
    """
    if schema:
        echo(json.dumps(config.schema(), indent=2))
        return 0
    if path is None:
        raise click.UsageError("missing FILE or --schema")
    from camserve_server.cli import config_check  # noqa: PLC0415 -- it imports torch, which takes seconds

    logs.configure("error", "text")
    infos: list[ModelInfo] = []
    faults = config_check.check(path, infos.append if load else None)
    for info in infos:
        echo(_describe(info))
    for fault in faults:
        echo(f"{path}:{fault.line}: {fault.message}" if fault.line else f"{path}: {fault.message}", err=True)
    summary = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "valid"
    echo(f"{path}: {summary}", err=bool(faults))
    return int(bool(faults))


def _describe(info: "ModelInfo") -> str:
    labels = f'"{info.labels[0]}" to "{info.labels[-1]}"' if info.labels else "without labels"
    size = "x".join(map(str, info.preprocess.size))
    return f"{info.name}: {info.source}, {size} pixels, {info.classes} classes, {labels}; layer {info.default_layer}"


@program.group()
def token() -> None:
    """Create access tokens."""


@token.command("new")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(tokens.ROLES),
    default=("explain", "observe"),
    show_default=True,
    help="Role of the token: `explain` and evaluate photos, `observe` models, methods and metrics, or `admin` to load"
    " and unload models. Repeat it for several roles.",
)
@click.option(
    "--expires",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="Last day on which the token is valid, in UTC. Default: no limit.",
)
def new_token(name: str, roles: tuple[str, ...], expires: datetime | None) -> None:
    """Create a token.

    NAME is the name of its holder, which is logged. The command prints the token, and the line to add to the server's
    tokens file (the setting tokens_file). The token cannot be shown again: the file contains only its hash.

    The server reloads the file within a second of a change. Remove a line to revoke its token. To replace a token, add
    a second line with the same name.
    """
    with _usage_errors():
        secret, known = tokens.new(name, roles, expires.date() if expires else None)
    echo(f"token: {secret}")
    echo(f"line:  {known.line()}")


@program.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the measurements.",
)
@click.option(
    "--latency-ms",
    type=click.FloatRange(min=1),
    default=1000,
    show_default=True,
    metavar="MS",
    help="Time limit of a batch.",
)
@click.option(
    "--precision",
    type=click.Choice(("same", "any")),
    default="same",
    show_default=True,
    help="`same` keeps the precision of each model, which is float32 by default. `any` may choose a faster one.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    help="Device to measure: auto, cpu, cuda or cuda:N.",
)
@click.option(
    "--write", "path", type=click.Path(path_type=Path), metavar="FILE", help="Write the chosen settings to a file."
)
@click.option("--force", is_flag=True, help="Overwrite an existing FILE, keeping the settings that are not tuned.")
def tune(
    models: tuple[str, ...], path: Path | None, *, precision: str, device: str, force: bool, **limits: float
) -> None:
    """Choose the number of threads and the batch size for this machine.

    MODEL is [NAME=]SOURCE:ARCH[?option=value]. The default is the models of FILE, if it exists, or of the environment.

    Each model is measured in float32 and in every precision that the device supports natively, and the maps are
    compared with those in float32. A model's precision is changed only with --precision any. The chosen settings are
    printed, or written to a file for `serve --config FILE`.
    """
    from camserve_server import tuning  # noqa: PLC0415 -- it imports torch, which takes seconds

    with _usage_errors():
        if path:
            tuning.check_writable(path, force=force)
        models = models or config.load(path if path and path.exists() else None).models
        _search_current_folder(models)
        logs.configure("error", "text")
        _announce(models, limits["seconds"])
        constraints = tuning.Constraints(limits["seconds"], limits["latency_ms"] / 1e3, precision == "any")
        _report(tuning.tune(models, device, constraints), path)


def _announce(models: Iterable[str], seconds: float) -> None:
    echo(f"measuring {', '.join(models)}: at most {seconds:g} seconds after loading", err=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > MAX_LOAD * (os.cpu_count() or 1):
        echo(f"other programs are busy (load {load:.1f}): the measurements will be inaccurate", err=True)


def _report(result: "TuningResult", path: Path | None) -> None:
    """Print the measurements and the choice; print the settings too, or write them to a file."""
    from camserve_server import tuning  # noqa: PLC0415 -- as above

    print_table(tuning.HEADINGS, result.rows())
    echo("\n" + "\n".join(result.summary()) + "\n")
    if path:
        tuning.write(path, result.settings(), result.summary())
        echo(f"wrote {path}")
    else:
        echo(tuning.toml(result.settings()).rstrip("\n"))


# The commands `explain`, `replay` and `diff` below run those of the client on an `Explainer` in this process instead of
# a server, with the same results.
def _client_parameters(command: click.Command) -> list[click.Parameter]:
    """Return the parameters of a client's command, except those that choose the server and the model."""
    return [option for option in command.params if option.name not in ("server", "model", *client_cli.ACCESS_OPTIONS)]


_SIDES = ("baseline", "candidate")
_device_option = click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE", help="Device to compute on: auto, cpu or cuda:N."
)


def _model_options(command: F) -> F:
    """Add the flags of the one model that a command loads."""
    command = _device_option(command)
    return click.option(
        "--model",
        default="efficientnet_lite0",
        show_default=True,
        metavar="MODEL",
        help="Model to load, as [NAME=]SOURCE:ARCH[?option=value].",
    )(command)


def _explainer(model: str, device: str, isolation: str, timeout: float) -> "Explainer":
    """Load the one model of a command."""
    from camserve_server import Explainer  # noqa: PLC0415 -- as above

    logs.configure("warning", "text")
    # Only these settings apply here: the environment may also have the address and the models of a server.
    environment = config.from_environment()
    settings = {name: value for name, value in environment.items() if name == "threads" or name.startswith("max_")}
    with _usage_errors():
        return Explainer(model, device=device, timeout=timeout, settings={**settings, "isolation": isolation})


@program.command(params=_client_parameters(client_cli.explain), help=client_cli.explain.help)
@_model_options
@click.pass_context
def explain(context: click.Context, /, model: str, device: str, **options: Any) -> int:
    """Explain photos without a server."""
    # In a job, a photo that crashes its worker must not end the whole job.
    isolation = "process" if options["resume"] else "thread"
    with _explainer(model, device, isolation, options["timeout"]) as explainer:
        code: int = context.invoke(client_cli.explain, connect=lambda: explainer, server="", model=None, **options)
        return code


@program.command(params=_client_parameters(client_cli.replay), help=client_cli.replay.help)
@_model_options
@click.pass_context
def replay(context: click.Context, /, model: str, device: str, **options: Any) -> int:
    """Replay a receipt without a server."""
    with _explainer(model, device, "thread", options["timeout"]) as explainer:
        code: int = context.invoke(client_cli.replay, connect=lambda: explainer, server="", **options)
        return code


@program.command(params=[option for option in _client_parameters(client_cli.diff) if option.name not in _SIDES])
@click.option(
    "--baseline", required=True, metavar="MODEL|DIR", help="The model to compare with, or a baseline's folder."
)
@click.option("--candidate", required=True, metavar="MODEL|DIR", help="The new model, or a folder.")
@_device_option
def diff(paths: tuple[str, ...], output: Path | None, *, device: str, timeout: float, **flags: Any) -> int:
    """Compare where two models look, without a server.

    It is like `camserve diff`, except that MODEL is [NAME=]SOURCE:ARCH[?option=value], which is loaded in this process.
    """

    def open_model(spec: str, stack: ExitStack) -> LiveModel:
        return LiveModel(spec, stack.enter_context(_explainer(spec, device, "thread", timeout)))

    sides, accept = (flags.pop("baseline"), flags.pop("candidate")), flags.pop("accept")
    return client_cli.run_diff(open_model, paths, sides, output, cast("DiffFlags", flags), accept=accept)


@program.group()
def ray() -> None:
    """Serve or explain a data set on a Ray cluster."""


def _engine_options(command: F) -> F:
    """Add the flags for the number of engines and the resources of each."""
    options = (
        click.option(
            "--cluster", metavar="ADDRESS", envvar="RAY_ADDRESS", help="Ray cluster. Default: start one here."
        ),
        click.option(
            "--engines", "count", default="1", show_default=True, metavar="N|MIN-MAX", help="Number of engines."
        ),
        click.option(
            "--cpus", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Cores per engine."
        ),
        click.option(
            "--gpus",
            type=float,
            default=-1,
            metavar="N",
            help="GPUs per engine. Default: 1 if the cluster has any, else 0.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@ray.command("serve")
@_engine_options
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Rows in flight per engine. With more, an engine is added, up to the maximum.",
)
@_settings_options
def ray_serve(
    path: str | None, cluster: str | None, count: str, rows: int, cpus: int, gpus: float, **flags: Any
) -> int:
    """Serve with Ray Serve, behind its gRPC proxy.

    It runs until SIGTERM or Ctrl-C. The proxy listens on the port of --address on every interface, without TLS and
    tokens, so --insecure is required.
    """
    from camserve_server.cluster import application, commands  # noqa: PLC0415 -- as above

    with _usage_errors():
        settings = _settings(path, flags)
        _search_current_folder(settings.models)
        logs.configure(settings.log_level, settings.log_format)
        application.check(settings)
        with commands.cluster(cluster, commands.engines_of(count, rows, cpus, gpus), settings.device) as engines:
            return commands.serve(settings, engines)


def _job_parameters() -> list[click.Parameter]:
    left_out = ("paths", "output", "resume", "timeout", "dry_run")
    return [option for option in _client_parameters(client_cli.explain) if option.name not in left_out]


@ray.command("explain", params=_job_parameters())
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    help="Folder or URI for the results, which all machines can write to.",
)
@_engine_options
@_model_options
def ray_explain(
    paths: tuple[str, ...], output: str, column: str, cluster: str | None, count: str, **options: Any
) -> int:
    """Explain a data set with Ray Data.

    It runs `explain --resume` on many machines at once. PATH is a folder, a glob, a Parquet file or a URI such as
    s3://BUCKET/PREFIX that all machines can read. Run the same command again to resume an interrupted job.
    """
    from camserve_server.cluster import commands, job  # noqa: PLC0415 -- as above

    cpus, gpus, model, device = (options.pop(name) for name in ("cpus", "gpus", "model", "device"))
    with _usage_errors():
        _search_current_folder((model,))
        settings = commands.settings_for_job((model,), device, cpus)
        work = job.Job.new(settings, paths, column, output, options)
        with commands.cluster(cluster, commands.engines_of(count, 1, cpus, gpus), device) as engines:
            tally = job.explain(work, engines)
            echo(client_cli.job_summary(tally, work.output))
            return client_cli.FAILED if tally.left else 0
