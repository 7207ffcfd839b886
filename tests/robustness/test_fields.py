"""Numbers out of range, and lists and texts that are too long, are refused in every RPC before any work is done."""

import dataclasses

import grpc
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
from robustness import fields, hygiene
from robustness.cost import counting
from support import serving

LIMITS = Limits()
MANY = 10_000

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
    "ExtractFeaturesRequest.rank": max(explain_pb2.ChannelRank.values()),
    "ExtractFeaturesRequest.top": LIMITS.channels,
    "ExtractFeaturesRequest.picture": max(explain_pb2.ImageFormat.values()),
}
"""The greatest number that each field takes."""

LEGAL = {
    ("ExplainRequest.max_predictions", "0"): "none are wanted",
    ("ExplainRequest.fusion", "0"): "not said: no fusion",
    ("Target.class_index", "0"): "the first class",
    ("ClassName.class_index", "0"): "the first class",
    ("Finer.weight", "0"): "the others do not count",
    ("Box.left", "-1"): "a box may reach beyond the photo",
    ("Box.left", "0"): "the photo's edge",
    ("Box.top", "-1"): "a box may reach beyond the photo",
    ("Box.top", "0"): "the photo's edge",
    ("Rendering.overlay", "0"): "not said: no overlay",
    ("Rendering.heatmap_image", "0"): "not said: no picture",
    ("Rendering.alpha", "0"): "the photo alone shows",
    ("Rendering.max_side", "0"): "not said: the photo's own size",
    ("Rendering.quality", "0"): "not said: 90",
    ("Rendering.profile", "0"): "not said: the papers' own",
    ("ExtractFeaturesRequest.rank", "0"): "not said: by activation",
    ("ExtractFeaturesRequest.picture", "0"): "not said: no picture, the raw maps are wanted",
}
"""What is a sound value after all, and what it means."""

EMPTY = {(f"Box.{edge}", value) for edge in ("right", "bottom") for value in ("-1", "0")}
"""What leaves nothing between two edges: the box is named, not the edge."""

NO_BOXES = {"InspectLayers", "ExtractFeatures"}
"""Where a target is a class: any box in it is too much."""

UNKNOWN = {"Target.class_index", "ClassName.class_index"}
"""Whether there is a class of that number depends on the model: NOT_FOUND, as for a label."""


def cap_of(place):
    if place.name == "ClassName.class_index":
        kind = next(field.name for field in place.chain if field.full_name.startswith("camserve.v1.Target."))
        return CLASSES[fields.TARGETS[kind][0]] - 1
    if place.name == "Parameter.number":
        owner, table = (METHODS["smoothgrad"], "Method") if "methods" in place.path else (METRICS["deletion"], "Metric")
        return next(one.maximum for one in owner.parameters if one.name == fields.KEYS[table])
    return CAPS[place.name]


@dataclasses.dataclass
class Answer:
    """What became of a request.

    Attributes:
        code: of the refusal; None where there was none.
        field: that it names.
        words: of it.
        wrong: with how it says so.
    """

    code: str | None
    field: str = ""
    words: str = ""
    wrong: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    labels = tmp_path_factory.mktemp("labels") / "numbers.txt"
    labels.write_text("".join(f"{number}\n" for number in range(CLASSES["tiny"])))
    with serving(models=tuple(one.format(labels=labels) for one in fields.MODELS), device="cpu", threads=1) as one:
        yield one


@pytest.fixture(scope="module")
def line(served):
    with grpc.insecure_channel(served.address) as channel:
        yield channel


def read(models, rpc, request):
    """Read a request as the RPC does before it does anything else."""
    if rpc == "Explain":
        return codec.read_explanation(request, models, LIMITS)
    if rpc == "ExplainStream":
        return codec.read_explanation(request.request, models, LIMITS)
    reader = {
        "Evaluate": codec.read_evaluation,
        "InspectLayers": codec.read_inspection,
        "ExtractFeatures": codec.read_extraction,
    }[rpc]
    return reader(request, models, LIMITS)


def at_the_edge(models, rpc, request):
    try:
        read(models, rpc, request)
    except ServiceError as error:
        wrong = hygiene.told(error.message, fields.texts(request))
        return Answer(STATUS[type(error)].name, error.field, error.message, wrong)
    return Answer(None)


