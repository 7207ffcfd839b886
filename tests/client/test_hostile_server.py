"""A hostile server, or hostile labels from a valid one, cannot harm a client."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
import time
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

import camserve
from camserve._codec.results import decode_result
from camserve._show.plots import comparison
from camserve._transport import aio, sync
from camserve._transport.stream import MAX_PROGRESS_WAITING
from camserve._values.picture import Picture
from camserve._values.resampling import _interpolate, classes_onto_photo, onto_photo
from camserve.commands import tables
from camserve.v1 import evaluate_pb2, explain_pb2
from client import hostile

if TYPE_CHECKING:
    import pathlib
    from collections.abc import AsyncIterator, Callable, Iterator

JPEG = b"\xff\xd8\xff\xe0"

# A link, a cleared screen, a cursor movement by C1, a carriage return, reversed text, line breaks, rich's markup.
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


def speak(server: hostile.Hostile, text: str) -> None:
    """Put a text into every string of every response."""
    for name, kind in hostile.ANSWERS.items():
        server.replies[name] = hostile.filled(kind(), text).SerializeToString()
    explained = hostile.explained(text)
    reading = hostile.filled(evaluate_pb2.Reading(), text)
    reading.ClearField("curves")
    evaluated = evaluate_pb2.EvaluateResponse(explained=explained, readings=[reading])
    server.replies["Evaluate"] = evaluated.SerializeToString()
    server.replies["Explain"] = explained.SerializeToString()
    asked = hostile.explained(text)
    asked.explanations[0].method = "gradcam"  # files are not named after another method than the one that was asked for
    server.stream(lambda each: [explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=asked)])


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
def test_text_from_a_server_cannot_control_the_terminal(
    run: Any, server: Any, photo: Any, tmp_path: Any, command: str
) -> None:
    speak(server, EVIL)
    out = tmp_path / "out"
    if "receipt" in command:
        run("explain", photo, "-o", out, "--receipts")
    places = {"photo": photo, "out": out, "evil": EVIL, "receipt": next(out.glob("*.json"), None)}

    done = run(*(each.format(**places) for each in command.split()))

    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit), done.exception
    assert "b[/bold]" in done.output
    assert not OBEYED.search(done.output), ascii(done.output)


def test_server_cannot_choose_a_file_to_overwrite(run: Any, server: Any, photo: Any) -> None:
    keepsake = photo.with_name(f"{photo.stem}.original.raw.jpg")
    keepsake.write_bytes(b"the only copy")
    earlier = photo.with_name(f"{photo.stem}.gradcam.raw.jpg")
    earlier.write_bytes(b"the overlay of an earlier run")
    for method in ("original", "gradcam"):
        answer = hostile.explained("raw")
        answer.explanations[0].method = method
        answer.explanations[0].target.ClearField("class_index")
        for flag in ("augmentation_smoothing", "eigen_smoothing", "input_channel", "contrast"):
            answer.explanations[0].ClearField(flag)
        server.stream(lambda each: [explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=answer)])  # noqa: B023 -- it is called in this round
        done = run("explain", photo, "-o", photo.parent)

        assert (done.exit_code, "methods that were not asked for: original" in done.output) == (
            (1, True) if method == "original" else (0, False)
        )
    assert keepsake.read_bytes() == b"the only copy"
    assert earlier.read_bytes() == hostile.overlay().data


def test_picture_that_is_none_is_refused(server: Any) -> None:
    answer = hostile.explained("x")
    answer.explanations[0].overlay.data = b"#!/bin/sh"
    server.replies["Explain"] = answer.SerializeToString()

    with camserve.Client(server.address) as client, pytest.raises(camserve.Internal, match="not a JPEG, PNG or WebP"):
        client.explain(hostile.image("JPEG"))


@pytest.mark.parametrize("command", ["models", "explain {photo} -o {out}", "health"])
def test_error_from_a_server_cannot_control_the_terminal(
    run: Any, server: Any, photo: Any, tmp_path: Any, command: str
) -> None:
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
def test_invalid_picture_raises_internal(data: bytes) -> None:
    with pytest.raises(camserve.Internal, match=r"the server sent (no|a) picture"):
        Picture("png", data, 1, 1).open()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_picture_with_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded.append)
    for name in ("too many pixels", "far too many"):
        with pytest.raises(camserve.Internal, match="pixels"):
            Picture("png", PICTURES[name], 1, 1).open()

    assert decoded == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_valid_picture_is_decoded(kind: str) -> None:
    assert Picture("png", hostile.image(kind), 1, 1).open().size == (6, 4)


def test_json_output_escapes_the_same_characters() -> None:
    text = tables.as_json({"label": EVIL})

    assert json.loads(text) == {"label": EVIL}
    assert not OBEYED.search(text)


def wrong(change: Callable[[Any], object]) -> bytes:
    """Return a valid response with one change."""
    response = hostile.explained()
    change(response)
    return response.SerializeToString()


def wrong_region(**fields: Any) -> bytes:
    """Return a valid response but for some fields of its region."""
    return wrong(lambda r: r.explanations[0].regions[0].MergeFrom(explain_pb2.Region(**fields)))


def wrong_mask(**fields: Any) -> bytes:
    return wrong_region(mask=explain_pb2.RunLengths(**fields))


INTERVENTION = explain_pb2.Intervention()
NO_ANSWERS = {
    "garbage": b"\xff" * 99,
    "a map that has other bytes than cells": wrong(lambda r: setattr(r.explanations[0].heatmap, "height", 9)),
    "a map without cells": wrong(lambda r: r.explanations[0].heatmap.CopyFrom(explain_pb2.Heatmap())),
    "a map of 2^64 cells": wrong(lambda r: r.explanations[0].heatmap.MergeFrom(explain_pb2.Heatmap(height=2**32 - 1))),
    "a photo of 2^64 pixels": wrong(lambda r: r.photo.MergeFrom(explain_pb2.Photo(width=2**32 - 1))),
    "a box at no place": wrong(lambda r: setattr(r.photo.seen, "left", float("nan"))),
    "a class beyond all classes": wrong(lambda r: setattr(r.predictions[0], "class_index", 2**32 - 1)),
    "a scale of NaN": wrong(lambda r: setattr(r.explanations[0], "scale", float("nan"))),
    "a negative scale": wrong(lambda r: setattr(r.explanations[0], "scale", -1)),
    "1,000 regions": wrong(lambda r: r.explanations[0].regions.extend([hostile.region()] * 1_000)),
    "a region at no place": wrong_region(box=explain_pb2.Box(left=float("nan"))),
    "a region with a peak at no place": wrong_region(peak=explain_pb2.Point(x=float("inf"))),
    "a region with a peak of NaN": wrong_region(peak_value=float("nan")),
    "a region with a share of NaN": wrong_region(share=float("nan")),
    "a region of 2^64 pixels": wrong_region(area=2**64 - 1),
    "a contour with half a corner": wrong_region(contour=[1]),
    "a contour at no place": wrong_region(contour=[float("nan"), 1]),
    "a mask of another size": wrong_mask(height=6, width=4),
    "a mask of 2^64 pixels": wrong_mask(height=2**32 - 1, width=2**32 - 1),
    "a mask with too few pixels": wrong_mask(counts="<;"),
    "a mask with too many pixels": wrong_mask(counts="<="),
    "a mask with a negative run": wrong_mask(counts="<<O<"),
    "a mask with a run of 2^60 pixels": wrong_mask(counts="o" * 11 + "O"),
    "a mask with a run of 2^1000 pixels": wrong_mask(counts="o" * 200 + "O"),
    "a mask that is cut short": wrong_mask(counts="<<o"),
    "a mask in other characters": wrong_mask(counts="<\x00ж"),
    "a class map that has other bytes than cells": wrong(lambda r: setattr(r.class_map, "height", 2)),
    "a class map with half a cell": wrong(lambda r: setattr(r.class_map, "data", b"\0\0\0")),
    "a class map of 2^64 cells": wrong(lambda r: r.class_map.MergeFrom(explain_pb2.ClassMap(height=2**32 - 1))),
    "a class map without cells": wrong(lambda r: r.class_map.CopyFrom(explain_pb2.ClassMap())),
    "a photo of 900 million pixels": hostile.photo(30_000, 30_000).SerializeToString(),
    "a receipt with 1,001 texts": wrong(lambda r: r.receipt.texts.extend(["x"] * 1000)),
    "a receipt with 17 interventions": wrong(
        lambda r: r.receipt.interventions.extend([explain_pb2.Intervention()] * 16)
    ),
    "100,000 explanations": wrong(lambda r: r.explanations.extend([explain_pb2.Explanation()] * 100_000)),
    "1,000,000 predictions": wrong(lambda r: r.predictions.extend([explain_pb2.Prediction()] * 1_000_000)),
}


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_malformed_answer_raises_internal(connect: Any, server: Any, answer: bytes) -> None:
    server.replies["Explain"] = answer
    with pytest.raises(camserve.Internal):
        await connect(server.address).explain(JPEG)


def test_what_receipts_have_in_common_is_decoded_once() -> None:
    response = hostile.explained()
    response.explanations.extend(list(response.explanations) * 3)

    first, *others = [each.receipt for each in decode_result(response).explanations]

    assert len(others) == 3
    for name in ("model", "digest", "versions", "texts", "interventions"):
        assert all(getattr(other, name) is getattr(first, name) for other in others), name


def test_image_of_a_similarity_is_encoded_once_for_all_receipts() -> None:
    response = hostile.explained()
    response.explanations[0].resolved_target.CopyFrom(explain_pb2.Target(similarity=explain_pb2.Similarity()))
    response.explanations.extend(list(response.explanations))
    asked = explain_pb2.Target(similarity=explain_pb2.Similarity(image=JPEG))

    first, second = [each.receipt.target for each in decode_result(response, [asked]).explanations]

    assert first is second
    assert first["similarity"]["image"]


def test_long_row_of_cells_is_resampled_across_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    interpolate = _interpolate

    def recorded(*arguments: Any) -> Any:
        values = interpolate(*arguments)
        sizes.append(values.size)
        return values

    monkeypatch.setattr("camserve._values.resampling._interpolate", recorded)
    photo = camserve.Photo(6, 4, camserve.Box(0, 0, 6, 4))

    resampled = onto_photo(np.arange(6000, dtype=np.float32)[None], photo)

    assert max(sizes) == resampled.size
    assert resampled[0].tolist() == resampled[3].tolist() == [499.5 + 1000 * column for column in range(6)]


def test_photo_may_have_as_many_pixels_as_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12)

    assert decode_result(hostile.photo(3, 4)).photo.width == 3
    with pytest.raises(camserve.Internal, match="a photo of 13 x 1 pixels; the limit is 12"):
        decode_result(hostile.photo(13, 1))


@pytest.mark.parametrize(("side", "characters"), [(2, 61), (9000, 8_388_609)])
def test_long_mask_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch, side: int, characters: int) -> None:
    read: list[str] = []
    monkeypatch.setattr("camserve._codec.regions.run_lengths", read.append)
    response = hostile.photo(side, side)
    region = response.explanations.add().regions.add()
    region.mask.CopyFrom(explain_pb2.RunLengths(width=side, height=side, counts="0" * characters))

    with pytest.raises(camserve.Internal, match=f"a mask of {characters:,} characters"):
        decode_result(response)
    assert read == []


@pytest.mark.parametrize("edges", [(1e38, 2e38), (-2e38, 2e38), (-900, -800), (900, 800), (3, 3)])
def test_map_of_a_part_anywhere_is_drawn_on_the_photo(edges: tuple[float, float]) -> None:
    left, right = edges
    photo = camserve.Photo(6, 4, camserve.Box(left, left, right, right))

    assert onto_photo(np.ones((2, 2), np.float32), photo).shape == (4, 6)
    assert classes_onto_photo(np.ones((2, 2), np.uint16), photo).shape == (4, 6)


async def test_replay_without_an_explanation_raises_internal(connect: Any, server: Any) -> None:
    client = connect(server.address)
    server.replies["Explain"] = hostile.explained().SerializeToString()
    receipt = (await client.explain(JPEG)).explanations[0].receipt
    server.replies["Explain"] = b""

    with pytest.raises(camserve.Internal, match="sent no explanation"):
        await client.replay(receipt, JPEG)


@pytest.mark.parametrize("answer", [b"\x08\x63", b"\xff"])
async def test_invalid_health_status_raises_internal(connect: Any, server: Any, answer: bytes) -> None:
    server.replies["Check"] = answer
    with pytest.raises(camserve.Internal):
        await connect(server.address).health()


@pytest.mark.parametrize("curve", [{"x": [0, 1], "y": [1]}, {"x": [1e38], "y": [1]}, {"x": [float("nan")], "y": [1]}])
async def test_invalid_curve_raises_internal(connect: Any, server: Any, curve: Any) -> None:
    reading = evaluate_pb2.Reading(curves=[evaluate_pb2.Curve(**curve)])
    evaluated = evaluate_pb2.EvaluateResponse(explained=hostile.explained(), readings=[reading])
    server.replies["Evaluate"] = evaluated.SerializeToString()
    with pytest.raises(camserve.Internal):
        await connect(server.address).evaluate(JPEG)


@pytest.mark.parametrize("pushback", ["99999999999999", "-1", "later", "9" * 5000])
async def test_pushback_of_years_is_not_waited_for(connect: Any, server: Any, pushback: str) -> None:
    calls: list[bytes] = []

    def refuse(request: bytes, context: Any) -> Any:
        calls.append(request)
        context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback), ("grpc-status-details-bin", b"\xff\x00")))
        context.abort(hostile.grpc.StatusCode.UNAVAILABLE, "later")

    server.replies["ListModels"] = refuse
    with pytest.raises(camserve.Unavailable):
        await connect(server.address, timeout=float("inf")).models()
    assert len(calls) == 1


async def test_unrequested_answers_do_not_count_as_a_sign_of_life(connect: Any, server: Any) -> None:
    def endless(each: Any) -> Iterator[Any]:
        while True:
            yield explain_pb2.ExplainStreamResponse(request_id=f"not {each.request_id}")
            time.sleep(0.01)  # real timeout: nobody waits for it, it spares the processor

    server.stream(endless)
    results = connect(server.address).explain_many([JPEG], timeout=0.3)  # real timeout: no answer is for the image
    with pytest.raises(camserve.DeadlineExceeded):
        _ = [each async for each in results]


def progress(number: int) -> Any:
    return explain_pb2.ExplainStreamResponse(request_id="open", progress=explain_pb2.Progress(rows_done=number))


def test_thread_reads_no_more_progress_than_the_queue_has_room_for() -> None:
    events: Any = queue.SimpleQueue()
    waiting: list[int] = []
    is_full = threading.Event()

    def answers() -> Iterator[Any]:
        for number in range(100):
            waiting.append(events.qsize())
            if number == MAX_PROGRESS_WAITING:
                is_full.set()
            yield explain_pb2.ExplainStreamResponse(request_id="unknown", response=hostile.explained())
            yield progress(number)

    stream = sync._Stream(Any, answers(), queue.SimpleQueue(), awaited={"open"})  # type: ignore[arg-type]
    reader = threading.Thread(target=sync._read, args=(stream, events, nullcontext(), None))
    reader.start()
    is_full.wait()
    for number in range(100):
        assert events.get()[1] == progress(number)
        stream.room.release()
    reader.join()

    assert max(waiting) == MAX_PROGRESS_WAITING
    assert isinstance(events.get()[1], camserve.Unavailable)


async def test_task_reads_no_more_progress_than_the_queue_has_room_for() -> None:
    events: Any = asyncio.Queue()
    waiting: list[int] = []
    is_full = asyncio.Event()

    async def answers() -> AsyncIterator[Any]:
        for number in range(100):
            waiting.append(events.qsize())
            if number == MAX_PROGRESS_WAITING:
                is_full.set()
            yield explain_pb2.ExplainStreamResponse(request_id="unknown", response=hostile.explained())
            yield progress(number)

    stream = aio._Stream(Any, answers(), asyncio.Queue(), awaited={"open"})  # type: ignore[arg-type]
    reader = asyncio.create_task(aio._read(stream, events, nullcontext(), None))
    await is_full.wait()
    for number in range(100):
        assert (await events.get())[1] == progress(number)
        stream.room.release()
    await reader

    assert max(waiting) == MAX_PROGRESS_WAITING
    assert isinstance(events.get_nowait()[1], camserve.Unavailable)


async def test_stream_of_a_server_that_sends_without_end_can_be_closed(connect: Any, server: Any) -> None:
    answered = [explain_pb2.ExplainStreamResponse(response=hostile.explained())]

    def answers(each: Any) -> Iterator[Any]:
        if answered:
            answered[0].request_id = each.request_id
            yield answered.pop()
            return
        while True:
            yield explain_pb2.ExplainStreamResponse(request_id=each.request_id, progress=explain_pb2.Progress())
            yield explain_pb2.ExplainStreamResponse(request_id="unknown", response=hostile.explained())

    server.stream(answers)
    async with aclosing(connect(server.address).explain_many([JPEG] * 9, in_flight=3)) as results:
        assert (await anext(results)).explanations


async def test_second_result_of_an_image_is_dropped(connect: Any, server: Any) -> None:
    def answers(each: Any) -> Iterator[Any]:
        for model in ("first", "second"):
            response = hostile.explained()
            response.model = model
            yield explain_pb2.ExplainStreamResponse(request_id=each.request_id, response=response)

    server.stream(answers)

    results = [each async for each in connect(server.address).explain_many([JPEG] * 9, in_flight=3)]

    assert [each.model for each in results] == ["first"] * 9


async def test_non_finite_numbers_are_written_into_a_receipt(connect: Any, server: Any) -> None:
    response = hostile.explained()
    response.explanations[0].parameters["x"].number = response.explanations[0].score = float("nan")
    server.replies["Explain"] = response.SerializeToString()
    (explanation,) = (await connect(server.address).explain(JPEG)).explanations

    assert '"x": "nan"' in explanation.receipt.to_json()


async def test_text_from_a_server_is_escaped_as_html(connect: Any, server: Any) -> None:
    server.replies["Explain"] = hostile.explained('"><script>alert(1)</script>').SerializeToString()
    html = (await connect(server.address).explain(JPEG))._repr_html_()

    assert "<script" not in html


def test_label_of_a_megabyte_is_shortened_when_drawn() -> None:
    tile = comparison.Tile("x" * 1_000_000, None)

    assert comparison.draw([tile], []).width < 1000
