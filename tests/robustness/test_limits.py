"""The table of limits in SECURITY.md is generated from the code, and the limits are enforced as it says."""

import dataclasses
import re
from pathlib import Path

import grpc
import pytest

from camserve.v1 import explain_pb2, models_pb2
from camserve.web import connect
from camserve_server import scheduling
from camserve_server.api import connection_limits, deserialization, health
from camserve_server.api.codec.checks import MAX_SIDE
from camserve_server.api.http import forms
from camserve_server.api.rpc import MAX_ID_LENGTH
from camserve_server.core.config import Settings
from camserve_server.core.limits import Limits
from camserve_server.imaging import channels, headers
from camserve_server.scheduling import admission
from camserve_server.serving import memory, replies
from camserve_server.serving.text_cache import TEXT_CACHE
from robustness import error_checks, nets
from support import serving

SECURITY = (Path(__file__).parents[2] / "SECURITY.md").read_text()
SETTINGS, LIMITS = Settings(), Limits()
INVALID, GRPC = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED, by gRPC itself"
TOO_LARGE = "RESOURCE_EXHAUSTED, with HTTP status 413"
NO_LIMITS = {
    "max_batch_rows": "a tuning setting, independent of the caller",
    "max_batch_mib": "a tuning setting, independent of the caller",
    "max_batch_seconds": "a timeout of workers",
    "max_queue_delay_ms": "a tuning setting, independent of the caller",
}
"""Settings that begin with max_ but do not limit requests."""


def mib(size):
    return f"{size / 2**20:g} MiB"


def server_limits():
    """Return the server's limits: subject, default, setting, and the response beyond it."""
    return (
        ("connections", f"{SETTINGS.max_connections:,}", "max_connections", "the connection is closed"),
        ("calls in flight on a connection", f"{SETTINGS.max_streams}", "max_streams", "the others wait in the client"),
        (
            "requests in flight in a stream",
            f"{SETTINGS.stream_in_flight}",
            "stream_in_flight",
            "the others wait unread",
        ),
        ("metadata of a call", f"{SETTINGS.max_metadata_kib} KiB", "max_metadata_kib", GRPC),
        ("message, as received", f"{SETTINGS.max_message_mib} MiB", "max_message_mib", GRPC),
        ("message, unpacked", f"{SETTINGS.max_message_mib} MiB", "max_message_mib", "RESOURCE_EXHAUSTED"),
        ("message in JSON", f"{forms.JSON_GROWTH * SETTINGS.max_message_mib:.1f} MiB", "max_message_mib", TOO_LARGE),
        ("headers of an HTTP request", f"{SETTINGS.max_metadata_kib} KiB", "max_metadata_kib", "HTTP status 431"),
        ("fields of a message", f"{deserialization.MAX_FIELDS:,}", "", INVALID),
        ("memory of a message", mib(deserialization.MEMORY_FACTOR * SETTINGS.max_message_mib * 2**20), "", INVALID),
        ("memory of all messages", mib(deserialization.MESSAGE_MEMORY), "", "the others wait"),
        (
            "messages that a caller's calls receive at a time",
            f"{deserialization.MAX_RECEIVING}",
            "",
            "the others wait unread",
        ),
        (
            "messages that a caller's streams receive at a time",
            f"{deserialization.MAX_RECEIVING}",
            "",
            "the others wait unread",
        ),
        (
            "empty lines in a row, in a stream with a message on each line",
            f"{connect.MAX_EMPTY_LINES}",
            "",
            f"{INVALID}; the stream ends",
        ),
        ("health watches", f"{health.MAX_WATCHERS:,}", "", "RESOURCE_EXHAUSTED"),
        ("health watches from one address", f"{health.MAX_WATCHERS_PER_ADDRESS}", "", "RESOURCE_EXHAUSTED"),
        ("message of a health watch or a reflection request", f"{health.MAX_MESSAGE_BYTES // 2**10} KiB", "", INVALID),
        (
            "rows in the queue",
            f"{SETTINGS.max_queue_rows:,}",
            "max_queue_rows",
            "RESOURCE_EXHAUSTED with a retry delay",
        ),
        ("rows of one caller in the queue", "its share", "", "RESOURCE_EXHAUSTED; below it the request waits"),
        (
            "rows that wait for room in the queue",
            f"{admission.MAX_WAITING:,}",
            "",
            "RESOURCE_EXHAUSTED with a retry delay",
        ),
        (
            "memory of inputs and maps, all requests",
            mib(SETTINGS.max_queue_rows * scheduling.BYTES_PER_ROW),
            "max_queue_rows",
            "RESOURCE_EXHAUSTED with a retry delay",
        ),
    )


