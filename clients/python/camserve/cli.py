"""The `camserve` command: explain photos with a server, and list its models, layers, methods and metrics.

Other programs can run these commands with a client of their own: see ``Connect``.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, cast

import click

import camserve
from camserve import _files, _inspection, _local, _tables, dataset
from camserve._settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT
from camserve.diff import command, run, values
from camserve.terminal import brief, echo, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import ExitStack
    from typing import Unpack

    from rich.text import Text

    from camserve._inspection_codec import InspectOptions

Connect: TypeAlias = "Callable[..., camserve.Client]"
"""Function that returns the client of a command, which closes it at its end. ``diff`` may pass another address.

By default the client is created from the connection options (``--server``, ``--timeout``, ``--tls``, …). Another
program can pass its own function as ``connect`` to click's ``Context.invoke``. The connection options are then
ignored, and the other options have their defaults:

    context.invoke(cli.explain, connect=lambda: client, paths=("cat.jpg",), output=Path("out"))
"""

T = TypeVar("T")

FAILED, INTERRUPTED = 1, 130
"""Exit codes of a command that failed, and of one that was interrupted with Ctrl-C."""

_METHOD_FLAGS = ("augmentation_smoothing", "eigen_smoothing", "per_channel")
"""Options of a method that need no value, in the order of Method's fields."""

_SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


class Command(click.Command):
    """Command that rejects a repeated option, unless the option accepts several values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reject a second value; click would silently use the last one."""
        if not ctx.resilient_parsing and not (self.no_args_is_help and not args):
            *_, parsed_options = self.make_parser(ctx).parse_args(list(args))
            for option, count in Counter(parsed_options).items():
                if count > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                    raise click.UsageError(f"{option.opts[-1]} was given {count} times, but accepts one value", ctx)
        return super().parse_args(ctx, args)


class Commands(click.Group):
    """Group of commands that reports an error in one line and with the exit code."""

    command_class = Command
    group_class = type  # click then creates subgroups of this class too

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except (click.ClickException, click.Abort, camserve.CamserveError, OSError) as error:
            code = _report(error)
        sys.exit(code)


def _report(error: Exception) -> int:
    if isinstance(error, click.Abort):
        return _print_error("interrupted", INTERRUPTED)
    if isinstance(error, click.ClickException):
        return _print_error(error.format_message(), error.exit_code)
    return _print_error(str(error))


def _print_error(message: str, exit_code: int = FAILED) -> int:
    echo(f"error: {brief(' '.join(message.split()))}", err=True)
    return exit_code


def _access_option(flag: str, text: str, metavar: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Create an option for TLS or authentication; without a metavar it is a switch."""
    variable = "CAMSERVE_" + flag.removeprefix("--").replace("-", "_").upper()
    return click.option(
        flag, envvar=variable, show_envvar=True, metavar=metavar, is_flag=metavar is None, default=None, help=text
    )


_CONNECTION_OPTIONS = (
    click.option(
        "--server",
        default=DEFAULT_ADDRESS,
        show_default=True,
        envvar="CAMSERVE_SERVER",
        show_envvar=True,
        metavar="HOST:PORT",
        help="Address of the server.",
    ),
    click.option(
        "--timeout",
        default=DEFAULT_TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        type=click.FloatRange(0, min_open=True),
        help="Timeout of each request.",
    ),
    _access_option("--tls", "Use TLS and trust the public certificate authorities.", None),
    _access_option("--ca", "Use TLS and trust only the certificate authority in this file.", "FILE"),
    _access_option("--tls-name", "Name in the server's certificate, if it is not its address.", "NAME"),
    _access_option("--client-cert", "Client certificate, for a server that requires one.", "FILE"),
    _access_option("--client-key", "Private key of the client certificate.", "FILE"),
    _access_option("--token", "Access token. Other users can see a flag, so prefer the environment variable.", "TOKEN"),
)
ACCESS_OPTIONS = ("tls", "ca", "tls_name", "client_cert", "client_key", "token")


def _connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the connection options to a command, and create its ``connect`` from them unless a program passes one."""

    @functools.wraps(command)
    def with_connection(*args: Any, server: str, timeout: float, connect: Connect | None = None, **options: Any) -> Any:
        access = {name: value for name in ACCESS_OPTIONS if (value := options.pop(name, None))}
        if "ca" in access:
            access["tls"] = access.pop("ca")

        def create_client(address: str = server) -> camserve.Client:
            with _as_usage_errors():
                return camserve.Client(address, timeout=timeout, **access)

        return command(*args, connect=connect or create_client, **options)

    for option in reversed(_CONNECTION_OPTIONS):
        option(with_connection)
    return with_connection


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def main() -> None:
    """Explain the predictions of vision models with a camserve server."""


def _parse_method(text: str) -> camserve.Method:
    name, _, rest = text.partition(":")
    items = [item.strip() for item in rest.split(",") if item.strip()]
    pairs = [item.partition("=") for item in items if item not in _METHOD_FLAGS]
    for key, equals, _value in pairs:
        if not equals:
            raise click.BadParameter(f"{key!r} is neither KEY=VALUE nor one of {', '.join(_METHOD_FLAGS)}")
    values = {key.strip(): value.strip() for key, _, value in pairs}
    channels = _parse_channels(values.pop("per_channel", ""))
    parameters = {key: _parse_number_or_text(value) for key, value in values.items()}
    method = camserve.Method(name, parameters, *(option in items for option in _METHOD_FLAGS))
    return replace(method, per_channel=channels) if channels else method


def _parse_channels(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split("+"))) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"per_channel is a channel or several, such as 3+7, not {text!r}") from error


