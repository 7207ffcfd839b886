"""Every field of every request, found in the descriptors, so that a new one cannot be forgotten; and sound requests."""

import dataclasses
import math

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import oip
from support import PHOTOS

SERVICES = (
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"],
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"],
    models_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
RPCS = {rpc.name: rpc for service in SERVICES for rpc in service.methods}
INFERENCE = {rpc.name: rpc for rpc in oip.SERVICE.methods}
"""Those of the Open Inference Protocol, whose numbers and texts mean little by themselves: test_open_inference.py."""

METHODS = {
    rpc.name: f"/{oip.known_as(service.full_name)}/{rpc.name}"
    for service in (*SERVICES, oip.SERVICE)
    for rpc in service.methods
}
MODELS = (
    "tiny=robustness.nets:tiny?size=32&labels={labels}",
    "parts=coloured:Colours?size=32",
    "finder=coloured:Finder?size=32",
)
KEYS = {"Method": "samples", "Metric": "steps"}
"""A parameter that the method, and the metric, of a sound request has."""

WHOLE = {Kind.TYPE_UINT32, Kind.TYPE_INT32, Kind.TYPE_ENUM}
PARTED = {Kind.TYPE_FLOAT, Kind.TYPE_DOUBLE}
FLAGS = {Kind.TYPE_BOOL, Kind.TYPE_BYTES}
"""What has no number and no length of its own: any number on the wire is a flag, and bytes are within their message."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A field, and the way to it."""

    rpc: str
    chain: tuple[Kind, ...]

    @property
    def field(self):
        return self.chain[-1]

    @property
    def name(self):
        """Its name among the fields of its message, as in Rendering.alpha."""
        return self.field.full_name.removeprefix("camserve.v1.")

    @property
    def path(self):
        """As an error names it; that of a list without an index. In a stream what is asked is not named itself."""
        words = [_word(field) for field in self.chain[:-1]] + [self.field.name]
        if words[0] == "request" and len(words) > 1:
            words = words[1:]
        return ".".join(word for word in words if word)

    @property
    def named(self):
        """As an error names it where it is a value of a map: that has a field of its own for each kind of value."""
        return self.path.removesuffix(f".{self.field.name}") if is_map_value(self) else self.path

    def __str__(self):
        return f"{self.rpc} {'.'.join(field.name for field in self.chain)}"


def is_map(field):
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def is_map_value(place):
    return len(place.chain) > 1 and is_map(place.chain[-2])


def _word(field):
    if is_map(field):
        return f'{field.name}["{KEYS[field.containing_type.name]}"]'
    return f"{field.name}[0]" if field.is_repeated else field.name


def places(rpc, kind=None, chain=()):
    """Yield every field of an RPC's request, and of the messages in it."""
    for field in (kind or RPCS[rpc].input_type).fields:
        here = (*chain, field)
        yield Place(rpc, here)
        if is_map(field):
            yield from places(rpc, field.message_type.fields_by_name["value"].message_type, here)
        elif field.message_type is not None:
            yield from places(rpc, field.message_type, here)


ALL = [place for rpc in RPCS for place in places(rpc)]
NUMBERS = [place for place in ALL if place.field.type in WHOLE | PARTED]
TEXTS = [place for place in ALL if place.field.type == Kind.TYPE_STRING and not place.field.is_repeated]
LISTS = [place for place in ALL if place.field.is_repeated]
KNOWN = WHOLE | PARTED | FLAGS | {Kind.TYPE_STRING, Kind.TYPE_MESSAGE}

PHOTO = PHOTOS["rocket"].read_bytes()
BOX = explain_pb2.Box(left=200, top=100, right=300, bottom=200)


def name(index):
    return explain_pb2.ClassName(class_index=index)


TARGETS = {
    "class_index": ("tiny", explain_pb2.Target(class_index=1)),
    "label": ("tiny", explain_pb2.Target(label="1")),
    "contrast": ("tiny", explain_pb2.Target(contrast=explain_pb2.Contrast(why=name(1), why_not=name(2)))),
    "finer": ("tiny", explain_pb2.Target(finer=explain_pb2.Finer(why=name(1), against=[name(2)]))),
    "similarity": ("tiny", explain_pb2.Target(similarity=explain_pb2.Similarity(image=PHOTO))),
    "segment": ("parts", explain_pb2.Target(segment=explain_pb2.Segment(class_name=name(1), region=BOX))),
    "detection": ("finder", explain_pb2.Target(detection=explain_pb2.Detection(class_name=name(1), box=BOX))),
    "softmax": ("tiny", explain_pb2.Target(class_index=1, softmax=True)),
}
"""Of each kind a sound target, and a model for it."""


def sound(place):
    """Return a request that has all around a field as it should be, so that only the field can be at fault."""
    request = message_factory.GetMessageClass(RPCS[place.rpc].input_type)()
    part = {"request": "request", "explain": "explain"}.get(next(iter(request.DESCRIPTOR.fields_by_name), ""), "")
    if place.rpc == "ExplainStream":
        request.request_id, part = "one", "request"
    asked = getattr(request, part) if part else request
    if "image" in asked.DESCRIPTOR.fields_by_name:
        asked.image = PHOTO
    _aim(asked, place)
    if place.rpc == "ExtractFeatures":
        request.raw = True
    if place.rpc in {"LoadModel", "UnloadModel"}:
        request.name = "tiny"
    named = [field.name for field in place.chain]
    if "methods" in named:
        asked.methods.add(name="smoothgrad", parameters={KEYS["Method"]: explain_pb2.Parameter(number=2)})
    if "metrics" in named:
        request.metrics.add(name="deletion", parameters={KEYS["Metric"]: explain_pb2.Parameter(number=8)})
    if place.rpc == "Evaluate" and named[0] == "box":
        request.box.CopyFrom(BOX)
    return request


def _aim(asked, place):
    kind = next((field.name for field in place.chain if field.full_name.startswith("camserve.v1.Target.")), None)
    if not kind:
        return
    asked.model, target = TARGETS[kind]
    where = next(field for field in place.chain if field.message_type and field.message_type.name == "Target")
    if where.is_repeated:
        asked.targets.append(target)
    else:
        asked.target.CopyFrom(target)
        for part, box in (("segment", "region"), ("detection", "box")):  # here a target is a class alone
            if kind == part and box not in [field.name for field in place.chain]:
                getattr(asked.target, part).ClearField(box)


def put(request, place, value):
    """Write a value into its field, and return the request."""
    message = request
    for field in place.chain[:-1]:
        inner = getattr(message, field.name)
        if is_map(field):
            message = inner[KEYS[field.containing_type.name]]
        elif field.is_repeated:
            message = inner[0] if inner else inner.add()
        else:
            message = inner
    setattr(message, place.field.name, value)
    return request


def fill(request, place, count, key="p"):
    """Repeat a list's element so many times, each under a key of its own in a map, and return the request."""
    message = request
    for field in place.chain[:-1]:
        inner = getattr(message, field.name)
        message = (inner[0] if inner else inner.add()) if field.is_repeated else inner
    items = getattr(message, place.field.name)
    if is_map(place.field):
        for number in range(count):
            items[f"{key}{number}"].number = 1
    elif place.field.message_type is None:
        items.extend(f"name{number}" for number in range(count))
    else:
        items.extend([items[0] if items else items.add()] * count)
    return request


def values(place, cap):
    """Yield the values that are tried in a number, with their names."""
    if place.field.type in PARTED:
        beyond = math.nextafter(cap, math.inf) if place.field.type == Kind.TYPE_DOUBLE else cap * (1 + 1e-6)
        yield from {"-1": -1, "0": 0, "cap + 1": cap + 1, "just beyond the cap": beyond}.items()
        yield from {"2^31 - 1": 2**31 - 1, "NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}.items()
        return
    # Below zero there is nothing in these numbers but what the wire makes of it.
    yield "-1", 2**32 - 1 if place.field.type == Kind.TYPE_UINT32 else -1
    yield from {"0": 0, "cap + 1": cap + 1, "2^31 - 1": 2**31 - 1}.items()


def texts(message):
    """Return every text in a message: what its caller said."""
    found = []
    for field, value in message.ListFields():
        each = [value]
        if is_map(field):
            each = [*value, *value.values()]
        elif field.is_repeated:
            each = list(value)
        for one in each[:100]:
            found += [one] if isinstance(one, str) else texts(one) if hasattr(one, "ListFields") else []
    return found
