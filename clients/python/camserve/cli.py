"""The command `camserve`: explain photos, and see what a server can.

Other programs can run its commands with clients of their own: see ``Connect``.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, cast

import click

import camserve
from camserve import _files, _inspection, _local, _tables, dataset
from camserve._settings import LOCAL, TIMEOUT
from camserve.terminal import brief, echo, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import Unpack

    from rich.text import Text

    from camserve._inspection_codec import InspectOptions

Connect: TypeAlias = "Callable[[], camserve.Client]"
"""Returns the client of a command, which uses it as a context manager and so closes it at the end.

By default it is made from the flags of the connection (``--server``, ``--timeout``, ``--tls``, …). A program that
runs a command with a client of its own passes it as ``connect``, by click's ``Context.invoke``; the flags of the
connection are then ignored, and all others have their defaults:

    context.invoke(cli.explain, connect=lambda: client, paths=("cat.jpg",), output=Path("out"))
"""

FAILED, INTERRUPTED = 1, 130

# In the order of Method's fields.
_MODIFIERS = ("augmentation_smoothing", "eigen_smoothing")

_SUFFIX = {"jpeg": ".jpg", "png": ".png", "webp": ".webp"}


class Command(click.Command):
    """Command that refuses a repeated option, unless the option takes several values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a second value; click would silently use the last one."""
        if not ctx.resilient_parsing and not (self.no_args_is_help and not args):
            *_, order = self.make_parser(ctx).parse_args(list(args))
            for option, count in Counter(order).items():
                if count > 1 and isinstance(option, click.Option) and not (option.multiple or option.is_flag):
                    raise click.UsageError(f"{option.opts[-1]} is given {count} times, and takes one value", ctx)
        return super().parse_args(ctx, args)


class Commands(click.Group):
    """Says whatever goes wrong in one line, and with the exit code."""

    command_class = Command
    group_class = type

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command, and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except (click.ClickException, click.Abort, camserve.CamserveError, OSError) as error:
            code = _complain(error)
        sys.exit(code)


def _complain(error: Exception) -> int:
    if isinstance(error, click.Abort):
        return _say("interrupted", INTERRUPTED)
    if isinstance(error, click.ClickException):
        return _say(error.format_message(), error.exit_code)
    return _say(str(error), FAILED)


def _say(words: str, code: int = FAILED) -> int:
    echo(f"error: {brief(' '.join(words.split()))}", err=True)
    return code


def _known(flag: str, words: str, metavar: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a flag by which client and server know one another; without a metavar it is on or off."""
    variable = "CAMSERVE_" + flag.removeprefix("--").replace("-", "_").upper()
    return click.option(
        flag, envvar=variable, show_envvar=True, metavar=metavar, is_flag=metavar is None, default=None, help=words
    )


_CONNECTION = (
    click.option(
        "--server",
        default=LOCAL,
        show_default=True,
        envvar="CAMSERVE_SERVER",
        show_envvar=True,
        metavar="HOST:PORT",
        help="Where the server listens.",
    ),
    click.option(
        "--timeout",
        default=TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        type=click.FloatRange(0, min_open=True),
        help="How long to wait for an answer.",
    ),
    _known("--tls", "Encrypt, and trust the public authorities.", None),
    _known("--ca", "Encrypt, and trust the authority in this file alone.", "FILE"),
    _known("--tls-name", "Whom the server's certificate names, if not its address.", "NAME"),
    _known("--client-cert", "Your certificate, for a server that asks for one.", "FILE"),
    _known("--client-key", "The key of your certificate.", "FILE"),
    _known("--token", "Your token; other users can see a flag, but not the environment.", "TOKEN"),
)
ACCESS = ("tls", "ca", "tls_name", "client_cert", "client_key", "token")