def _parse_target(text: str) -> camserve.TargetLike:
    kind, colon, rest = text.partition(":")
    if colon and kind in _TARGET_PARSERS:
        return _TARGET_PARSERS[kind](rest.strip())
    why, versus, why_not = text.partition(" vs ")
    if versus:
        return camserve.contrast(_parse_class(why), _parse_class(why_not))
    return _parse_class(why)


def _parse_finer(text: str) -> camserve.TargetLike:
    why, _, against = text.partition(" vs ")
    return camserve.finer(_parse_class(why), *map(_parse_class, against.split(",") if against else ()))


def _parser_with_box(
    create: Callable[[str | int, camserve.BoxLike | None], camserve.TargetLike],
) -> Callable[[str], camserve.TargetLike]:
    """Return a parser of CLASS or CLASS@LEFT,TOP,RIGHT,BOTTOM."""

    def parse(text: str) -> camserve.TargetLike:
        class_, _, edges = text.partition("@")
        return create(_parse_class(class_), _parse_edges(edges) if edges else None)

    return parse


def _parse_mask(text: str) -> camserve.TargetLike:
    class_, _, path = text.partition("@")
    if not path:
        raise click.BadParameter(f"{text!r} is not CLASS@MASK.png")
    return camserve.mask(_parse_class(class_), path)


def _parse_edges(text: str) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM") from error
    return left, top, right, bottom


def _parse_box(text: str) -> camserve.Box:
    return camserve.Box(*_parse_edges(text))


_TARGET_PARSERS: dict[str, Callable[[str], camserve.TargetLike]] = {
    "probability": lambda text: camserve.probability(_parse_class(text)),
    "finer": _parse_finer,
    "similarity": camserve.similarity,
    "text": camserve.text,
    "segment": _parser_with_box(camserve.segment),
    "mask": _parse_mask,
    "detection": _parser_with_box(camserve.detection),
}


