"""Every RPC refuses numbers out of range, and lists and texts that are too long, before it does any work."""

import dataclasses
import functools

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2

from camserve.v1 import explain_pb2
from camserve_server.api import codec
from camserve_server.api.codec.checks import MAX_SIDE
from camserve_server.api.codec.footprint import footprint, shape_of
from camserve_server.api.codec.sizes import LISTS
from camserve_server.api.deserialization import MAX_FIELDS
from camserve_server.api.rpc import MAX_ID_LENGTH
from camserve_server.api.statuses import STATUS
from camserve_server.core.errors import ServiceError
from camserve_server.core.limits import Limits
from camserve_server.methods import METHODS
from camserve_server.metrics import METRICS
from robustness import error_checks, fields
from robustness.cost import counting
from support import serving

LIMITS = Limits()
MANY = 10_000

LARGEST = float(np.finfo(np.float32).max)

CLASSES = {"tiny": 5, "parts": 3, "finder": 3}
CAPS = {
    "ExplainRequest.top_k": CLASSES["tiny"],
    "ExplainRequest.max_predictions": LIMITS.predictions,
    "ExplainRequest.fusion": max(explain_pb2.Fusion.values()),
    "Parameter.number": None,  # each parameter has its own
    "Target.class_index": CLASSES["tiny"] - 1,
    "ClassName.class_index": None,  # each model has its own
    "Finer.weight": 1,
    "Box.left": 2 * MAX_SIDE,
    "Box.top": 2 * MAX_SIDE,
    "Box.right": 2 * MAX_SIDE,
    "Box.bottom": 2 * MAX_SIDE,
    "Rendering.overlay": max(explain_pb2.ImageFormat.values()),
    "Rendering.heatmap_image": max(explain_pb2.ImageFormat.values()),
    "Rendering.alpha": 1,
    "Rendering.max_side": MAX_SIDE,
    "Rendering.quality": 100,
    "Rendering.profile": max(explain_pb2.Profile.values()),
    "Rendering.sign": max(explain_pb2.Sign.values()),
    "Rendering.scale_value": LARGEST,
    "Rendering.threshold_quantile": 1,
    "Rendering.threshold_value": LARGEST,
    "Rendering.contour_lines": 16,
    "RegionOptions.quantile": 1,
    "RegionOptions.mass": 1,
    "RegionOptions.max_regions": 64,
    "Intervention.scale": LARGEST,
    "Intervention.clip_gradient": LARGEST,
    "Clamp.minimum": LARGEST,
    "Clamp.maximum": LARGEST,
    "ValueRange.minimum": 1,  # the maximum is 2
    "ValueRange.maximum": LARGEST,
    "Window.centre": LARGEST,
    "Window.width": LARGEST,
    "ExtractFeaturesRequest.rank": max(explain_pb2.ChannelRank.values()),
    "ExtractFeaturesRequest.top": LIMITS.channels,
    "ExtractFeaturesRequest.picture": max(explain_pb2.ImageFormat.values()),
}
"""The largest number that each field accepts."""

NUMBERS_OF_LAYERS = ("Intervention.scale", "Clamp.minimum", "Clamp.maximum", "Window.centre")
"""Fields that accept any finite number: those of a layer's or a photo's values."""

LEGAL = {
    **{(name, value): "any finite value" for name in NUMBERS_OF_LAYERS for value in ("-1", "0", "cap + 1", "2^31 - 1")},
    ("Intervention.clip_gradient", "cap + 1"): "the cap, as float32",
    ("Intervention.clip_gradient", "2^31 - 1"): "any limit",
    ("Window.width", "cap + 1"): "the cap, as a double",
    ("Window.width", "2^31 - 1"): "any width",
    ("ValueRange.maximum", "cap + 1"): "the cap, as a double",
    ("ValueRange.maximum", "2^31 - 1"): "any value",
    ("ValueRange.minimum", "-1"): "any value below the maximum",
    ("ValueRange.minimum", "0"): "any value below the maximum",
    ("ValueRange.minimum", "just beyond the cap"): "any value below the maximum",
    ("ExplainRequest.max_predictions", "0"): "no predictions",
    ("ExplainRequest.fusion", "0"): "unset: no fusion",
    ("Target.class_index", "0"): "the first class",
    ("ClassName.class_index", "0"): "the first class",
    ("Finer.weight", "0"): "the other classes do not count",
    ("Box.left", "-1"): "a box may reach beyond the photo",
    ("Box.left", "0"): "the photo's edge",
    ("Box.top", "-1"): "a box may reach beyond the photo",
    ("Box.top", "0"): "the photo's edge",
    ("Rendering.overlay", "0"): "unset: no overlay",
    ("Rendering.heatmap_image", "0"): "unset: no picture",
    ("Rendering.alpha", "0"): "the photo alone shows",
    ("Rendering.max_side", "0"): "unset: the photo's own size",
    ("Rendering.quality", "0"): "unset: 90",
    ("Rendering.profile", "0"): "unset: the papers' defaults",
    ("Rendering.sign", "0"): "unset: the profile's default",
    ("Rendering.scale_value", "cap + 1"): "the cap, as float32",
    ("Rendering.scale_value", "2^31 - 1"): "any raw value",
    ("Rendering.threshold_quantile", "0"): "everything is painted",
    ("Rendering.threshold_value", "0"): "everything is painted",
    ("Rendering.threshold_value", "cap + 1"): "the cap, as float32",
    ("Rendering.threshold_value", "2^31 - 1"): "any raw value",
    ("Rendering.contour_lines", "0"): "unset: no lines",
    ("RegionOptions.quantile", "0"): "everything above zero",
    ("RegionOptions.mass", "0"): "the strongest pixel",
    ("ExtractFeaturesRequest.rank", "0"): "unset: by activation",
    ("ExtractFeaturesRequest.picture", "0"): "unset: no picture, since the raw maps are requested",
}
"""Values that are valid after all, and their meaning."""