def _connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of a connection, and ``connect``: made from them, unless a program passes its own."""

    @functools.wraps(command)
    def connected(*args: Any, server: str, timeout: float, connect: Connect | None = None, **rest: Any) -> Any:
        access = {name: value for name in ACCESS if (value := rest.pop(name, None))}
        if "ca" in access:
            access["tls"] = access.pop("ca")

        def by_flags() -> camserve.Client:
            with _checked():
                return camserve.Client(server, timeout=timeout, **access)

        return command(*args, connect=connect or by_flags, **rest)

    for option in reversed(_CONNECTION):
        option(connected)
    return connected


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="camserve")
def main() -> None:
    """Ask a camserve server why a vision model said what it said."""


def _method(text: str) -> camserve.Method:
    name, _, rest = text.partition(":")
    words = [word.strip() for word in rest.split(",") if word.strip()]
    pairs = [word.partition("=") for word in words if word not in _MODIFIERS]
    for key, equals, _value in pairs:
        if not equals:
            raise click.BadParameter(f"{key!r} is neither KEY=VALUE nor one of {', '.join(_MODIFIERS)}")
    parameters = {k.strip(): _number_or_word(v.strip()) for k, _, v in pairs}
    return camserve.Method(name, parameters, *(word in words for word in _MODIFIERS))


def _target(text: str) -> camserve.TargetLike:
    kind, colon, rest = text.partition(":")
    if colon and kind in _TARGETS:
        return _TARGETS[kind](rest.strip())
    why, against, why_not = text.partition(" vs ")
    if against:
        return camserve.contrast(_index_or_label(why), _index_or_label(why_not))
    return _index_or_label(why)


def _finer(text: str) -> camserve.TargetLike:
    why, _, against = text.partition(" vs ")
    return camserve.finer(_index_or_label(why), *map(_index_or_label, against.split(",") if against else ()))


def _placed(make: Callable[[str | int, camserve.BoxLike | None], camserve.TargetLike]) -> Callable[[str], Any]:
    def read(text: str) -> camserve.TargetLike:
        why, _, edges = text.partition("@")
        return make(_index_or_label(why), _box(edges) if edges else None)

    return read


def _box(text: str) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM") from error
    return left, top, right, bottom


_TARGETS: dict[str, Callable[[str], camserve.TargetLike]] = {
    "probability": lambda text: camserve.probability(_index_or_label(text)),
    "finer": _finer,
    "similarity": camserve.similarity,
    "segment": _placed(camserve.segment),
    "detection": _placed(camserve.detection),
}


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _index_or_label(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text


class Wishes(TypedDict):
    """What `explain` was asked for, beside the images and the folder."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    targets: tuple[camserve.TargetLike, ...]
    layers: tuple[str, ...]
    fusion: str | None
    top_k: int
    colormap: str
    alpha: float
    overlay: str
    heatmap: bool
    intensity: bool
    receipts: bool
    profile: str
    max_side: int | None


class _Place(click.ParamType[str]):
    """A file, a folder, a glob that names something, or a URI."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what is not there, before anything is begun."""
        if not dataset.exists(value):
            self.fail(f"Path {value!r} does not exist.", param, ctx)
        return str(value)


class _Folder(click.Path):
    """A folder of this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a URI, of which a path would be made."""
        if "://" in str(value):
            words = "name a folder of this machine; `camserve-server ray explain` writes to object stores"
            self.fail(f"{value} is a URI: {words}", param, ctx)
        return super().convert(value, param, ctx)