def _parse_number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parse_class(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text


def _parse_bands(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _parse_intervention(text: str) -> camserve.Intervention:
    change, _, rest = text.partition(":")
    layer, *parts = rest.split(":")
    pairs = [part.partition("=") for part in parts if part != "input"]
    try:
        options = {name: _INTERVENTION_OPTIONS[name](value) for name, _, value in pairs}
        return _INTERVENTIONS[change](layer, **options, **({"input": True} if "input" in parts else {}))
    except KeyError as error:
        known = _INTERVENTIONS if error.args[0] == change else [*_INTERVENTION_OPTIONS, "input"]
        raise click.BadParameter(f"{error.args[0]!r} in {text!r} is not one of {', '.join(known)}") from error
    except (TypeError, ValueError, camserve.InvalidArgument) as error:
        needed = "scale needs factor=, clip_gradient limit=, and channels= are numbers such as 12,40"
        raise click.BadParameter(f"cannot read {text!r}: {needed}") from error


_INTERVENTIONS: dict[str, Callable[..., camserve.Intervention]] = {
    function.__name__: function
    for function in (
        camserve.silence,
        camserve.scale,
        camserve.clamp,
        camserve.replace_mean,
        camserve.clip_gradient,
    )
}
_INTERVENTION_OPTIONS: dict[str, Callable[[str], object]] = {
    "channels": lambda text: [int(index) for index in text.split(",")],
    "factor": float,
    "minimum": float,
    "maximum": float,
    "limit": float,
}


class ExplainFlags(TypedDict):
    """Options of `explain` that say what to explain and which files to write."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    targets: tuple[camserve.TargetLike, ...]
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layers: tuple[str, ...]
    fusion: str | None
    top_k: int
    colormap: str | None
    alpha: float
    overlay: str
    heatmap: bool
    intensity: bool
    receipts: bool
    profile: str
    sign: str | None
    scale: str | float
    threshold: float | None
    threshold_value: float | None
    contour_lines: int
    color_bar: bool
    fade: bool
    regions: bool
    region_quantile: float | None
    region_mass: float | None
    max_regions: int | None
    draw_regions: bool
    max_side: int | None
    value_range: tuple[float, float] | None
    bands: tuple[int, ...]
    window: tuple[float, float] | None


_REGION_OPTIONS = {
    "region_quantile": "quantile",
    "region_mass": "mass",
    "max_regions": "max_regions",
    "draw_regions": "draw",
}
"""Fields of ``RegionOptions`` by the flags that set them."""


_OPTIONAL = ("value_range", "bands", "window")
"""Options that a job records only if they are given, so that a newer client continues the jobs of an older one."""


class _ImagePath(click.ParamType[str]):
    """A file, a folder, a glob with a match, or a URI."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reject a path that does not exist before any work starts."""
        if not dataset.exists(value):
            self.fail(f"Path {value!r} does not exist.", param, ctx)
        return str(value)


class _LocalFolder(click.Path):
    """A local folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject a URI, which would become a local path."""
        if _files.scheme_of(str(value)):
            reason = "the folder must be local; `camserve-server ray explain` writes to object stores"
            self.fail(f"{value} is a URI: {reason}", param, ctx)
        return super().convert(value, param, ctx)


def _none_if_omitted(context: click.Context, option: click.Parameter, value: T) -> T | None:
    """Return None for an option that was not given, so that the server chooses its value."""
    is_default = context.get_parameter_source(option.name or "") is click.core.ParameterSource.DEFAULT
    return None if is_default else value


_photo_argument = click.argument("photo", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PHOTO")
_model_option = click.option("--model", metavar="NAME", help="Model to use. Default: the server's first model.")
_layers_option = click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="NAME",
    help='Layer to explain, or "pyramid" for all scales of a detector in one map. Repeatable. Default: the pyramid, if '
    "there is one, or else the model's default layer.",
)
_texts_option = click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Text that is a class, such as 'a photo of a cat', for models that compare images with texts. Repeatable. "
    "Default: the labels of the model.",
)
_interventions_option = click.option(
    "--intervention",
    "interventions",
    multiple=True,
    type=_parse_intervention,
    metavar="CHANGE:LAYER[:OPTION...]",
    help="Change to what a layer returns: silence:layer4:channels=12,40, scale:layer3:factor=0.5, "
    "clamp:layer2:minimum=0:maximum=6, replace_mean:layer4 or clip_gradient:layer3:limit=1. With :input, to what it "
    "receives. Repeatable, applied in order.",
)
_fusion_option = click.option(
    "--fusion",
    type=click.Choice(["mean", "max", "product", "sum"]),
    help="Combine the maps of several layers into one.",
)
_target_option = click.option(
    "--target",
    type=_parse_target,
    metavar="CLASS[ vs CLASS]",
    help='Target: a label, a class index, or "tabby vs tiger cat". Default: the predicted class.',
)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=_ImagePath(), metavar="PATH...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=_LocalFolder(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the overlays, created if it is missing.",
)
@_model_option
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=_parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method, such as smoothgrad:samples=32. These need no value: gradcam:eigen_smoothing, "
    "gradcam:augmentation_smoothing, and saliency:per_channel for a map of each channel of the input, or "
    "saliency:per_channel=3+7 for some. Repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=_parse_target,
    metavar="TARGET",
    help='Target: a label, a class index, "tabby vs tiger cat", "finer:tabby", "probability:tabby", "segment:cat", '
    '"mask:cat@MASK.png", "detection:dog@LEFT,TOP,RIGHT,BOTTOM", "similarity:OTHER.jpg" or "text:a cat". Repeatable. '
    "Default: the predicted class.",
)
@_texts_option
@_interventions_option
@_layers_option
@_fusion_option
@click.option(
    "--top-k",
    default=1,
    show_default=True,
    metavar="N",
    help="Number of predicted classes to explain if there is no --target.",
)
@click.option(
    "--colormap",
    default="jet",
    show_default="jet; coolwarm for --sign both",
    metavar="NAME",
    callback=_none_if_omitted,
    help="Colour map of the heatmap.",
)
@click.option("--alpha", default=0.5, show_default=True, help="Opacity of the heatmap, 0 to 1.")
@click.option(
    "--format",
    "overlay",
    default="jpeg",
    show_default=True,
    type=click.Choice(["jpeg", "png", "webp"]),
    help="Format of the overlays.",
)
@click.option("--heatmaps", "heatmap", is_flag=True, help="Also write the raw maps, as .npy.")
@click.option(
    "--intensities", "intensity", is_flag=True, help="Also write the coloured intensities, as .intensity.npy."
)
@click.option(
    "--profile",
    default="paper",
    show_default=True,
    type=click.Choice(["paper", "grad-cam", "torchcam", "captum", "signed"]),
    help="Convention that converts raw values to colours. `signed` shows evidence for and against the target.",
)
@click.option(
    "--sign",
    type=click.Choice(["positive", "negative", "both", "absolute"]),
    help="Values to show. Default: positive; both with --profile signed.",
)
@click.option(
    "--scale",
    default="map",
    show_default=True,
    type=_parse_number_or_text,
    metavar="map|request|VALUE",
    help="Raw value with the strongest colour: each map's own, the largest of the photo's maps, or a number.",
)
@click.option(
    "--threshold",
    type=float,
    metavar="QUANTILE",
    help="Paint only values above this quantile: 0.8 paints the strongest fifth.",
)
@click.option("--threshold-value", type=float, metavar="VALUE", help="Paint only raw values above this one.")
@click.option("--contour-lines", default=0, show_default=True, metavar="N", help="Number of contour lines, up to 16.")
@click.option("--color-bar", is_flag=True, help="Add a bar with the colours and their raw values.")
@click.option("--fade", is_flag=True, help="Show the photo where the map is weak.")
@click.option(
    "--regions", is_flag=True, help="Also write the regions of each map, as .regions.json, and print a table of them."
)
@click.option(
    "--region-quantile",
    type=float,
    metavar="QUANTILE",
    help="Regions are above this quantile. Default: 0.8. Implies --regions.",
)
@click.option(
    "--region-mass",
    type=float,
    metavar="SHARE",
    help="Regions are the strongest pixels with this share of the map's sum. Implies --regions.",
)
@click.option("--max-regions", type=int, metavar="N", help="Maximum number of regions. Default: 8. Implies --regions.")
@click.option("--draw-regions", is_flag=True, help="Draw the outlines of the regions. Implies --regions.")
@click.option("--receipts", is_flag=True, help="Also write receipts for `camserve replay`, as .receipt.json.")
@click.option("--max-side", type=int, metavar="PIXELS", help="Maximum length of an overlay's longer side.")
@click.option(
    "--value-range",
    type=float,
    nargs=2,
    metavar="LOW HIGH",
    help="Values of a TIFF or NPY file that the model takes as 0 and 1, such as 0 4095. Default: those of their type.",
)
@click.option(
    "--bands",
    default="",
    type=_parse_bands,
    metavar="BAND|RED,GREEN,BLUE",
    help="Channels of the photo under the map, from 0. Default: the first three, or the first.",
)
@click.option(
    "--window",
    type=float,
    nargs=2,
    metavar="CENTRE WIDTH",
    help="Values of the photo under the map, from black to white. Default: all of 8 bits, or smallest to largest.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Run as a resumable job, for many photos, with the results as Parquet in DIR.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="With --resume: explain photos again whose row has an error.",
)
@click.option(
    "--column",
    default="",
    metavar="NAME",
    help='Column of a Parquet file with the photos, as bytes or paths. Default: "image", or the only one with bytes.',
)
@click.option(
    "--dry-run", is_flag=True, help="Print the cost in rows (copies of a photo through the model), and send no photo."
)
@click.option(
    "--allow-outside",
    is_flag=True,
    help="Also read photos outside of the named folders: through links, or by the paths in a Parquet file.",
)
@_connection_options
def explain(  # noqa: PLR0913 -- every one is an option of the command
    paths: tuple[str, ...],
    output: Path,
    connect: Connect,
    *,
    resume: bool,
    retry_failed: bool,
    column: str,
    dry_run: bool,
    allow_outside: bool,
    **flags: Unpack[ExplainFlags],
) -> int:
    """Explain photos and write the overlays.

    PATH is a photo, a folder of photos, or a glob in quotes. Each overlay is named PHOTO.METHOD.CLASS.SUFFIX.

    With --resume, PATH can also be a Parquet file or a URI such as s3://BUCKET/PREFIX. To continue an interrupted
    job, run the same command again. The results have each photo once.
    """
    if retry_failed and not resume:
        raise click.UsageError("--retry-failed needs --resume")
    if resume:
        with _as_usage_errors():
            photos = dataset.Photos(paths, column, str(output), allow_outside=allow_outside)
        if dry_run:
            return _print_cost(photos, connect, flags)
        return _run_job(photos, output, connect, flags, retry_failed=retry_failed)
    with _as_usage_errors():
        images, skipped = _files.images_in(paths, output, allow_outside=allow_outside)
    for path in skipped:
        _print_error(f"{path} is a link out of its folder: use --allow-outside to follow it")
    if dry_run:
        return _print_cost(images, connect, flags)
    return _explain_images(images, output, connect, flags) or (FAILED if skipped else 0)