def request_limits():
    """Return the limits of a request, in the same form."""
    limits, pictures = SETTINGS.limits, f"{INVALID}, `rendering.max_side`"
    return (
        ("rows of a request", f"{limits.rows:,}", "max_request_rows", f"{INVALID}, `methods` or `metrics`"),
        ("rows of a request at a time", f"{limits.chunk}", "", "the others run after them"),
        ("maps of a request", f"{limits.explanations}", "max_explanations", f"{INVALID}, `methods`"),
        ("pixels of a photo", f"{limits.pixels:,}", "max_pixels", f"{INVALID}, `image`"),
        ("pixels of a photo and of its targets' images", f"{limits.pixels:,}", "max_pixels", f"{INVALID}, the target"),
        ("pixels on a side of a photo", f"{limits.side:,}", "max_side", f"{INVALID}, `image`"),
        ("frames of a photo", "1", "", "the others are ignored"),
        (
            "scans of a JPEG",
            f"{headers._MAX_SCANS}, or {headers._USUAL_SCANS} of the largest size",
            "",
            f"{INVALID}, `image`",
        ),
        ("strips or tiles of a TIFF", f"{channels._MAX_PARTS:,}", "", f"{INVALID}, `image`"),
        ("EXIF of a PNG or WebP", f"{headers._MAX_EXIF // 2**10} KiB", "", f"{INVALID}, `image`"),
        ("pixels of a request's pictures", f"{limits.drawn_pixels:,}", "max_drawn_pixels", pictures),
        ("pixels on a side of a picture", f"{MAX_SIDE:,}", "", pictures),
        ("bytes of a reply's pictures", mib(memory.MAX_PICTURES), "", pictures),
        ("memory for decoding and drawing, all requests", mib(memory.IMAGE_MEMORY), "", "the others wait"),
        ("memory of unsent replies, all callers", mib(replies.REPLY_LIMIT), "", "other pictures are drawn later"),
        ("wait for memory of a reply", f"{replies.REPLY_TIMEOUT:g} s", "", "RESOURCE_EXHAUSTED"),
        ("memory of decoded photos, all requests", mib(memory.PHOTO_BUDGET), "", "the photo is decoded again later"),
        ("methods", f"{limits.methods}", "", f"{INVALID}, `methods`"),
        ("metrics", f"{limits.metrics}", "", f"{INVALID}, `metrics`"),
        ("parameters of a method or metric", f"{limits.parameters}", "", f"{INVALID}, its `parameters`"),
        ("targets", f"{limits.targets}", "", f"{INVALID}, `targets` or `top_k`"),
        ("classes that a FinerCAM target is compared with", f"{limits.against}", "", f"{INVALID}, its `finer.against`"),
        ("layers to explain", f"{limits.layers}", "", f"{INVALID}, `layers`"),
        ("layers to measure", f"{limits.inspected:,}", "", f"{INVALID}, `layers`"),
        ("interventions", f"{limits.interventions}", "", f"{INVALID}, `interventions`"),
        ("channels of the photo that are shown", f"{limits.bands}", "", f"{INVALID}, `rendering.bands`"),
        ("channels that an intervention names", f"{limits.changed_channels:,}", "", f"{INVALID}, its `channels`"),
        ("predictions", f"{limits.predictions:,}", "", f"{INVALID}, `max_predictions`"),
        ("channels of a layer", f"{limits.channels}", "", f"{INVALID}, `top`"),
        ("further photos that components are computed from", f"{limits.fit_images}", "", f"{INVALID}, `fit_images`"),
        ("concepts of a factorisation", f"{limits.factors}", "", f"{INVALID}, `top`"),
        (
            "values of the features to decompose: cells × channels of all photos; × concepts, four times as many",
            f"{limits.feature_values:,}",
            "",
            f"{INVALID}, `layer`",
        ),
        ("raw maps of these channels", mib(limits.raw_bytes), "", f"{INVALID}, `top`"),
        ("characters of a text", f"{limits.text:,}", "", f"{INVALID}, the field"),
        ("texts that are the classes of a request", f"{limits.texts:,}", "", f"{INVALID}, `texts`"),
        ("memory of the embeddings of texts, all requests", mib(TEXT_CACHE), "", "the text is embedded again later"),
        (
            "images of a ModelInfer request",
            f"{limits.images}",
            "",
            f"{INVALID}, `inputs[0]`; each has the limits of a request",
        ),
        (
            "input or output tensors of a ModelInfer request",
            f"{limits.tensors}",
            "",
            f"{INVALID}, `inputs` or `outputs`",
        ),
        ("dimensions of a tensor", f"{limits.axes}", "", f"{INVALID}, its `shape`"),
        ("parameters of a ModelInfer request", f"{limits.asked}", "", f"{INVALID}, `parameters`"),
        (
            "characters of a request id",
            f"{MAX_ID_LENGTH}",
            "",
            f"{INVALID}, `request_id`, in a stream; otherwise the server assigns an id",
        ),
    )


