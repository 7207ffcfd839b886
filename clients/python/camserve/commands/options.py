"""Options that several commands share."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

import camserve
from camserve._transport.settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT
from camserve.commands import tables
from camserve.commands.parsing import parse_intervention, parse_target
from camserve.terminal import echo, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rich.text import Text

Connect: TypeAlias = "Callable[..., camserve.Client]"
"""Function that returns the client of a command, which closes it at its end. ``diff`` may pass another address.

By default the client is created from the connection options (``--server``, ``--timeout``, ``--tls``, …). Another
program can pass its own function as ``connect`` to click's ``Context.invoke``. The connection options are then
ignored, and the other options have their defaults:

    context.invoke(cli.explain, connect=lambda: client, paths=("cat.jpg",), output=Path("out"))
"""


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


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the connection options to a command, and create its ``connect`` from them unless a program passes one."""

    @functools.wraps(command)
    def with_connection(*args: Any, server: str, timeout: float, connect: Connect | None = None, **options: Any) -> Any:
        access = {name: value for name in ACCESS_OPTIONS if (value := options.pop(name, None))}
        if "ca" in access:
            access["tls"] = access.pop("ca")

        def create_client(address: str = server) -> camserve.Client:
            with as_usage_errors():
                return camserve.Client(address, timeout=timeout, **access)

        return command(*args, connect=connect or create_client, **options)

    for option in reversed(_CONNECTION_OPTIONS):
        option(with_connection)
    return with_connection


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


photo_argument = click.argument("photo", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PHOTO")
model_option = click.option("--model", metavar="NAME", help="Model to use. Default: the server's first model.")
layers_option = click.option(
    "--layer",
    "layers",
    multiple=True,
    metavar="NAME",
    help='Layer to explain, or "pyramid" for all scales of a detector in one map. Repeatable. Default: the pyramid, if '
    "there is one, or else the model's default layer.",
)
texts_option = click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Text that is a class, such as 'a photo of a cat', for models that compare images with texts. Repeatable. "
    "Default: the labels of the model.",
)
interventions_option = click.option(
    "--intervention",
    "interventions",
    multiple=True,
    type=parse_intervention,
    metavar="CHANGE:LAYER[:OPTION...]",
    help="Change to what a layer returns: silence:layer4:channels=12,40, scale:layer3:factor=0.5, "
    "clamp:layer2:minimum=0:maximum=6, replace_mean:layer4 or clip_gradient:layer3:limit=1. With :input, to what it "
    "receives. Repeatable, applied in order.",
)
fusion_option = click.option(
    "--fusion",
    type=click.Choice(["mean", "max", "product", "sum"]),
    help="Combine the maps of several layers into one.",
)
target_option = click.option(
    "--target",
    type=parse_target,
    metavar="CLASS[ vs CLASS]",
    help='Target: a label, a class index, or "tabby vs tiger cat". Default: the predicted class.',
)


@contextmanager
def as_usage_errors() -> Generator[None, None, None]:
    """Convert invalid arguments, which are found before anything is sent, to usage errors."""
    try:
        yield
    except camserve.InvalidArgument as error:
        raise click.UsageError(str(error)) from error


def print_values(
    values: object, headings: Sequence[str], rows: Sequence[Sequence[str | Text]], *, as_json: bool
) -> None:
    """Print values as JSON, or rows as a table."""
    if as_json:
        echo(tables.as_json(values))
    else:
        print_table(headings, rows)
