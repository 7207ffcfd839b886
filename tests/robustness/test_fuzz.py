"""Fuzz tests: random images and messages are answered or refused, and do no harm.

Mutants of images and messages are sent to a whole server: 60 of each, 400 in the slow tests, and those of `corpus`.
Hypothesis tests the two entry points directly: the readers of requests and the decoder of images.
All inputs are the same in every run, except in `make fuzz`: FUZZ_SEED selects other mutants, 5,000 of each, and other
examples.
"""

import math
import os
import struct

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fork_server
from camserve_server.api import codec
from camserve_server.core.errors import FailedPrecondition, InvalidArgument, NotFound
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from camserve_server.imaging.channels import TYPES
from camserve_server.methods import METHODS
from camserve_server.metrics import METRICS
from robustness import error_checks, fields, fuzzing, mutations, process_audit, raster_files
from support import serving

COUNT = 5000 if "FUZZ_SEED" in os.environ else 400
FUZZING = settings(
    max_examples=200 if "FUZZ_SEED" in os.environ else 100,
    deadline=None,
    derandomize="FUZZ_SEED" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SMALL = Limits(pixels=100_000, side=2000)
# On Python 3.14, `gc.freeze` in `conftest.py` also freezes the owner of Hypothesis's random numbers. Hypothesis looks
# for it with `gc.get_referrers`, which ignores frozen objects.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`:hypothesis.errors.HypothesisWarning")


FEW = 60
SENT = [FEW, pytest.param(COUNT, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SENT)
def count(request):
    return request.param


@pytest.fixture(scope="module")
def summaries(count):
    """Summaries of the responses to all inputs, and to a few images with a faulty decoder."""
    return process_audit.run_module("fuzzing", count, count, "raise", "leak")


def test_mutants_of_images_are_explained_or_refused_as_images(summaries, count):
    assert summaries["images"]["bad"] == []
    assert set(summaries["images"]["codes"]) == {"OK", "INVALID_ARGUMENT"}
    assert summaries["images"]["count"] == count
    assert summaries["images"]["codes"]["OK"] > count / 10


def test_mutants_of_messages_are_answered_or_refused(summaries, count):
    """NOT_FOUND and FAILED_PRECONDITION are right if a mutation changed a name or the index of a class."""
    assert summaries["messages"]["bad"] == []
    assert set(summaries["messages"]["codes"]) <= fuzzing.ALLOWED | fuzzing.OTHER_NAME
    assert summaries["messages"]["count"] == count
    assert summaries["messages"]["codes"]["OK"] > count / 100


def test_corpus_is_answered_or_refused(summaries):
    for inputs in ("kept images", "kept messages"):
        assert summaries[inputs]["bad"] == []
        assert summaries[inputs]["count"] > 50


def test_mutants_take_less_than_100_mb_and_the_server_still_answers(summaries):
    assert summaries["mb"] <= 100
    assert summaries["after"] == {"codes": {"OK": 1}, "bad": [], "count": 1}


def test_decoder_that_raises_or_leaks_is_detected(summaries):
    assert {code for _, code, *_ in summaries["raise"]["bad"]} == {"INTERNAL"}
    assert summaries["leak"]["bad"] == []
    assert summaries["leak"]["mb"] > 100


def test_crash_of_the_decoder_is_detected():
    with pytest.raises(AssertionError):
        fork_server.call(fuzzing.send_with_fault, "crash", 100)


def test_corpus_takes_at_most_300_kb():
    sizes = [path.stat().st_size for path in fuzzing.CORPUS.rglob("*") if path.is_file()]

    assert len(sizes) > 100
    assert sum(sizes) <= 300_000


def test_mutants_are_reproducible_and_of_every_rpc():
    assert list(mutations.messages(100)) == list(mutations.messages(100))
    assert [hash(image) for image in mutations.images(100)] == [hash(image) for image in mutations.images(100)]
    inference = {name for name, rpc in fields.INFERENCE.items() if rpc.input_type.fields}
    assert {rpc for rpc, _ in mutations.messages(100)} == {
        rpc for rpc in fields.RPCS if any(entry.rpc == rpc for entry in fields.ALL)
    } | inference - {"ModelStreamInfer"}  # reads its messages as ModelInfer does


# --- the two entry points ---

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
        b"II*\0" + struct.pack("<IHHHIIHHII", 8, 9, 256, 4, 1, 8, 257, 4, 1, 8),
        b"\x93NUMPY\1\0\x3d\0{'descr': '|u1', 'fortran_order': False, 'shape': (4, 8)}     \n",
        b"\0\0\0\x20ftypavif",
        b"",
    ]
)


def outcome(act, kinds=(InvalidArgument,)):
    """Return the result of a function, or its error."""
    try:
        return act(), None
    except kinds as error:
        return None, error


def check_image(data, channels=3):
    """Check that an image is decoded to pixels or refused with an error about the image."""
    pixels, error = outcome(lambda: images.decode(data, SMALL, channels))
    if error is None:
        assert pixels.dtype.name in TYPES
        assert (pixels.ndim, pixels.shape[2]) == (3, channels)
        assert max(pixels.shape) <= SMALL.side
    else:
        assert (error.field, error_checks.leaks(error.message)) == ("image", [])


@FUZZING
@given(HEADS, st.binary(max_size=600))
def test_random_bytes_become_pixels_or_an_error(head, rest):
    check_image(head + rest)


@FUZZING
@given(st.sampled_from(mutations.valid_images()), st.data())
def test_photo_with_changed_bytes_becomes_pixels_or_an_error(photo, data):
    model, file = photo[0], bytearray(photo[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    check_image(bytes(file), raster_files.CHANNELS[model])


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


def draw_value(draw, field):
    if field.message_type is not None:
        return draw_message(draw, field.message_type)
    return draw(NUMBERS[field.type])


def draw_message(draw, kind):
    """Draw a message with random values in some of its fields."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if draw(st.integers(0, 3)):  # with half of the fields, hardly any request would be valid
            continue
        into = getattr(message, field.name)
        if fields.is_map(field):
            inner = field.message_type.fields_by_name["value"]
            into[draw(NUMBERS[Kind.TYPE_STRING])].CopyFrom(draw_value(draw, inner))
        elif field.is_repeated:
            into.extend(draw_value(draw, field) for _ in range(draw(st.integers(0, 3))))
        elif field.message_type is not None:
            into.CopyFrom(draw_value(draw, field))
        else:
            setattr(message, field.name, draw_value(draw, field))
    return message


@pytest.fixture(scope="module")
def models():
    with serving(models=tuple(spec.partition("&")[0] for spec in fields.MODELS), device="cpu", threads=1) as served:
        yield served.pipeline.models


READERS = {
    "Explain": codec.read_explanation,
    "Evaluate": codec.read_evaluation,
    "InspectLayers": codec.read_inspection,
    "ExtractFeatures": codec.read_extraction,
}


@pytest.mark.parametrize("rpc", READERS)
def test_random_request_is_read_or_refused(rpc, models):
    errors = set()

    @FUZZING
    @given(st.data())
    def check(data):
        request = draw_message(data.draw, fields.RPCS[rpc].input_type)
        kinds = (InvalidArgument, NotFound, FailedPrecondition)
        _, error = outcome(lambda: READERS[rpc](request, models, Limits()), kinds)
        if error is not None:
            assert error_checks.leaks(error.message, fields.texts(request)) == []
            assert error.field
        errors.add(type(error))

    check()
    assert errors == {type(None), InvalidArgument, NotFound, FailedPrecondition}