def over_the_wire(line, rpc, request):
    """Ask the server; every RPC of ours is one-to-one, or a stream of which one item is sent."""
    own, packed = fields.texts(request), request.SerializeToString()
    try:
        if rpc != "ExplainStream":
            line.unary_unary(fields.METHODS[rpc])(packed, timeout=60)
            return Answer(None)
        (reply,) = line.stream_stream(fields.METHODS[rpc])(iter([packed]), timeout=60)
    except grpc.RpcError as error:
        return Answer(error.code().name, hygiene.field_of(error), error.details(), hygiene.faults(error, own))
    return _of_item(explain_pb2.ExplainStreamResponse.FromString(reply), request)


def _of_item(reply, request):
    if not reply.HasField("error"):
        return Answer(None)
    error = reply.error
    wrong = hygiene.told(error.message, fields.texts(request)) + ["no id"] * (reply.request_id != request.request_id)
    return Answer(code_pb2.Code.Name(error.code), error.fields[0].field, error.message, wrong)


@pytest.fixture
def cost(served):
    with counting(served) as counted:
        yield counted


NUMBERS = [(place, label, value) for place in fields.NUMBERS for label, value in fields.values(place, cap_of(place))]


def expected(place, label):
    """Return the code and the field that a number must be refused with, None where it is sound."""
    if place.name.startswith("Box.") and place.rpc in NO_BOXES and ((place.name, label) in LEGAL or label == "cap"):
        return "INVALID_ARGUMENT", "target"
    if (place.name, label) in LEGAL or label == "cap":
        return None
    if place.name in UNKNOWN:
        return "NOT_FOUND", place.named
    box_of = place.named.rpartition(".")[0]
    return "INVALID_ARGUMENT", box_of if (place.name, label) in EMPTY else place.named


def test_the_tables_hold_every_number_and_every_list_of_every_request_and_no_other():
    assert {place.name for place in fields.NUMBERS} == set(CAPS)
    assert {name for name, _ in LEGAL} <= set(CAPS)
    assert {f"camserve.v1.{place.name}" for place in fields.LISTS} == {name for name in LISTS if "camserve" in name}
    assert {place.field.type for place in fields.ALL} <= fields.KNOWN
    assert {field.name for field in dataclasses.fields(Limits)} >= set(LISTS.values())
    assert len(NUMBERS) > 300


def outcomes(cases, ask):
    """Return the cases whose answer is not as it must be."""
    bad = {}
    for place, label, request, must in cases:
        answer = ask(place.rpc, request)
        said = None if answer.code is None else (answer.code, answer.field)
        if said != must or answer.wrong:
            bad[f"{place} {label}"] = (must, answer)
    return bad


def test_every_number_out_of_range_is_refused_where_requests_are_read(served):
    cases = [
        (place, label, fields.put(fields.sound(place), place, value), expected(place, label))
        for place, label, value in NUMBERS
    ]

    assert outcomes(cases, lambda *what: at_the_edge(served.pipeline.models, *what)) == {}


def test_number_out_of_range_is_refused_before_any_work(line, cost):
    cases = [
        (place, label, fields.put(fields.sound(place), place, value), expected(place, label))
        for place, label, value in NUMBERS
        if expected(place, label)
    ]

    assert outcomes(cases, lambda *what: over_the_wire(line, *what)) == {}
    assert cost() == {}


def test_the_greatest_number_is_taken(served):
    """Else the one after it would be refused for another reason."""
    taken = [place for place in fields.NUMBERS if place.name not in ("Box.left", "Box.top")]
    cases = [
        (place, "cap", fields.put(fields.sound(place), place, cap_of(place)), expected(place, "cap")) for place in taken
    ]

    assert outcomes(cases, lambda *what: at_the_edge(served.pipeline.models, *what)) == {}


OWNERS = [("Method", name, one) for name, one in METHODS.items()] + [("Metric", n, one) for n, one in METRICS.items()]
RANGES = [(kind, name, one) for kind, name, owner in OWNERS for one in owner.parameters if not one.choices]


def test_every_number_of_every_method_and_metric_is_refused_beyond_its_range(served):
    assert len(RANGES) > 50
    where = {
        kind: next(p for p in fields.NUMBERS if p.name == "Parameter.number" and f"{kind.lower()}s[" in p.path)
        for kind in ("Method", "Metric")
    }
    bad = {}
    for kind, name, parameter in RANGES:
        place = where[kind]
        for label, value in fields.values(place, parameter.maximum):
            if parameter.minimum <= value <= parameter.maximum and (not parameter.integer or value == int(value)):
                continue
            request = fields.sound(place)
            (one,) = request.methods if kind == "Method" else request.metrics
            one.name = name
            del one.parameters[fields.KEYS[kind]]
            one.parameters[parameter.name].number = value
            answer = at_the_edge(served.pipeline.models, place.rpc, request)
            field = f'{kind.lower()}s[0].parameters["{parameter.name}"]'
            field = field if kind == "Metric" or place.rpc == "Explain" else f"explain.{field}"
            if (answer.code, answer.field) != ("INVALID_ARGUMENT", field) or answer.wrong:
                bad[name, parameter.name, label] = answer
    assert bad == {}


