"""Commands about the server: its models, layers, methods and health."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

import camserve
from camserve.commands import tables
from camserve.commands.group import FAILED, main
from camserve.commands.options import Connect, connection_options, json_option, print_values
from camserve.terminal import echo, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence


@main.command()
@connection_options
@json_option
def models(connect: Connect, *, as_json: bool) -> None:
    """List the models of the server and their state.

    The first one is the default model.
    """
    with connect() as client:
        served_models = client.models()
    print_values(served_models, tables.MODEL_HEADINGS, tables.model_rows(served_models), as_json=as_json)


@main.command()
@click.argument("name")
@click.option(
    "--weights",
    default="",
    metavar="FILE",
    help="Weights file in the server's model folder. Default: the configured weights.",
)
@click.option("--sha256", default="", metavar="HEX", help="Expected SHA-256 of the weights file.")
@connection_options
@json_option
def load(name: str, connect: Connect, *, weights: str, sha256: str, as_json: bool) -> None:
    """Load or reload a model on the server.

    The server's settings must permit it. Until the new version is ready, the old one serves requests; it stays if
    loading fails.
    """
    with connect() as client:
        model = client.load_model(name, weights=weights, sha256=sha256)
    print_values(model, tables.MODEL_HEADINGS, tables.model_rows([model]), as_json=as_json)


@main.command()
@click.argument("name")
@connection_options
@json_option
def unload(name: str, connect: Connect, *, as_json: bool) -> None:
    """Unload a model from the server.

    The server's settings must permit it. Requests that the model has accepted are completed.
    """
    with connect() as client:
        model = client.unload_model(name)
    print_values(model, tables.MODEL_HEADINGS, tables.model_rows([model]), as_json=as_json)


@main.command()
@click.argument("model", default="")
@connection_options
@json_option
def layers(model: str, connect: Connect, *, as_json: bool) -> None:
    """List the layers of a model.

    MODEL is the name of a model. Default: the server's first model.
    """
    with connect() as client:
        model_layers = client.layers(model)
    headings = ("layer", "type", "output", "parameters", "explainable")
    print_values(model_layers, headings, tables.layer_rows(model_layers), as_json=as_json)


@main.command()
@click.argument("name", default="")
@connection_options
@json_option
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
        print_values(infos, headings, tables.method_rows(infos), as_json=as_json)


def _find_method(name: str, methods: Sequence[camserve.MethodInfo]) -> camserve.MethodInfo:
    by_name = {method.name: method for method in methods}
    if name in by_name:
        return by_name[name]
    similar = difflib.get_close_matches(name, by_name, n=1)
    hint = f' (did you mean "{similar[0]}"?)' if similar else ""
    raise camserve.NotFound(f'unknown method "{name}"{hint}: the methods are {", ".join(by_name)}')


def _print_method(method: camserve.MethodInfo, *, as_json: bool) -> None:
    if as_json:
        echo(tables.as_json(method))
        return
    echo(tables.method_page(method))
    if method.parameters:
        echo()
        print_table(tables.PARAMETER_HEADINGS, tables.parameter_rows(method.parameters))


@main.command()
@click.argument("service", default="")
@connection_options
@json_option
def health(service: str, connect: Connect, *, as_json: bool) -> int:
    """Check that the server accepts requests.

    SERVICE is the name of one of its gRPC services. Default: the whole server. The exit code is 0 if
    it does, and 1 if not.
    """
    with connect() as client:
        status = client.health(service)
    print_values({"service": service, "status": status}, ("status",), [(status,)], as_json=as_json)
    return 0 if status is camserve.Health.SERVING else FAILED