def _print_cost(photos: Iterable[object], connect: Connect, flags: ExplainFlags) -> int:
    with _as_usage_errors():
        client = connect()
    with client:
        with _as_usage_errors():
            cost = client.estimate_cost(**_explain_options(flags))
        count = sum(1 for _ in photos)
    print_table(_tables.COST_HEADINGS, [_tables.cost_row(cost, count)])
    return 0


def _explain_images(images: list[Path], output: Path, connect: Connect, flags: ExplainFlags) -> int:
    options = _explain_options(flags)
    names = _files.UniqueNames(output)
    rows: list[Sequence[str | Text]] = []
    region_rows: list[Sequence[str]] = []
    failed = 0
    with _as_usage_errors():
        client = connect()
    with client:
        with _as_usage_errors():
            outcomes = client.explain_many(images, progress=True, on_error="return", **options)
        output.mkdir(parents=True, exist_ok=True)
        try:
            for image, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, camserve.CamserveError):
                    failed += _print_error(f"{image}: {outcome}")
                    continue
                if odd := _unasked_methods(outcome, flags):
                    failed += _print_error(f"{image}: the server answered with methods that were not asked for: {odd}")
                    continue
                written = _write_result(names, image, outcome, flags)
                rows += _tables.result_rows(image, written, outcome)
                region_rows += _tables.region_rows(written)
        finally:
            # Also after an error or Ctrl-C, list the files that were written.
            if rows:
                print_table(_tables.RESULT_HEADINGS, rows)
            if region_rows:
                echo()
                print_table(_tables.REGION_HEADINGS, region_rows)
    return FAILED if failed else 0


