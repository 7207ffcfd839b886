"""A server, a client and a photo for the examples in docstrings, which pytest runs as doctests."""

import ast
import asyncio
import inspect
import os
import shutil

import pytest

import camserve


@pytest.fixture(scope="session")
def example_servers(tmp_path_factory):
    """Servers that the examples call."""
    import example_servers  # noqa: PLC0415 -- imports torch, and most runs of tests need no example

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.devnull)  # not the user's cache of probed models
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
def _names_of_example(request):
    """Give an example what it uses: a folder with `cat.jpg`, `client`, and servers at the addresses that it names."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    examples, names = request.node.dtest.examples, request.node.dtest.globs
    text = "".join(example.source for example in examples)
    is_async = "_async" in request.node.path.parts
    names["camserve"] = camserve
    if "cat.jpg" in text:
        from support import PHOTOS  # noqa: PLC0415 -- imports torch, and most runs of tests need no example

        folder = request.getfixturevalue("tmp_path")
        shutil.copy(PHOTOS["chelsea"], folder / "cat.jpg")
        request.getfixturevalue("monkeypatch").chdir(folder)
    if "client." in text:
        names["client"] = request.getfixturevalue("example_async_client" if is_async else "example_client")
    text += "".join(example.want for example in examples)
    if "localhost:5005" in text or "token=token" in text:
        servers = request.getfixturevalue("example_servers")
        names["token"] = servers.token
        for example in examples:
            example.source, example.want = (_with_addresses(part, servers) for part in (example.source, example.want))
    if is_async:
        runner = request.getfixturevalue("example_loop")
        names["run_example"] = lambda source: _run(source, names, runner)
        for example in examples:
            example.source = f"run_example({example.source!r})\n"


def _with_addresses(text, servers):
    """Replace the addresses that examples name by those of the servers that run."""
    return text.replace("localhost:50051", servers.address).replace("localhost:50052", servers.guarded_address)


def _run(source, names, runner):
    """Run a statement as `python -m asyncio` does, where `await` needs no coroutine around it."""
    code = compile(source, "<example>", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)  # noqa: S307 -- our own examples
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)
