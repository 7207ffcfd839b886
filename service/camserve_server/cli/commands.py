"""What `camserve-server` can do: serve, and explain files without a network."""

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from camserve import cli as client_cli
from camserve.terminal import echo, print_table
from camserve_server.api import tokens
from camserve_server.core import config, logs
from camserve_server.core.errors import ConfigError

if TYPE_CHECKING:
    from camserve_server.app.explainer import Explainer
    from camserve_server.models.values import ModelInfo
    from camserve_server.tuning import Tuned

BUSY = 0.25  # share of the cores that others may keep at work: threads that compute together wait for the last one

F = TypeVar("F", bound=Callable[..., Any])


def _settings_options(command: F) -> F:
    """Give a command a flag for every setting."""
    for name, setting in reversed(config.Settings.model_fields.items()):
        if name == "models":
            option = click.option("--model", "models", multiple=True, metavar="MODEL", help=setting.description)
        elif setting.annotation is bool:
            option = click.option(f"--{name}", name, is_flag=True, default=None, help=setting.description)
        else:
            option = click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=setting.description)
        command = option(command)
    return click.option("--config", "path", metavar="FILE", help="TOML file with settings.")(command)


def _load(path: str | None, flags: dict[str, Any]) -> config.Settings:
    flags["models"] = flags["models"] or None
    settings = config.load(path, flags)
    _search_current_folder(settings.models)
    return settings


def _search_current_folder(named: Iterable[str]) -> None:
    """Make the modules of users' own factories importable from the current folder."""
    from camserve_server import models  # noqa: PLC0415 -- importing torch takes seconds, which --help does not need

    for text in named:
        models.search_current_folder(models.parse(text))


