"""What a hostile server, or whoever writes the labels of an honest one, can do to its clients: nothing."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import camserve
from camserve import _tables, cli
from camserve._picture import Picture
from camserve.v1 import evaluate_pb2, explain_pb2
from client import hostile

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

JPEG = b"\xff\xd8\xff\xe0"

# A link, a cleared screen, a line up by C1, a carriage return, letters in another order, lines, markup of rich.
EVIL = "\x1b]8;;http://evil\x07[bold]b[/bold]\x1b[2J\x9b1A\rforged\u202egpj.\u2028 line\n2026 OK \U000e0041"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")


@pytest.fixture
def server() -> Iterator[hostile.Hostile]:
    with hostile.serving() as running:
        yield running


@pytest.fixture
def photo(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "photo.jpg").write_bytes(JPEG)
    return tmp_path / "photo.jpg"


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("CAMSERVE_SERVER", server.address)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(cli.main, [str(each) for each in args])


def speak(server: hostile.Hostile, text: str) -> None:
    """Have every answer say a text wherever it says any."""
    for name, kind in hostile.ANSWERS.items():
        server.replies[name] = hostile.filled(kind(), text).SerializeToString()
    explained = hostile.explained(text)
    reading = hostile.filled(evaluate_pb2.Reading(), text)
    reading.ClearField("curves")
    judged = evaluate_pb2.EvaluateResponse(explained=explained, readings=[reading])
    server.replies["Evaluate"] = judged.SerializeToString()
    server.replies["Explain"] = explained.SerializeToString()
    server.stream(
        lambda each: [explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=explained)],
    )


@pytest.mark.parametrize(
    "command",
    [
        "models",
        "models --json",
        "layers",
        "layers --json",
        "methods",
        "methods --json",
        "metrics",
        "metrics --json",
        "load tiny",
        "unload tiny",
        "methods nothing",
        "methods {evil}",
        "methods {evil} --json",
        "inspect {photo}",
        "inspect {photo} --json",
        "explain {photo} -o {out}",
        "evaluate {photo}",
        "evaluate {photo} --json",
        "replay {receipt} {photo}",
    ],
)
def test_a_terminal_obeys_no_word_of_a_server(run: Any, server: Any, photo: Any, tmp_path: Any, command: str) -> None:
    speak(server, EVIL)
    out = tmp_path / "out"
    if "receipt" in command:
        run("explain", photo, "-o", out, "--receipts")
    places = {"photo": photo, "out": out, "evil": EVIL, "receipt": next(out.glob("*.json"), None)}

    done = run(*(each.format(**places) for each in command.split()))

    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit), done.exception
    assert "b[/bold]" in done.output
    assert not OBEYED.search(done.output), ascii(done.output)


@pytest.mark.parametrize("command", ["models", "explain {photo} -o {out}", "health"])
def test_a_terminal_obeys_no_error_of_a_server(run: Any, server: Any, photo: Any, tmp_path: Any, command: str) -> None:
    def refuse(_: Any, context: Any) -> Any:
        context.abort(hostile.grpc.StatusCode.PERMISSION_DENIED, EVIL)

    server.replies = dict.fromkeys(("ListModels", "Check", hostile.STREAM), refuse)

    done = run(*(each.format(photo=photo, out=tmp_path / "out") for each in command.split()))

    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "[bold]b[/bold]" in done.stderr
    assert not OBEYED.search(done.output), ascii(done.output)


PICTURES = {
    "another format": hostile.image("GIF"),
    "an outline font": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "no picture": b"<script>",
    "nothing": b"",
    "cut short": hostile.image("PNG")[:45],
    "too many pixels": hostile.image("PNG", (9000, 10001)),
    "far too many": hostile.image("PNG", (20000, 10001)),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("data", PICTURES.values(), ids=PICTURES)
def test_a_picture_that_is_none_is_one_error(data: bytes) -> None:
    with pytest.raises(camserve.Internal, match=r"the server sent (no|a) picture"):
        Picture("png", data, 1, 1).open()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_with_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded.append)
    for name in ("too many pixels", "far too many"):
        with pytest.raises(camserve.Internal, match="pixels"):
            Picture("png", PICTURES[name], 1, 1).open()

    assert decoded == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_that_is_one_is_decoded(kind: str) -> None:
    assert Picture("png", hostile.image(kind), 1, 1).open().size == (6, 4)


def test_json_says_the_same_with_its_own_escapes() -> None:
    said = _tables.as_json({"label": EVIL})

    assert json.loads(said) == {"label": EVIL}
    assert not OBEYED.search(said)