EMPTY = {
    *((f"Box.{edge}", value) for edge in ("right", "bottom") for value in ("-1", "0")),
    *(("ValueRange.minimum", value) for value in ("cap + 1", "2^31 - 1")),
    *(("ValueRange.maximum", value) for value in ("-1", "0")),
}
"""Values that make a box or a range empty: the error names the box or the range, not the edge."""

NO_BOXES = {"InspectLayers", "ExtractFeatures"}
"""RPCs whose target is a class, so that they refuse any box in it."""

UNKNOWN = {"Target.class_index", "ClassName.class_index"}
"""Fields whose valid values depend on the model: NOT_FOUND, as for a label."""


def cap_of(entry):
    if entry.name == "ClassName.class_index":
        kind = next(field.name for field in entry.chain if field.full_name.startswith("camserve.v1.Target."))
        return CLASSES[fields.TARGETS[kind][0]] - 1
    if entry.name == "Parameter.number":
        owner, table = (METHODS["smoothgrad"], "Method") if "methods" in entry.path else (METRICS["deletion"], "Metric")
        return next(item.maximum for item in owner.parameters if item.name == fields.KEYS[table])
    return CAPS[entry.name]


@dataclasses.dataclass
class Answer:
    """The outcome of a request.

    Attributes:
        code: the error's code; None for a success.
        field: the field that the error names.
        message: the error's message.
        wrong: the faults of the error.
    """

    code: str | None
    field: str = ""
    message: str = ""
    wrong: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "numbers.txt"
    labels.write_text("".join(f"{number}\n" for number in range(CLASSES["tiny"])))
    with serving(models=tuple(spec.format(labels=labels) for spec in fields.MODELS), device="cpu", threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def channel(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def _read_estimate(request, models, limits):
    with codec.within_explain():
        return codec.read_explanation(request.explain, models, limits)


def read(models, rpc, request):
    """Read a request as the RPC does before it does anything else."""
    if rpc == "Explain":
        return codec.read_explanation(request, models, LIMITS)
    if rpc == "ExplainStream":
        return codec.read_explanation(request.request, models, LIMITS)
    reader = {
        "EstimateCost": _read_estimate,
        "Evaluate": codec.read_evaluation,
        "InspectLayers": codec.read_inspection,
        "ExtractFeatures": codec.read_extraction,
    }[rpc]
    return reader(request, models, LIMITS)


def read_outcome(models, rpc, request):
    try:
        read(models, rpc, request)
    except ServiceError as error:
        wrong = error_checks.leaks(error.message, fields.texts(request))
        return Answer(STATUS[type(error)].name, error.field, error.message, wrong)
    return Answer(None)


def send(channel, rpc, request):
    """Send a request to the server: in a unary call, or as the only message of a stream."""
    own_texts, packed = fields.texts(request), request.SerializeToString()
    try:
        if rpc != "ExplainStream":
            channel.unary_unary(fields.METHODS[rpc])(packed)
            return Answer(None)
        (reply,) = channel.stream_stream(fields.METHODS[rpc])(iter([packed]))
    except grpc.RpcError as error:
        return Answer(
            error.code().name, error_checks.field_of(error), error.details(), error_checks.faults(error, own_texts)
        )
    return _item_outcome(explain_pb2.ExplainStreamResponse.FromString(reply), request)


def _item_outcome(reply, request):
    if not reply.HasField("error"):
        return Answer(None)
    error = reply.error
    wrong = error_checks.leaks(error.message, fields.texts(request)) + ["no id"] * (
        reply.request_id != request.request_id
    )
    return Answer(code_pb2.Code.Name(error.code), error.fields[0].field, error.message, wrong)


@pytest.fixture
def cost(served):
    with counting(served) as counted:
        yield counted


NUMBERS = [(entry, label, value) for entry in fields.NUMBERS for label, value in fields.values(entry, cap_of(entry))]


def expected(entry, label):
    """Return the code and the field of the expected error, or None for a valid number."""
    if entry.name.startswith("Box.") and entry.rpc in NO_BOXES and ((entry.name, label) in LEGAL or label == "cap"):
        return "INVALID_ARGUMENT", "target"
    if (entry.name, label) in LEGAL or label == "cap":
        return None
    if entry.name in UNKNOWN:
        return "NOT_FOUND", entry.named
    box = entry.named.rpartition(".")[0]
    return "INVALID_ARGUMENT", box if (entry.name, label) in EMPTY else entry.named


def test_tables_have_exactly_the_numbers_and_lists_of_all_requests():
    assert {entry.name for entry in fields.NUMBERS} == set(CAPS)
    assert {name for name, _ in LEGAL} <= set(CAPS)
    assert {f"camserve.v1.{entry.name}" for entry in fields.LISTS} == {name for name in LISTS if "camserve" in name}
    assert {entry.field.type for entry in fields.ALL} <= fields.KNOWN
    assert {field.name for field in dataclasses.fields(Limits)} >= set(LISTS.values())
    assert len(NUMBERS) > 300


def each_unexpected(cases, call):
    """Yield the cases with an unexpected outcome."""
    for entry, label, request, expected_error in cases:
        answer = call(entry.rpc, request)
        error = None if answer.code is None else (answer.code, answer.field)
        if error != expected_error or answer.wrong:
            yield f"{entry} {label}", (expected_error, answer)


def unexpected(cases, call):
    """Return the cases with an unexpected outcome."""
    return dict(each_unexpected(cases, call))


@functools.cache
def cases_of_numbers():
    """Return a request for every number. Tests share them, so they must not change them."""
    return [
        (entry, label, fields.put(fields.valid_request(entry), entry, value), expected(entry, label))
        for entry, label, value in NUMBERS
    ]


def test_readers_refuse_every_number_out_of_range(served):
    assert unexpected(cases_of_numbers(), lambda *call: read_outcome(served.pipeline.models, *call)) == {}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_number_out_of_range_is_refused_before_any_work(channel, cost, every):
    """Send every number, or the last invalid one of each field."""
    refused = [case for case in cases_of_numbers() if case[3]]
    cases = refused if every else list({str(case[0]): case for case in refused}.values())
    assert {str(case[0]) for case in cases} == {str(entry) for entry in fields.NUMBERS}

    assert unexpected(cases, lambda *call: send(channel, *call)) == {}
    assert cost() == {}


def test_largest_number_is_accepted(served):
    """Otherwise larger numbers might be refused for another reason."""
    accepted = [entry for entry in fields.NUMBERS if entry.name not in ("Box.left", "Box.top")]
    cases = [
        (entry, "cap", fields.put(fields.valid_request(entry), entry, cap_of(entry)), expected(entry, "cap"))
        for entry in accepted
    ]

    assert unexpected(cases, lambda *call: read_outcome(served.pipeline.models, *call)) == {}


OWNERS = [("Method", *item) for item in METHODS.items()] + [("Metric", *item) for item in METRICS.items()]
RANGES = [
    (kind, name, parameter) for kind, name, owner in OWNERS for parameter in owner.parameters if not parameter.choices
]


def test_parameters_of_methods_and_metrics_are_refused_out_of_range(served):
    assert len(RANGES) > 50
    parameter_fields = {
        kind: next(p for p in fields.NUMBERS if p.name == "Parameter.number" and f"{kind.lower()}s[" in p.path)
        for kind in ("Method", "Metric")
    }
    bad = {}
    for kind, name, parameter in RANGES:
        entry = parameter_fields[kind]
        for label, value in fields.values(entry, parameter.maximum):
            if parameter.minimum <= value <= parameter.maximum and (not parameter.integer or value == int(value)):
                continue
            request = fields.valid_request(entry)
            (call,) = request.methods if kind == "Method" else request.metrics
            call.name = name
            del call.parameters[fields.KEYS[kind]]
            call.parameters[parameter.name].number = value
            answer = read_outcome(served.pipeline.models, entry.rpc, request)
            field = f'{kind.lower()}s[0].parameters["{parameter.name}"]'
            field = field if kind == "Metric" or entry.rpc == "Explain" else f"explain.{field}"
            if (answer.code, answer.field) != ("INVALID_ARGUMENT", field) or answer.wrong:
                bad[name, parameter.name, label] = answer
    assert bad == {}


def limit_of(entry):
    return getattr(LIMITS, LISTS[f"camserve.v1.{entry.name}"])


def too_long(entry, count):
    path = entry.path
    return (entry, count, fields.fill(fields.valid_request(entry), entry, count), ("INVALID_ARGUMENT", path))


def with_expected_field(case):
    """Expect no field name for a message with too many fields, which is refused before it is parsed."""
    entry, label, request, refusal = case
    counted = footprint(request.SerializeToString(), shape_of(request.DESCRIPTOR), MAX_FIELDS)
    return entry, label, request, refusal if counted is not None else ("INVALID_ARGUMENT", "")


@pytest.mark.parametrize("count", [None, pytest.param(MANY, marks=pytest.mark.slow)])
def test_too_long_list_is_refused_before_any_work(channel, cost, count):
    """Lists are too long by one element and by thousands."""
    cases = [with_expected_field(too_long(entry, count or limit_of(entry) + 1)) for entry in fields.LISTS]
    assert len(cases) >= 15
    assert sum(refusal[1] == "" for *_, refusal in cases) == (0 if count is None else 5)

    assert unexpected(cases, lambda *call: send(channel, *call)) == {}
    assert cost() == {}


def case_with_text(entry, text):
    request = fields.put(fields.valid_request(entry), entry, text)
    return entry, f"{len(text)} characters", request, ("INVALID_ARGUMENT", entry.path)


@pytest.mark.parametrize("length", [LIMITS.text + 1, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_too_long_text_is_refused_before_any_work(channel, cost, length):
    assert len(fields.TEXTS) > 30
    cases = [case_with_text(entry, "/x" * (length // 2) + "x") for entry in fields.TEXTS]

    assert unexpected(cases, lambda *call: send(channel, *call)) == {}
    assert cost() == {}


@pytest.mark.parametrize("forgotten", ["requests.check_sizes", "inspection.check_sizes", "inspection.check_range"])
def test_missing_check_is_detected(served, forgotten, monkeypatch):
    monkeypatch.setattr(f"camserve_server.api.codec.{forgotten}", lambda *_: None)
    # Other lengths than in the tests above: readers remember what they have accepted.
    lists = [too_long(entry, limit_of(entry) + 2) for entry in fields.LISTS]
    cases = lists + cases_of_numbers()

    assert any(each_unexpected(cases, lambda *call: read_outcome(served.pipeline.models, *call)))


def test_too_long_key_is_refused(channel):
    for entry in (entry for entry in fields.LISTS if fields.is_map(entry.field)):
        request = fields.fill(fields.valid_request(entry), entry, 1, key="k" * (LIMITS.text + 1))
        answer = send(channel, entry.rpc, request)

        assert (answer.code, answer.field, answer.wrong) == ("INVALID_ARGUMENT", entry.path, [])
        assert f"{LIMITS.text:,} is the limit" in answer.message


def test_id_of_a_stream_item_has_its_own_limit(channel):
    entry = next(entry for entry in fields.TEXTS if entry.name == "ExplainStreamRequest.request_id")
    answer = send(channel, "ExplainStream", fields.put(fields.valid_request(entry), entry, "i" * (MAX_ID_LENGTH + 1)))

    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "request_id")


def test_work_of_a_valid_request_is_counted(channel, cost):
    assert send(channel, "Explain", explain_pb2.ExplainRequest(image=fields.PHOTO)).code is None
    assert cost() == {"decoded": 1, "admitted": 1, "rows": 1}


def test_valid_request_with_every_field_is_answered(channel):
    """Otherwise the tests above might be refused for another reason."""
    requests = {}
    for entry in fields.ALL:
        field_names = {field.name for field in entry.chain}
        unfit = entry.rpc in NO_BOXES and bool(field_names & {"region", "box", "similarity"})
        request = fields.valid_request(entry)
        requests[entry.rpc, request.SerializeToString(deterministic=True), unfit] = entry, request
    for (*_, unfit), (entry, request) in requests.items():
        answer = send(channel, entry.rpc, request)
        if answer.code != "FAILED_PRECONDITION":  # the model detects nothing in this photo
            assert (answer.code is None) != unfit, (str(entry), answer)