@main.command()
@click.argument("paths", nargs=-1, required=True, type=_Place(), metavar="PATH...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=_Folder(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder for the overlays; made where it is missing.",
)
@click.option("--model", metavar="NAME", help="A model of the server. Default: its first.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Repeat it for several, as smoothgrad:samples=32 or gradcam:augmentation_smoothing,eigen_smoothing.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=_target,
    metavar="TARGET",
    help='A label, an index, "tabby vs tiger cat", "finer:tabby", "probability:tabby", "segment:cat", '
    '"detection:dog@LEFT,TOP,RIGHT,BOTTOM" or "similarity:OTHER.jpg". Repeat it. Default: what the model predicts.',
)
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Repeat it. Default: the model's.")
@click.option("--fusion", type=click.Choice(["mean", "max", "product"]), help="Make the layers' maps one.")
@click.option(
    "--top-k",
    default=1,
    show_default=True,
    metavar="N",
    help="How many predicted classes to explain.",
)
@click.option("--colormap", default="jet", show_default=True, metavar="NAME", help="Of the heatmap.")
@click.option("--alpha", default=0.5, show_default=True, help="Opacity of the heatmap, 0 to 1.")
@click.option(
    "--format",
    "overlay",
    default="jpeg",
    show_default=True,
    type=click.Choice(["jpeg", "png", "webp"]),
    help="Of the overlays.",
)
@click.option("--heatmaps", "heatmap", is_flag=True, help="Write the raw maps too, as .npy.")
@click.option("--intensities", "intensity", is_flag=True, help="Write what is coloured too, as .intensity.npy.")
@click.option(
    "--profile",
    default="paper",
    show_default=True,
    type=click.Choice(["paper", "grad-cam", "torchcam", "captum"]),
    help="By whose convention numbers become colours.",
)
@click.option("--receipts", is_flag=True, help="Write receipts too, as .receipt.json: see `camserve replay`.")
@click.option("--max-side", type=int, metavar="PIXELS", help="Longer side of the overlays at most.")
@click.option(
    "--resume",
    is_flag=True,
    help="Run as a job that can be cut off and started again, with its results as Parquet in DIR: for many photos.",
)
@click.option("--column", default="", metavar="NAME", help="Of a Parquet file: that has the photos, bytes or paths.")
@click.option(
    "--allow-outside",
    is_flag=True,
    help="Also read photos outside of the named folders: through links, and by the paths in a Parquet file.",
)
@_connected
def explain(
    paths: tuple[str, ...],
    output: Path,
    connect: Connect,
    *,
    resume: bool,
    column: str,
    allow_outside: bool,
    **wishes: Unpack[Wishes],
) -> int:
    """Draw what the model saw over photos.

    PATH is a photo, a folder whose photos are explained, or a glob in quotes. Each overlay is written as
    PHOTO.METHOD.CLASS.SUFFIX.

    With --resume, PATH may also be a Parquet file or a URI such as s3://BUCKET/PREFIX. Started again with the same
    words it goes on where it was, and every photo is in the results once.
    """
    if resume:
        with _checked():
            chosen = dataset.Photos(paths, column, str(output), allow_outside=allow_outside)
        return _run_job(chosen, output, connect, wishes)
    with _checked():
        images, left_out = _files.images_in(paths, output, allow_outside=allow_outside)
    for path in left_out:
        _say(f"{path} leads out of its folder: --allow-outside follows such links")
    return _draw(images, output, connect, wishes) or (FAILED if left_out else 0)


def _draw(images: list[Path], output: Path, connect: Connect, wishes: Wishes) -> int:
    question = _question(wishes)
    names = _files.Names(output)
    rows: list[Sequence[str | Text]] = []
    failed = 0
    with _checked():
        client = connect()
    with client:
        with _checked():
            outcomes = client.explain_many(images, progress=True, on_error="return", **question)
        output.mkdir(parents=True, exist_ok=True)
        try:
            for image, outcome in zip(images, outcomes, strict=True):
                if isinstance(outcome, camserve.CamserveError):
                    failed += _say(f"{image}: {outcome}")
                    continue
                written = _written(names, image, outcome, wishes)
                rows += _tables.result_rows(image, written, outcome)
        finally:
            # Whatever ended it, what was written before is there.
            if rows:
                print_table(_tables.RESULT_HEADINGS, rows)
    return FAILED if failed else 0


