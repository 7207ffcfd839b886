"""A server, a client and a photo for the examples in docstrings, which pytest runs as doctests."""

import ast
import asyncio
import inspect
import os
import shutil
from pathlib import Path

import pytest

import camserve

pytest_plugins = ["process_guard"]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Mark the examples of the synchronous classes slow: they are generated from those of the asynchronous ones."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and "_sync" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def example_servers(tmp_path_factory):
    """Servers that the examples call."""
    import example_servers  # noqa: PLC0415 -- imports torch, and most runs of tests need no example

    with example_servers.example_servers(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture(scope="session")
def example_loop():
    """Event loop of the asynchronous examples."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def example_client(example_servers):
    """Client of the examples."""
    with camserve.Client(example_servers.address) as client:
        yield client


@pytest.fixture(scope="session")
def example_async_client(example_servers, example_loop):
    """Client of the asynchronous examples."""
    client = camserve.AsyncClient(example_servers.address)
    yield client
    example_loop.run(client.close())


@pytest.fixture(autouse=True)
def _prepared_example(request):
    """Give an example what it uses: a folder with `cat.jpg`, `client`, and servers at the addresses that it names."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    fixture, test = request.getfixturevalue, request.node.dtest
    text = "".join(example.source + example.want for example in test.examples)
    is_async = "_async" in request.node.path.parts
    test.globs["camserve"] = camserve
    fixture("monkeypatch").setenv("XDG_CACHE_HOME", os.devnull)  # not the user's cache of probed models
    if "cat.jpg" in text:
        _enter_folder_with_photo(fixture("monkeypatch"), fixture("tmp_path"))
    if "client." in text:
        test.globs["client"] = fixture("example_async_client" if is_async else "example_client")
    if "localhost:5005" in text:
        _replace_addresses(test, fixture("example_servers"))
    if is_async:
        _allow_await(test, fixture("example_loop"))


def _enter_folder_with_photo(monkeypatch, folder):
    shutil.copy(Path(__file__).parent / "docs" / "images" / "cat.jpg", folder)
    monkeypatch.chdir(folder)


def _replace_addresses(test, servers):
    """Replace the addresses that an example names by those of the servers that run."""
    test.globs["token"] = servers.token
    for example in test.examples:
        for named, address in (("localhost:50051", servers.address), ("localhost:50052", servers.guarded_address)):
            example.source, example.want = (part.replace(named, address) for part in (example.source, example.want))


def _allow_await(test, loop):
    """Run an example as `python -m asyncio` does, where `await` needs no coroutine around it."""
    test.globs["run_example"] = lambda source: _run(source, test.globs, loop)
    for example in test.examples:
        example.source = f"run_example({example.source!r})\n"


def _run(source, names, loop):
    code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)  # noqa: S307 -- our own examples
    if code.co_flags & inspect.CO_COROUTINE:
        loop.run(result)