def too_long(place, count):
    path = place.path
    return (place, count, fields.fill(fields.sound(place), place, count), ("INVALID_ARGUMENT", path))


def parsed_or_not(case):
    """A message with too many fields is refused before it is parsed, so the refusal names no field."""
    place, label, request, refusal = case
    counted = footprint(request.SerializeToString(), shape_of(request.DESCRIPTOR), MAX_FIELDS)
    return place, label, request, refusal if counted is not None else ("INVALID_ARGUMENT", "")


@pytest.mark.parametrize("count", [None, MANY])
def test_too_long_list_is_refused_before_any_work(line, cost, count):
    """By one, and by far."""
    cases = [
        parsed_or_not(too_long(place, count or getattr(LIMITS, LISTS[f"camserve.v1.{place.name}"]) + 1))
        for place in fields.LISTS
    ]
    assert len(cases) >= 15
    assert sum(refusal[1] == "" for *_, refusal in cases) == (0 if count is None else 4)

    assert outcomes(cases, lambda *what: over_the_wire(line, *what)) == {}
    assert cost() == {}


def worded(place, text):
    request = fields.put(fields.sound(place), place, text)
    return place, f"{len(text)} characters", request, ("INVALID_ARGUMENT", place.path)


@pytest.mark.parametrize("length", [LIMITS.text + 1, 1_000_000])
def test_too_long_text_is_refused_before_any_work(line, cost, length):
    assert len(fields.TEXTS) > 30
    cases = [worded(place, "/x" * (length // 2) + "x") for place in fields.TEXTS]

    assert outcomes(cases, lambda *what: over_the_wire(line, *what)) == {}
    assert cost() == {}


@pytest.mark.parametrize("forgotten", ["requests.check_sizes", "inspection.check_sizes", "inspection.check_range"])
def test_a_check_that_is_forgotten_is_seen(served, forgotten, monkeypatch):
    monkeypatch.setattr(f"camserve_server.api.codec.{forgotten}", lambda *_: None)
    lists = [too_long(place, MANY) for place in fields.LISTS]
    numbers = [
        (place, label, fields.put(fields.sound(place), place, value), expected(place, label))
        for place, label, value in NUMBERS
    ]

    assert outcomes(lists + numbers, lambda *what: at_the_edge(served.pipeline.models, *what)) != {}


def test_a_key_that_is_too_long_is_refused(line):
    for place in (one for one in fields.LISTS if fields.is_map(one.field)):
        request = fields.fill(fields.sound(place), place, 1, key="k" * (LIMITS.text + 1))
        answer = over_the_wire(line, place.rpc, request)

        assert (answer.code, answer.field, answer.wrong) == ("INVALID_ARGUMENT", place.path, [])
        assert f"{LIMITS.text:,} is the limit" in answer.words


def test_the_id_of_a_streams_item_has_its_own_limit(line):
    place = next(one for one in fields.TEXTS if one.name == "ExplainStreamRequest.request_id")
    answer = over_the_wire(line, "ExplainStream", fields.put(fields.sound(place), place, "i" * (MAX_ID_LENGTH + 1)))

    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "request_id")


def test_work_of_a_valid_request_is_counted(line, cost):
    assert over_the_wire(line, "Explain", explain_pb2.ExplainRequest(image=fields.PHOTO)).code is None
    assert cost() == {"decoded": 1, "admitted": 1, "rows": 1}


def test_a_sound_request_with_everything_is_answered(line):
    """Else all of the above would be refused for another reason."""
    for place in fields.ALL:
        named = {field.name for field in place.chain}
        unfit = place.rpc in NO_BOXES and bool(named & {"region", "box", "similarity"})
        answer = over_the_wire(line, place.rpc, fields.sound(place))
        if answer.code != "FAILED_PRECONDITION":  # the photo shows nothing that the model knows there
            assert (answer.code is None) != unfit, (str(place), answer)