def _run_job(chosen: dataset.Photos, output: Path, connect: Connect, wishes: Wishes) -> int:
    with _checked():
        spec = job_spec(wishes)
        client = connect()
    with client, dataset.locked(output):
        store = dataset.Store(str(output))
        with _checked():
            dataset.open_job(store, spec, client.model(wishes["model"] or ""))
            total = sum(1 for _ in chosen)
        if not total:
            raise click.UsageError(f"there are no images in {chosen}")
        with dataset.progress_bar(total) as update:
            tally = dataset.run(client, chosen, store, spec, update)
    echo(job_summary(tally, str(output)))
    return FAILED if tally.left else 0


def job_spec(wishes: Wishes) -> dataset.JobSpec:
    """Return the options of a job.

    Raises:
        InvalidArgument: An option is out of range.
    """
    outputs = dataset.Outputs(wishes["overlay"], wishes["heatmap"], wishes["receipts"])
    spec = dataset.JobSpec(_question(wishes), outputs)
    spec.plain()  # raises what is wrong with the options
    return spec


def job_summary(tally: dataset.Tally, output: str) -> str:
    """Return the outcome of a job in words."""
    before = f", {tally.before:,} by earlier runs" if tally.before else ""
    failed = f" {tally.failed:,} failed now: their rows say why." if tally.failed else ""
    done = f"{tally.total:,} photos are done{before}: {output}/results has them as Parquet.{failed}"
    left = f"\n{tally.left:,} are left for the next run, as of the last: {tally.why}" if tally.left else ""
    return done + left


def _question(wishes: Wishes) -> camserve.ExplainOptions:
    options = {name: value for name, value in wishes.items() if name != "receipts"}
    # A receipt is to compare with, map and all.
    options["heatmap"] = wishes["heatmap"] or wishes["receipts"]
    return cast("camserve.ExplainOptions", options)


@contextmanager
def _checked() -> Generator[None, None, None]:
    """Turn what is seen to be wrong before anything is sent into an error of usage."""
    try:
        yield
    except camserve.InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def _written(
    names: _files.Names, image: Path, result: camserve.Result, wishes: Wishes
) -> list[tuple[camserve.Explanation, Path]]:
    written: list[tuple[camserve.Explanation, Path]] = []
    with_layer = len(wishes["layers"]) > 1 and not wishes["fusion"]
    for each in result.explanations:
        stem = _files.stem_of(image, each, with_layer=with_layer)
        path = each.save(names.unique(stem, _SUFFIX[wishes["overlay"]]))
        _write_numbers(each, path, wishes)
        written.append((each, path))
    return written


def _write_numbers(explanation: camserve.Explanation, path: Path, wishes: Wishes) -> None:
    if wishes["heatmap"]:
        explanation.save(path.with_suffix(".npy"))
    if wishes["receipts"]:
        explanation.receipt.save(path.with_suffix(".receipt.json"))
    if explanation.intensity is not None:
        _local.write(path.with_suffix(".intensity.npy"), _local.npy(explanation.intensity))


def _metric(text: str) -> camserve.Metric:
    method = _method(text)
    return camserve.Metric(method.name, method.parameters)


def _rectangle(text: str) -> camserve.Box:
    try:
        left, top, right, bottom = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM") from error
    return camserve.Box(left, top, right, bottom)


class _EvaluateOptions(TypedDict):
    """What `evaluate` was asked for, beside the photo and the plot."""

    model: str | None
    methods: tuple[camserve.Method, ...]
    metrics: tuple[camserve.Metric, ...]
    targets: tuple[camserve.TargetLike, ...]
    layers: tuple[str, ...]
    box: camserve.Box | None