def _run_job(photos: dataset.Photos, output: Path, connect: Connect, flags: ExplainFlags, *, retry_failed: bool) -> int:
    with _as_usage_errors():
        spec = job_spec(flags)
        client = connect()
    with client, dataset.locked(output):
        store = dataset.Store(str(output))
        with _as_usage_errors():
            dataset.open_job(store, spec, client.model(flags["model"] or ""))
            total = sum(1 for _ in photos)
        if not total:
            raise click.UsageError(f"no images in {photos}")
        if retry_failed:
            dataset.remove_failed(store, photos)
        with dataset.progress_bar(total) as update:
            tally = dataset.run(client, photos, store, spec, update)
            update(tally)  # also if nothing was left to explain
    echo(job_summary(tally, str(output)))
    return FAILED if tally.left else 0


def job_spec(flags: ExplainFlags) -> dataset.JobSpec:
    """Return the options of a job.

    Raises:
        InvalidArgument: An option is out of range.
    """
    outputs = dataset.Outputs(flags["overlay"], flags["heatmap"], flags["receipts"])
    options = _explain_options(flags)
    options["regions"] = _region_options(flags, masks=False)  # the results are a table, which has no masks
    spec = dataset.JobSpec(options, outputs)
    spec.plain()  # validates the options
    return spec


def job_summary(tally: dataset.Tally, output: str) -> str:
    """Return a text with the outcome of a job: the numbers of photos, and the folder with the results."""
    before = f" ({tally.before:,} by earlier runs)" if tally.before else ""
    outcome = hint = ""
    if failed := tally.failed + tally.failed_before:
        earlier = f" ({tally.failed_before:,} in earlier runs)" if tally.failed_before else ""
        outcome = f": {tally.total - failed:,} explained, {failed:,} failed{earlier}"
        hint = " The rows of failed photos have the errors; --retry-failed tries these photos again."
    done = f"{tally.total:,} photos are done{before}{outcome}. The results are in {output}/results, as Parquet.{hint}"
    left = f"\n{tally.left:,} photos are left for the next run. The last error: {tally.why}" if tally.left else ""
    return done + left


def _explain_options(flags: ExplainFlags) -> camserve.ExplainOptions:
    omitted = {"receipts", "regions", *_REGION_OPTIONS}
    options = {name: value for name, value in flags.items() if name not in omitted}
    for name in _OPTIONAL:
        if not options.get(name):
            options.pop(name, None)
    options["regions"] = _region_options(flags, masks=True)
    # A receipt contains the raw map, to compare with.
    options["heatmap"] = flags["heatmap"] or flags["receipts"]
    return cast("camserve.ExplainOptions", options)


def _region_options(flags: ExplainFlags, *, masks: bool) -> camserve.RegionOptions | None:
    # A program that runs a job may leave flags out.
    values: dict[str, Any] = {field: flags.get(flag) for flag, field in _REGION_OPTIONS.items()}
    given = {field: value for field, value in values.items() if value is not None and value is not False}
    return camserve.RegionOptions(masks=masks, **given) if given or flags.get("regions") else None


@contextmanager
def _as_usage_errors() -> Generator[None, None, None]:
    """Convert invalid arguments, which are found before anything is sent, to usage errors."""
    try:
        yield
    except camserve.InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def _unasked_methods(result: camserve.Result, flags: ExplainFlags) -> str:
    """Return the methods of a result that were not asked for.

    The method is a part of the names of files. With another one the server could replace files of the user.
    """
    asked = {method.name for method in flags["methods"]}
    return ", ".join(sorted({explanation.method for explanation in result.explanations} - asked))


def _write_result(
    names: _files.UniqueNames, image: Path, result: camserve.Result, flags: ExplainFlags
) -> list[tuple[camserve.Explanation, Path]]:
    written: list[tuple[camserve.Explanation, Path]] = []
    with_layer = len(flags["layers"]) > 1 and not flags["fusion"]
    for explanation in result.explanations:
        stem = _files.stem_of(image, explanation, with_layer=with_layer)
        path = explanation.save(names.unique(stem, _SUFFIXES[flags["overlay"]]))
        _write_data(explanation, path, flags)
        written.append((explanation, path))
    return written


