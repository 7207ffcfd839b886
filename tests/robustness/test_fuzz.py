"""What chance makes of images and messages: answered, or refused as what it is, with no harm done.

Mutants of images and of messages go through a whole server, 150 of each, or in the slow tests 5,000, and those that are
kept in `corpus`. Beside that chance looks at the two edges themselves, where requests are read and where images are
decoded.
"""

import math
import struct

import numpy as np
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camserve_server.api import codec
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from camserve_server.methods import METHODS
from camserve_server.metrics import METRICS
from robustness import fields, fuzz_them, hygiene, mutants, watched
from support import serving

COUNT = 5000
EDGE = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
SMALL = Limits(pixels=100_000, side=2000)


FEW = 150
SENT = [FEW, pytest.param(COUNT, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SENT)
def count(request):
    return request.param


@pytest.fixture(scope="module")
def told(count):
    """What came of everything that was sent, and of a few images again with a decoder that has faults."""
    return watched.run("fuzz_them", count, count, "raise", "leak")


def test_mutants_of_images_are_explained_or_refused_as_images(told, count):
    assert told["images"]["bad"] == []
    assert set(told["images"]["codes"]) == {"OK", "INVALID_ARGUMENT"}
    assert told["images"]["count"] == count
    assert told["images"]["codes"]["OK"] > count / 10


def test_mutants_of_messages_are_answered_or_refused(told, count):
    """NOT_FOUND and FAILED_PRECONDITION are right where chance has changed a name, or the number of a class."""
    assert told["messages"]["bad"] == []
    assert set(told["messages"]["codes"]) <= fuzz_them.ALLOWED | fuzz_them.NAMES_ANOTHER
    assert told["messages"]["count"] == count
    assert told["messages"]["codes"]["OK"] > count / 100


def test_the_kept_ones_are_too(told):
    for what in ("kept images", "kept messages"):
        assert told[what]["bad"] == []
        assert told[what]["count"] > 50


def test_mutants_take_less_than_100_mb_and_the_server_still_answers(told):
    assert told["mb"] <= 100
    assert told["after"] == {"codes": {"OK": 1}, "bad": [], "count": 1}


def test_decoder_that_raises_or_leaks_is_detected(told):
    assert {code for _, code, *_ in told["raise"]["bad"]} == {"INTERNAL"}
    assert told["leak"]["bad"] == []
    assert told["leak"]["mb"] > 100


def test_a_decoder_that_crashes_is_seen():
    with pytest.raises(AssertionError):
        watched.run("fuzz_them", 100, 0, "crash")


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for path in fuzz_them.CORPUS.rglob("*") if path.is_file()]

    assert len(sizes) > 100
    assert sum(sizes) <= 300_000


def test_mutants_are_the_same_every_time_and_of_every_kind():
    assert list(mutants.messages(100)) == list(mutants.messages(100))
    assert [hash(one) for one in mutants.images(100)] == [hash(one) for one in mutants.images(100)]
    inference = {name for name, rpc in fields.INFERENCE.items() if rpc.input_type.fields}
    assert {rpc for rpc, _ in mutants.messages(100)} == {
        rpc for rpc in fields.RPCS if any(place.rpc == rpc for place in fields.ALL)
    } | inference - {"ModelStreamInfer"}  # which reads a message as ModelInfer does


# ---------------------------------------------------------------------------------------------------- the two edges

HEADS = st.sampled_from(
    [
        b"\xff\xd8\xff\xe0\0\x10JFIF\0",
        b"\xff\xd8\xff\xc0\0\x11\x08\0\x20\0\x20\x03",
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 32, 32),
        b"RIFF\x40\0\0\0WEBPVP8 ",
        b"RIFF\x40\0\0\0WEBPVP8L",
        b"RIFF\x40\0\0\0WEBPVP8X",
        b"BM",
        b"GIF89a",
        b"II*\0",
        b"\0\0\0\x20ftypavif",
        b"",
    ]
)


def outcome(act, kinds=(InvalidArgument,)):
    """Return what comes of it, and the refusal."""
    try:
        return act(), None
    except kinds as error:
        return None, error


def refused_as_an_image(data):
    """Return whether an image is refused, after a look at what comes of it."""
    pixels, error = outcome(lambda: images.decode(data, SMALL))
    if error is None:
        assert (pixels.dtype, pixels.ndim, pixels.shape[2]) == (np.uint8, 3, 3)
        assert max(pixels.shape) <= SMALL.side
    else:
        assert (error.field, hygiene.told(error.message)) == ("image", [])
    return error is not None


@EDGE
@given(HEADS, st.binary(max_size=600))
def test_whatever_is_decoded_becomes_pixels_or_a_refusal(head, rest):
    refused_as_an_image(head + rest)


@EDGE
@given(st.sampled_from(sorted(mutants.photos().items())), st.data())
def test_a_photo_with_any_bytes_changed_becomes_pixels_or_a_refusal(photo, data):
    file = bytearray(photo[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    refused_as_an_image(bytes(file))


WORDS = ["tiny", "parts", "finder", "0", "1", "", "jet", "steps", "samples", "seed", "/", "жук", *METHODS, *METRICS]
NUMBERS = {
    Kind.TYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 20),
    Kind.TYPE_ENUM: st.integers(-(2**31), 2**31 - 1) | st.integers(0, 4),
    Kind.TYPE_FLOAT: st.floats(width=32) | st.sampled_from([0, 1, 10, 20, 30]),
    Kind.TYPE_DOUBLE: st.floats() | st.sampled_from([0, 1, 2, 8, math.nan]),
    Kind.TYPE_BOOL: st.booleans(),
    Kind.TYPE_STRING: st.sampled_from(WORDS) | st.text(max_size=20),
    Kind.TYPE_BYTES: st.just(fields.PHOTO[:100]),
}


def value_of(draw, field):
    if field.message_type is not None:
        return drawn(draw, field.message_type)
    return draw(NUMBERS[field.type])


def drawn(draw, kind):
    """Make a message of some of its fields, one of each oneof."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if not draw(st.booleans()):
            continue
        into = getattr(message, field.name)
        if fields.is_map(field):
            inner = field.message_type.fields_by_name["value"]
            into[draw(NUMBERS[Kind.TYPE_STRING])].CopyFrom(value_of(draw, inner))
        elif field.is_repeated:
            into.extend(value_of(draw, field) for _ in range(draw(st.integers(0, 3))))
        elif field.message_type is not None:
            into.CopyFrom(value_of(draw, field))
        else:
            setattr(message, field.name, value_of(draw, field))
    return message


@pytest.fixture(scope="module")
def models():
    with serving(models=tuple(one.partition("&")[0] for one in fields.MODELS), device="cpu", threads=1) as served:
        yield served.pipeline.models


READERS = {
    "Explain": codec.read_explanation,
    "Evaluate": codec.read_evaluation,
    "InspectLayers": codec.read_inspection,
    "ExtractFeatures": codec.read_extraction,
}


@pytest.mark.parametrize("rpc", READERS)
def test_whatever_a_request_says_is_read_or_refused(rpc, models):
    read = set()

    @EDGE
    @given(st.data())
    def look(data):
        request = drawn(data.draw, fields.RPCS[rpc].input_type)
        kinds = (InvalidArgument, NotFound, FailedPrecondition)
        _, error = outcome(lambda: READERS[rpc](request, models, Limits()), kinds)
        if error is not None:
            assert hygiene.told(error.message, fields.texts(request)) == []
            assert error.field
        read.add(type(error))

    look()
    assert read == {type(None), InvalidArgument, NotFound, FailedPrecondition}