@main.command()
@click.argument("photo", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", metavar="NAME", help="A model of the server. Default: its first.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=("gradcam",),
    show_default=True,
    type=_method,
    metavar="NAME[:KEY=VALUE,...]",
    help="Repeat it to compare several.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    default=("deletion", "insertion"),
    show_default=True,
    type=_metric,
    metavar="NAME[:KEY=VALUE,...]",
    help="Repeat it for several, as deletion:steps=50; `camserve metrics` lists them.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=_target,
    metavar="CLASS[ vs CLASS]",
    help="A label or an index. Default: what the model predicts.",
)
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Repeat it. Default: the model's.")
@click.option(
    "--box",
    type=_rectangle,
    metavar="LEFT,TOP,RIGHT,BOTTOM",
    help="Where the object is, in the photo's pixels: for pointing_game and energy_in_box.",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw it too.")
@_connected
@_json
def evaluate(
    photo: Path, plot: Path | None, connect: Connect, *, as_json: bool, **wishes: Unpack[_EvaluateOptions]
) -> None:
    """Explain a photo by several methods, and judge their maps side by side."""
    with connect() as client, _checked():
        found = client.evaluate(photo, heatmap=False, overlay="jpeg" if plot else None, max_side=640, **wishes)
    if as_json:
        echo(_tables.as_json(found.plain()))
    else:
        print_table(found.cells()[0], _tables.evaluation_rows(found))
        for label, words in found.remarks():
            echo(brief(f"{label}: {words}"), err=True)
    if plot:
        with _checked():
            found.save(plot)


@main.command()
@_connected
@_json
def metrics(connect: Connect, *, as_json: bool) -> None:
    """List the metrics that the server knows, and their parameters with their defaults."""
    with connect() as client:
        found = client.metrics()
    heads = ("metric", "better", "rows", "parameters", "")
    _show(found, heads, _tables.metric_rows(found), as_json=as_json)


@main.command()
@click.argument("receipt", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("photo", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_connected
def replay(receipt: Path, photo: Path, connect: Connect) -> int:
    """Explain PHOTO again as RECEIPT says, and compare.

    RECEIPT is a .receipt.json that `camserve explain --receipts` wrote, and PHOTO what it is of. Exits
    with 0 if the photo, the weights, the score and the map are the same, and with 1 if not.
    """
    with connect() as client:
        found = client.replay(camserve.Receipt.load(receipt), photo)
    print_table(_tables.REPLAY_HEADINGS, _tables.replay_rows(found))
    return 0 if found.same else FAILED


@main.command()
@_connected
@_json
def models(connect: Connect, *, as_json: bool) -> None:
    """List the models that the server is there for, the default first, and how they stand."""
    with connect() as client:
        found = client.models()
    _show(found, _tables.MODEL_HEADINGS, _tables.model_rows(found), as_json=as_json)


@main.command()
@click.argument("name")
@click.option("--weights", default="", metavar="FILE", help="In the server's model folder. Default: those configured.")
@click.option("--sha256", default="", metavar="HEX", help="That the file of weights must have.")
@_connected
@_json
def load(name: str, connect: Connect, *, weights: str, sha256: str, as_json: bool) -> None:
    """Have the server load the model NAME, or load it again, where its settings allow it.

    The version before answers until the new one is warm, and also if that cannot be loaded.
    """
    with connect() as client:
        found = client.load_model(name, weights=weights, sha256=sha256)
    _show(found, _tables.MODEL_HEADINGS, _tables.model_rows([found]), as_json=as_json)


@main.command()
@click.argument("name")
@_connected
@_json
def unload(name: str, connect: Connect, *, as_json: bool) -> None:
    """Have the server unload the model NAME, where its settings allow it; what it accepted is finished."""
    with connect() as client:
        found = client.unload_model(name)
    _show(found, _tables.MODEL_HEADINGS, _tables.model_rows([found]), as_json=as_json)


@main.command()
@click.argument("model", default="")
@_connected
@_json
def layers(model: str, connect: Connect, *, as_json: bool) -> None:
    """List the layers of MODEL, by default the server's first."""
    with connect() as client:
        found = client.layers(model)
    heads = ("layer", "type", "output", "parameters", "explainable")
    _show(found, heads, _tables.layer_rows(found), as_json=as_json)


@main.command()
@click.argument("name", default="")
@_connected
@_json
def methods(name: str, connect: Connect, *, as_json: bool) -> None:
    """List the methods that the server knows, or describe the one called NAME.

    A list has their parameters with their defaults, a description the formula, the paper, the cost
    and what may be chosen.
    """
    with connect() as client:
        found = client.methods()
    if name:
        _describe(_named(name, found), as_json=as_json)
    else:
        heads = ("method", "kind", "rows", "parameters", "")
        _show(found, heads, _tables.method_rows(found), as_json=as_json)


def _named(name: str, methods: Sequence[camserve.MethodInfo]) -> camserve.MethodInfo:
    known = {each.name: each for each in methods}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise camserve.NotFound(f'unknown method "{name}": there are {", ".join(known)}{hint}')


def _describe(method: camserve.MethodInfo, *, as_json: bool) -> None:
    if as_json:
        echo(_tables.as_json(method))
        return
    echo(_tables.method_page(method))
    if method.parameters:
        echo()
        print_table(_tables.PARAMETER_HEADINGS, _tables.parameter_rows(method.parameters))


_photo = click.argument("photo", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PHOTO")
_model = click.option("--model", metavar="NAME", help="A model of the server. Default: its first.")
_one_target = click.option(
    "--target",
    type=_target,
    metavar="CLASS[ vs CLASS]",
    help='A label, an index, or "tabby vs tiger cat". Default: what the model predicts.',
)


@main.command()
@_photo
@_model
@_one_target
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Repeat it. Default: all.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the norms too.")
@_connected
@_json
def inspect(
    photo: Path, connect: Connect, *, plot: Path | None, as_json: bool, **wishes: Unpack[InspectOptions]
) -> None:
    """Measure what every layer gives for PHOTO, and the score's gradient there."""
    with connect() as client:
        found = client.inspect(photo, **wishes)
    _show(found.layers, _inspection.HEADINGS, _tables.reading_rows(found.layers), as_json=as_json)
    if plot:
        found.save(plot)


class Channels(TypedDict):
    """Which channels `features` was asked for."""

    model: str | None
    target: camserve.TargetLike | None
    layer: str | None
    rank: str
    top: int
    colormap: str


@main.command()
@_photo
@_model
@_one_target
@click.option("--layer", metavar="NAME", help="Default: the model's.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@click.option(
    "--rank",
    default="activation",
    show_default=True,
    type=click.Choice(["activation", "gradient"]),
    help="By the channels' mean, or by the size of Grad-CAM's weights.",
)
@click.option("--top", default=16, show_default=True, metavar="N", help="How many channels.")
@click.option("--colormap", default="viridis", show_default=True, metavar="NAME", help="Of the tiles.")
@_connected
@_json
def features(photo: Path, output: Path, connect: Connect, *, as_json: bool, **wishes: Unpack[Channels]) -> None:
    """Draw the channels of a layer that are most active for PHOTO, or matter most for the score.

    FILE is a picture with a tile for each (.png, .jpg, .webp), or their raw maps (.npy).
    """
    with connect() as client:
        found = client.features(photo, maps=output.suffix.lower() == ".npy", **wishes)
    found.save(output)
    rows = [(str(each.index), f"{each.mean_activation:.3g}", f"{each.gradient_weight:.3g}") for each in found.channels]
    _show(found.channels, ("channel", "mean activation", "gradient weight"), rows, as_json=as_json)


@main.command()
@click.argument("service", default="")
@_connected
@_json
def health(service: str, connect: Connect, *, as_json: bool) -> int:
    """Say whether the server, or one SERVICE of it, takes requests; exit with 0 if so."""
    with connect() as client:
        status = client.health(service)
    _show({"service": service, "status": status}, ("status",), [(status,)], as_json=as_json)
    return 0 if status is camserve.Health.SERVING else FAILED


def _show(values: object, heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, as_json: bool) -> None:
    if as_json:
        echo(_tables.as_json(values))
    else:
        print_table(heads, rows)