def _write_data(explanation: camserve.Explanation, path: Path, flags: ExplainFlags) -> None:
    if flags["heatmap"]:
        explanation.save(path.with_suffix(".npy"))
    if flags["receipts"]:
        explanation.receipt.save(path.with_suffix(".receipt.json"))
    if explanation.intensity is not None:
        _local.write(path.with_suffix(".intensity.npy"), _local.npy(explanation.intensity))
    if _region_options(flags, masks=True):
        _local.write(path.with_suffix(".regions.json"), _tables.regions_as_json(explanation).encode())


def _parse_metric(text: str) -> camserve.Metric:
    method = _parse_method(text)
    return camserve.Metric(method.name, method.parameters)


class _EvaluateFlags(TypedDict):
    """Options of `evaluate` that say what to evaluate."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    metrics: tuple[camserve.Metric, ...]
    targets: tuple[camserve.TargetLike, ...]
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layers: tuple[str, ...]
    box: camserve.Box | None


@main.command()
@_photo_argument
@_model_option
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=_parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method to evaluate. Repeatable.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    default=("deletion", "insertion"),
    show_default=True,
    type=_parse_metric,
    metavar="NAME[:KEY=VALUE,...]",
    help="Metric, such as deletion:steps=50; see `camserve metrics`. Repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=_parse_target,
    metavar="CLASS[ vs CLASS]",
    help="Target: a label or a class index. Repeatable. Default: the predicted class.",
)
@_texts_option
@_interventions_option
@_layers_option
@click.option(
    "--box",
    type=_parse_box,
    metavar="LEFT,TOP,RIGHT,BOTTOM",
    help="Box of the object, in pixels of the photo, for pointing_game and energy_in_box.",
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write a plot of the results."
)
@_connection_options
@_json_option
def evaluate(
    photo: Path, plot: Path | None, connect: Connect, *, as_json: bool, **flags: Unpack[_EvaluateFlags]
) -> None:
    """Compare explanation methods on a photo by metrics."""
    with connect() as client, _as_usage_errors():
        evaluation = client.evaluate(photo, heatmap=False, overlay="jpeg" if plot else None, max_side=640, **flags)
    if as_json:
        echo(_tables.as_json(evaluation.plain()))
    else:
        print_table(evaluation.cells()[0], _tables.evaluation_rows(evaluation))
        for label, remark in evaluation.remarks():
            echo(brief(f"{label}: {remark}"), err=True)
    if plot:
        with _as_usage_errors():
            evaluation.save(plot)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=_ImagePath(), metavar="PATH...")
@click.option(
    "--baseline",
    required=True,
    metavar="MODEL|DIR",
    help="The model to compare with, as NAME or NAME@HOST:PORT, or the folder of a baseline.",
)
@click.option(
    "--candidate", required=True, metavar="MODEL|DIR", help="The new model, as NAME or NAME@HOST:PORT, or a folder."
)
@click.option(
    "-o",
    "--output",
    type=_LocalFolder(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the report, created if it is missing.",
)
@click.option("--accept", is_flag=True, help="Record the candidate as the new baseline, in the folder of --baseline.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=_parse_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Method. Repeatable. Default: that of a recorded baseline, or gradcam.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=_parse_target,
    metavar="TARGET",
    help="Target of both models. Repeatable. Default: the class that the baseline predicts.",
)
@_layers_option
@_fusion_option
@click.option("--top-k", default=1, show_default=True, metavar="N", help="Number of predicted classes to compare.")
@click.option(
    "--boxes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help='JSON file with the box of the object in each photo: {"PHOTO": [LEFT, TOP, RIGHT, BOTTOM]}.',
)
@click.option(
    "--sample",
    default=values.SAMPLE,
    show_default=True,
    type=click.IntRange(min=2),
    metavar="N",
    help="Number of photos to calibrate with.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the calibration.")
@click.option(
    "--max-changed",
    default=values.MAX_CHANGED,
    show_default=True,
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Share of the photos that may change.",
)
@click.option("--skip-failed", is_flag=True, help="Leave out photos that one of the models cannot explain.")
@_connection_options
def diff(
    paths: tuple[str, ...],
    output: Path | None,
    connect: Connect,
    *,
    baseline: str,
    candidate: str,
    accept: bool,
    **flags: Unpack[command.DiffFlags],
) -> int:
    """Compare where two models look.

    PATH is a photo, a folder of photos, or a glob in quotes. Both models explain the class that the baseline predicts.
    The differences are compared with those that noise makes, and with those that random weights make. DIR gets
    index.html, report.json and junit.xml. The exit code is 0 if the models look at the same places, 1 if they differ,
    and 2 if they could not be compared.

    A baseline in a folder needs no model. --accept records it.
    """

    def open_model(text: str, stack: ExitStack) -> run.LiveModel:
        name, _, address = text.partition("@")
        return run.LiveModel(text, stack.enter_context(connect(*filter(None, [address]))), name)

    return run_diff(open_model, paths, (baseline, candidate), output, flags, accept=accept)


def run_diff(
    open_model: command.OpenModel,
    paths: tuple[str, ...],
    sides: tuple[str, str],
    output: Path | None,
    flags: command.DiffFlags,
    *,
    accept: bool,
) -> int:
    """Run the command ``diff``; report an error in one line and with its exit code.

    Args:
        open_model: Function that connects to a model.
        paths: Photos, folders and globs.
        sides: The baseline and the candidate.
        output: Folder of the report.
        flags: The other options.
        accept: True to record the candidate as the new baseline.
    """
    try:
        if accept:
            return command.accept(open_model, paths, sides, flags)
        if output is None:
            raise click.UsageError("Missing option '-o' / '--output'.")
        return command.diff(open_model, paths, sides, output, flags)
    except (camserve.CamserveError, OSError) as error:
        return _print_error(str(error), command.COULD_NOT_COMPARE)
    except KeyboardInterrupt:
        return _print_error("interrupted: run the same command again to go on", command.COULD_NOT_COMPARE)


@main.command()
@_connection_options
@_json_option
def metrics(connect: Connect, *, as_json: bool) -> None:
    """List the metrics, with their parameters and defaults."""
    with connect() as client:
        infos = client.metrics()
    headings = ("metric", "better", "rows", "parameters", "description")
    _print(infos, headings, _tables.metric_rows(infos), as_json=as_json)


@main.command()
@click.argument("receipt", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_photo_argument
@_connection_options
def replay(receipt: Path, photo: Path, connect: Connect) -> int:
    """Explain a photo again and compare the result with a receipt.

    RECEIPT is a .receipt.json file from `camserve explain --receipts`, and PHOTO is its photo. The exit code is 0 if
    the photo, the weights, the score and the map are the same, and 1 if they differ.
    """
    with connect() as client:
        comparison = client.replay(camserve.Receipt.load(receipt), photo)
    print_table(_tables.REPLAY_HEADINGS, _tables.replay_rows(comparison))
    return 0 if comparison.same else FAILED


@main.command()
@_connection_options
@_json_option
def models(connect: Connect, *, as_json: bool) -> None:
    """List the models of the server and their state.

    The first one is the default model.
    """
    with connect() as client:
        served_models = client.models()
    _print(served_models, _tables.MODEL_HEADINGS, _tables.model_rows(served_models), as_json=as_json)


@main.command()
@click.argument("name")
@click.option(
    "--weights",
    default="",
    metavar="FILE",
    help="Weights file in the server's model folder. Default: the configured weights.",
)
@click.option("--sha256", default="", metavar="HEX", help="Expected SHA-256 of the weights file.")
@_connection_options
@_json_option
def load(name: str, connect: Connect, *, weights: str, sha256: str, as_json: bool) -> None:
    """Load or reload a model on the server.

    The server's settings must permit it. Until the new version is ready, the old one serves requests; it stays if
    loading fails.
    """
    with connect() as client:
        model = client.load_model(name, weights=weights, sha256=sha256)
    _print(model, _tables.MODEL_HEADINGS, _tables.model_rows([model]), as_json=as_json)


@main.command()
@click.argument("name")
@_connection_options
@_json_option
def unload(name: str, connect: Connect, *, as_json: bool) -> None:
    """Unload a model from the server.

    The server's settings must permit it. Requests that the model has accepted are completed.
    """
    with connect() as client:
        model = client.unload_model(name)
    _print(model, _tables.MODEL_HEADINGS, _tables.model_rows([model]), as_json=as_json)


@main.command()
@click.argument("model", default="")
@_connection_options
@_json_option
def layers(model: str, connect: Connect, *, as_json: bool) -> None:
    """List the layers of a model.

    MODEL is the name of a model. Default: the server's first model.
    """
    with connect() as client:
        model_layers = client.layers(model)
    headings = ("layer", "type", "output", "parameters", "explainable")
    _print(model_layers, headings, _tables.layer_rows(model_layers), as_json=as_json)


@main.command()
@click.argument("name", default="")
@_connection_options
@_json_option
def methods(name: str, connect: Connect, *, as_json: bool) -> None:
    """List the methods, or describe one method.

    The list has the parameters and their defaults. The description of the method NAME has its formula, paper, cost
    and the allowed values of its parameters.
    """
    with connect() as client:
        infos = client.methods()
    if name:
        _print_method(_find_method(name, infos), as_json=as_json)
    else:
        headings = ("method", "kind", "rows", "parameters", "description")
        _print(infos, headings, _tables.method_rows(infos), as_json=as_json)


def _find_method(name: str, methods: Sequence[camserve.MethodInfo]) -> camserve.MethodInfo:
    by_name = {method.name: method for method in methods}
    if name in by_name:
        return by_name[name]
    similar = difflib.get_close_matches(name, by_name, n=1)
    hint = f' (did you mean "{similar[0]}"?)' if similar else ""
    raise camserve.NotFound(f'unknown method "{name}"{hint}: the methods are {", ".join(by_name)}')


def _print_method(method: camserve.MethodInfo, *, as_json: bool) -> None:
    if as_json:
        echo(_tables.as_json(method))
        return
    echo(_tables.method_page(method))
    if method.parameters:
        echo()
        print_table(_tables.PARAMETER_HEADINGS, _tables.parameter_rows(method.parameters))


@main.command()
@_photo_argument
@_model_option
@_target_option
@_texts_option
@_interventions_option
@click.option(
    "--layer", "layers", multiple=True, metavar="NAME", help="Layer to measure. Repeatable. Default: all layers."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write a plot of the norms."
)
@_connection_options
@_json_option
def inspect(
    photo: Path, connect: Connect, *, plot: Path | None, as_json: bool, **flags: Unpack[InspectOptions]
) -> None:
    """Measure the output and the gradient of each layer for a photo."""
    with connect() as client:
        inspection = client.inspect(photo, **flags)
    _print(inspection.layers, _inspection.HEADINGS, _tables.reading_rows(inspection.layers), as_json=as_json)
    if plot:
        inspection.save(plot)


class _FeaturesFlags(TypedDict):
    """Options of `features` that say which channels to return."""

    model: str | None
    target: camserve.TargetLike | None
    texts: tuple[str, ...]
    interventions: tuple[camserve.Intervention, ...]
    layer: str | None
    rank: str
    top: int | None
    foreground: bool
    fit: tuple[Path, ...]
    colormap: str


@main.command()
@_photo_argument
@_model_option
@_target_option
@_texts_option
@_interventions_option
@click.option(
    "--layer", metavar="NAME", help="Layer. Default: the model's default layer; of heads, the last attention."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Picture with a tile for each channel (.png, .jpg, .webp), or the raw maps (.npy).",
)
@click.option(
    "--rank",
    default="activation",
    show_default=True,
    type=click.Choice(["activation", "gradient", "pca", "factors", "heads"]),
    help="Order the channels by their mean, or by the absolute value of their Grad-CAM weight. Or draw the principal "
    "components of the features, the concepts in them, or the heads of an attention.",
)
@click.option(
    "--top",
    default=16,
    show_default=True,
    metavar="N",
    help="Number of channels. The default of components is 3, that of concepts 5, and that of heads all.",
)
@click.option("--foreground", is_flag=True, help="Leave out the background. Only for --rank pca.")
@click.option(
    "--fit",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="PHOTO",
    help="Further photo whose features the components describe too. Repeatable. Only for --rank pca.",
)
@click.option("--colormap", default="viridis", show_default=True, metavar="NAME", help="Colour map of the tiles.")
@_connection_options
@_json_option
@click.pass_context
def features(
    context: click.Context,
    photo: Path,
    output: Path,
    connect: Connect,
    *,
    as_json: bool,
    **flags: Unpack[_FeaturesFlags],
) -> None:
    """Draw the strongest channels of a layer.

    These are the channels that are most active for the photo, or that have the largest Grad-CAM weights: see --rank.
    """
    if context.get_parameter_source("top") is click.core.ParameterSource.DEFAULT and flags["rank"] in _tables.RANKED:
        flags["top"] = None  # the server knows the default of the rank
    with connect() as client:
        features = client.features(photo, maps=output.suffix.lower() == ".npy", **flags)
    features.save(output)
    _print(features.channels, *_tables.feature_table(features.channels, flags["rank"]), as_json=as_json)


@main.command()
@click.argument("service", default="")
@_connection_options
@_json_option
def health(service: str, connect: Connect, *, as_json: bool) -> int:
    """Check that the server accepts requests.

    SERVICE is the name of one of its gRPC services. Default: the whole server. The exit code is 0 if
    it does, and 1 if not.
    """
    with connect() as client:
        status = client.health(service)
    _print({"service": service, "status": status}, ("status",), [(status,)], as_json=as_json)
    return 0 if status is camserve.Health.SERVING else FAILED


@main.command()
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one.")
@click.option("--no-browser", is_flag=True, help="Print the address of the page, and open no browser.")
@_connection_options
def ui(connect: Connect, *, port: int, no_browser: bool) -> None:
    """Open the web page for a server, in a browser on this machine.

    The page shows explanations side by side. This command forwards its calls to the server, and keeps the token away
    from the browser. The address of the page has a key, which only you should know. Ctrl-C ends the command.
    """
    from camserve import _ui  # noqa: PLC0415 -- imports an HTTP server

    with connect() as client:
        _ui.run(client, port, open_browser=not no_browser)


def _print(values: object, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], *, as_json: bool) -> None:
    if as_json:
        echo(_tables.as_json(values))
    else:
        print_table(headings, rows)