def rows():
    return server_limits() + request_limits()


def table():
    lines = ["| limit on | default | setting | beyond it |", "|---|---|---|---|"]
    for subject, limit, setting, beyond in rows():
        lines.append(f"| {subject} | {limit} | {f'`{setting}`' if setting else 'none'} | {beyond} |")
    return "\n".join(lines)


def test_table_in_security_md_matches_the_code():
    documented = re.search(r"<!-- limits:.*?-->\n(.*?)\n<!-- /limits -->", SECURITY, re.DOTALL).group(1)

    assert documented == table()


def test_table_has_every_limit(monkeypatch):
    """Changing any limit changes the table."""
    settings = {name for _, _, name, _ in rows() if name}
    assert {name for name in Settings.model_fields if name.startswith("max_")} - set(NO_LIMITS) <= settings
    before = table()
    for field in dataclasses.fields(Limits):
        value = getattr(LIMITS, field.name)
        changed = dataclasses.replace(SETTINGS.limits, **{field.name: 3 * value})
        with monkeypatch.context() as patch:
            patch.setattr(Settings, "limits", property(lambda _self, changed=changed: changed))
            assert table() != before, field.name


def test_security_md_states_the_memory_limits_of_the_code():
    queue = SETTINGS.max_queue_rows * scheduling.BYTES_PER_ROW
    bounds = (
        f"messages {mib(deserialization.MESSAGE_MEMORY)}; inputs, masks and maps {mib(queue)}; "
        f"decoded photos {mib(memory.PHOTO_BUDGET)}; "
        f"what is being decoded and drawn {mib(memory.IMAGE_MEMORY)}; replies {mib(replies.REPLY_LIMIT)}; "
        f"batches on a CPU {SETTINGS.max_batch_mib} MiB"
    )
    receiving = (
        f"at most {deserialization.MAX_RECEIVING} calls and {deserialization.MAX_RECEIVING} streams receive a message"
    )
    text = " ".join(SECURITY.split())

    assert bounds in text
    assert receiving in text
    assert f"takes more than {connection_limits.RECEIVE_TIMEOUT:g} s loses its turn" in text


@pytest.fixture(scope="module")
def channel():
    with serving(models=(nets.TINY,), device="cpu", threads=1, max_message_mib=1) as served:
        wide = [("grpc.max_metadata_size", 1 << 20), ("grpc.absolute_max_metadata_size", 1 << 20)]
        with grpc.insecure_channel(served.address, options=wide) as channel:
            yield channel


def refusal(channel, method, message, size=0, **options):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/camserve.v1.{method}")(
            message.SerializeToString(), metadata=(("x-padding", "m" * size),), **options
        )
    return caught.value


def test_metadata_limit_is_exact(channel):
    call = channel.unary_unary("/camserve.v1.ModelService/ListModels")
    for _ in range(5):
        assert call(b"", metadata=(("x-padding", "m" * 7000),))
    for size in (9000, 50_000):
        for _ in range(5):
            error = refusal(channel, "ModelService/ListModels", models_pb2.ListModelsRequest(), size)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error_checks.leaks(error.details()) == []
    assert call(b"")


def test_message_limit_is_the_same_before_and_after_decompression(channel):
    large = explain_pb2.ExplainRequest(image=bytes(2 << 20))
    for packed in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        error = refusal(channel, "ExplainService/Explain", large, compression=packed)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_checks.leaks(error.details()) == []
    small = refusal(channel, "ExplainService/Explain", explain_pb2.ExplainRequest(image=bytes(1000)))
    assert small.code() is grpc.StatusCode.INVALID_ARGUMENT