@contextmanager
def _told() -> Iterator[None]:
    """Say what the operator got wrong in a line, without a traceback."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


@click.group(cls=client_cli.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def program() -> None:
    """Explain what vision models see: Grad-CAM and saliency heatmaps over gRPC."""


@program.command()
@_settings_options
def serve(path: str | None, **flags: Any) -> int:
    """Serve until SIGTERM or Ctrl-C; a second one cuts the drain short.

    Every setting can also stand in the TOML file (by its name with underscores) or in the environment (as
    CAMSERVE_MAX_QUEUE_ROWS); flags win over the environment, and the environment over the file.
    """
    from camserve_server import workers  # noqa: PLC0415 -- torch takes seconds, which --help need not
    from camserve_server.app import server  # noqa: PLC0415 -- torch takes seconds, which --help need not

    with _told():
        settings = _load(path, flags)
        logs.configure(settings.log_level, settings.log_format)
        if settings.isolation == "process":
            workers.open_fork_server()
        return asyncio.run(server.serve_until_signal(settings))


@program.command("check-config")
@click.argument("path", metavar="FILE", required=False)
@click.option("--load", is_flag=True, help="Load every model too, and show what was found in it.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of such a file, for editors, in place of checking.")
def check_config(path: str | None, *, load: bool, schema: bool) -> int:
    """Say all that is wrong with a TOML file of settings; exit with 1 if anything is.

    No model is loaded without --load. The environment and flags, which may add to the file when it is served, are left
    out. With the first line `#:schema ./camserve.schema.json` in it, and that file written by --schema, editors such as
    VS Code complete and check settings while they are written.
    """
    if schema:
        echo(json.dumps(config.schema(), indent=2))
        return 0
    if path is None:
        raise click.UsageError("name the FILE to check, or ask for its --schema")
    from camserve_server.cli import config_check  # noqa: PLC0415 -- torch takes seconds, which --help need not

    logs.configure("error", "text")
    seen: list[ModelInfo] = []
    faults = config_check.check(path, seen.append if load else None)
    for info in seen:
        echo(_shown(info))
    for fault in faults:
        echo(f"{path}:{fault.line}: {fault.words}" if fault.line else f"{path}: {fault.words}", err=True)
    summary = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "nothing is wrong"
    echo(f"{path}: {summary}", err=bool(faults))
    return int(bool(faults))


def _shown(info: "ModelInfo") -> str:
    labels = f'"{info.labels[0]}" to "{info.labels[-1]}"' if info.labels else "without labels"
    size = "x".join(map(str, info.preprocess.size))
    return f"{info.name}: {info.source}, {size} pixels, {info.classes} classes, {labels}; layer {info.default_layer}"


@program.group()
def token() -> None:
    """Make the tokens by which callers are known: see the setting tokens_file."""


@token.command("new")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(tokens.ROLES),
    default=("explain", "observe"),
    show_default=True,
    help="What it is for: to explain and judge; to see models and methods; to change something. Repeat it.",
)
@click.option(
    "--expires", type=click.DateTime(["%Y-%m-%d"]), metavar="YYYY-MM-DD", help="Its last day, in UTC. Default: none."
)
def new_token(name: str, roles: tuple[str, ...], expires: datetime | None) -> None:
    """Make a token for NAME; print it, and the line of the tokens file by which the server knows it.

    The token is shown this once: the file has but its hash. The server takes the file up within a second of a change:
    a token is revoked by removing its line, and renewed by a second line for the same name.
    """
    with _told():
        secret, known = tokens.new(name, roles, expires.date() if expires else None)
    echo(f"token: {secret}")
    echo(f"line:  {known.line()}")


@program.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--seconds", type=click.FloatRange(min=1), default=60, show_default=True, help="Measuring may take.")
@click.option(
    "--latency-ms", type=click.FloatRange(min=1), default=1000, show_default=True, help="A batch may take, at most."
)
@click.option(
    "--precision",
    type=click.Choice(("same", "any")),
    default="same",
    show_default=True,
    help="Leave each model in its own, float32 unless it says otherwise; or take any that is faster.",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--write", "path", type=click.Path(path_type=Path), metavar="FILE", help="Settings file to write.")
@click.option("--force", is_flag=True, help="Write it though it is there; what is not tuned stays in it.")
def tune(
    models: tuple[str, ...], path: Path | None, *, precision: str, device: str, force: bool, **limits: float
) -> None:
    """Measure models on this machine; choose threads, and how many images a batch may have.

    MODEL is [NAME=]SOURCE:ARCH[?option=value]; without one, those of the settings that there are. Precisions that the
    device has instructions for are measured beside float32, and how alike their maps are; one that is not a model's own
    is chosen only with --precision any. What is chosen is printed as settings, or written for `serve --config FILE`.
    """
    from camserve_server import tuning  # noqa: PLC0415 -- torch takes seconds, which --help need not

    with _told():
        if path:
            tuning.check_writable(path, force=force)
        models = models or config.load(path if path and path.exists() else None).models
        _search_current_folder(models)
        logs.configure("error", "text")
        _announce(models, limits["seconds"])
        wishes = tuning.Wishes(limits["seconds"], limits["latency_ms"] / 1e3, precision == "any")
        _tell(tuning.tune(models, device, wishes), path)


def _announce(models: Iterable[str], seconds: float) -> None:
    echo(f"measuring {', '.join(models)}: {seconds:g} seconds at most, once loaded", err=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY * (os.cpu_count() or 1):
        echo(f"this machine is at work (load {load:.1f}): what is measured now says little of it idle", err=True)


def _tell(tuned: "Tuned", path: Path | None) -> None:
    """Print what was measured and chosen; print the settings too, or write them."""
    from camserve_server import tuning  # noqa: PLC0415 -- as above

    print_table(tuning.HEADINGS, tuned.rows())
    echo("\n" + "\n".join(tuned.words()) + "\n")
    if path:
        tuning.write(path, tuned.settings(), tuned.words())
        echo(f"written: {path}")
    else:
        echo(tuning.toml(tuned.settings()).rstrip("\n"))


# What `camserve explain` and `camserve replay` ask a server, their namesakes here ask an `Explainer`: in this process,
# and with the same answers.
def _questions(command: click.Command) -> list[click.Parameter]:
    return [option for option in command.params if option.name not in ("server", "model", *client_cli.ACCESS)]


def _model_options(command: F) -> F:
    """Give a command the flags of the one model that it loads."""
    command = click.option("--device", default="auto", show_default=True, help="cpu or cuda:N.")(command)
    return click.option(
        "--model",
        default="efficientnet_lite0",
        show_default=True,
        metavar="MODEL",
        help="[NAME=]SOURCE:ARCH[?option=value].",
    )(command)


def _explainer(model: str, device: str, isolation: str, timeout: float) -> "Explainer":
    """Load the one model of a command."""
    from camserve_server import Explainer  # noqa: PLC0415 -- as above

    logs.configure("warning", "text")
    # The environment may also say where a server listens, and what it serves.
    found = config.from_environment()
    settings = {name: value for name, value in found.items() if name == "threads" or name.startswith("max_")}
    with _told():
        return Explainer(model, device=device, timeout=timeout, settings={**settings, "isolation": isolation})


@program.command(params=_questions(client_cli.explain), help=client_cli.explain.help)
@_model_options
@click.pass_context
def explain(context: click.Context, /, model: str, device: str, **question: Any) -> int:
    """Explain photos without a server."""
    # A photo that brings its engine down is not to take a job along.
    isolation = "process" if question["resume"] else "thread"
    with _explainer(model, device, isolation, question["timeout"]) as explainer:
        code: int = context.invoke(client_cli.explain, connect=lambda: explainer, server="", model=None, **question)
        return code


@program.command(params=_questions(client_cli.replay), help=client_cli.replay.help)
@_model_options
@click.pass_context
def replay(context: click.Context, /, model: str, device: str, **question: Any) -> int:
    """Replay a receipt without a server."""
    with _explainer(model, device, "thread", question["timeout"]) as explainer:
        code: int = context.invoke(client_cli.replay, connect=lambda: explainer, server="", **question)
        return code


@program.group()
def ray() -> None:
    """Serve, or explain a data set, on many machines: on a Ray cluster."""


def _engine_options(command: F) -> F:
    """Give a command the flags that say how many engines there are, and what each has."""
    options = (
        click.option("--cluster", metavar="ADDRESS", envvar="RAY_ADDRESS", help="Default: this machine alone."),
        click.option("--engines", "count", default="1", show_default=True, metavar="N or LEAST-MOST"),
        click.option("--cpus", type=click.IntRange(min=1), default=1, show_default=True, help="Cores of each engine."),
        click.option("--gpus", type=float, default=-1, help="GPUs of each engine. Default: one where there are any."),
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
    help="In flight for each engine; with more of them an engine is added, up to the most.",
)
@_settings_options
def ray_serve(
    path: str | None, cluster: str | None, count: str, rows: int, cpus: int, gpus: float, **flags: Any
) -> int:
    """Serve by Ray Serve until SIGTERM or Ctrl-C: the same service behind Ray's gRPC proxy.

    The proxy listens on the port of --address, on every interface, without TLS and tokens: it wants --insecure.
    """
    from camserve_server.cluster import application, commands  # noqa: PLC0415 -- as above

    with _told():
        settings = _load(path, flags)
        logs.configure(settings.log_level, settings.log_format)
        application.check(settings)
        with commands.cluster(cluster, commands.engines_of(count, rows, cpus, gpus), settings.device) as engines:
            return commands.serve(settings, engines)


def _job_questions() -> list[click.Parameter]:
    given = ("paths", "output", "resume", "timeout")
    return [option for option in _questions(client_cli.explain) if option.name not in given]


@ray.command("explain", params=_job_questions())
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("-o", "--output", required=True, metavar="DIR", help="A folder or URI that all machines can write to.")
@_engine_options
@_model_options
def ray_explain(
    paths: tuple[str, ...], output: str, column: str, cluster: str | None, count: str, **options: Any
) -> int:
    """Explain a data set by Ray Data: what `explain --resume` does, by many machines at once.

    PATH is a folder, a glob, a Parquet file or a URI such as s3://BUCKET/PREFIX, which all machines can read. Begun
    again with the same words it goes on where it was.
    """
    from camserve_server.cluster import commands, job  # noqa: PLC0415 -- as above

    cpus, gpus, model, device = (options.pop(name) for name in ("cpus", "gpus", "model", "device"))
    with _told():
        _search_current_folder((model,))
        settings = commands.settings_for_job((model,), device, cpus)
        asked = job.Job.new(settings, paths, column, output, options)
        with commands.cluster(cluster, commands.engines_of(count, 1, cpus, gpus), device) as engines:
            tally = job.explain(asked, engines)
            echo(client_cli.job_summary(tally, asked.output))
            return client_cli.FAILED if tally.left else 0
