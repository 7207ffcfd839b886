"""Every field of every request, read from the descriptors so that none is forgotten, and valid requests."""

import dataclasses
import math

import numpy as np
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Kind
from PIL import Image

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import oip
from support import PHOTOS, jpeg

SERVICES = (
    explain_pb2.DESCRIPTOR.services_by_name["ExplainService"],
    evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"],
    models_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
RPCS = {rpc.name: rpc for service in SERVICES for rpc in service.methods}
INFERENCE = {rpc.name: rpc for rpc in oip.SERVICE.methods}
"""RPCs of the Open Inference Protocol; test_open_inference.py tests their fields."""

METHODS = {
    rpc.name: f"/{oip.known_as(service.full_name)}/{rpc.name}"
    for service in (*SERVICES, oip.SERVICE)
    for rpc in service.methods
}
MODELS = (
    "tiny=robustness.nets:tiny?size=32&labels={labels}",
    "parts=coloured:Colours?size=32",
    "finder=coloured:Finder?size=32",
    "named=coloured:named?size=32",
)
KEYS = {"Method": "samples", "Metric": "steps"}
"""A parameter of the method and of the metric in valid requests."""

WHOLE = {Kind.TYPE_UINT32, Kind.TYPE_INT32, Kind.TYPE_ENUM}
PARTED = {Kind.TYPE_FLOAT, Kind.TYPE_DOUBLE}
FLAGS = {Kind.TYPE_BOOL, Kind.TYPE_BYTES}
"""Types without limits of their own: any number on the wire is a valid flag; the message's size limits bytes."""


@dataclasses.dataclass(frozen=True)
class FieldPath:
    """A field and the path to it in a request.

    Attributes:
        rpc: name of the RPC.
        chain: the fields from the request's own to this one.
    """

    rpc: str
    chain: tuple[Kind, ...]

    @property
    def field(self):
        return self.chain[-1]

    @property
    def name(self):
        """The message's name and the field's, such as Rendering.alpha."""
        return self.field.full_name.removeprefix("camserve.v1.")

    @property
    def path(self):
        """The path as errors name it: a list without an index, and without the `request` of a stream's message."""
        parts = [_path_part(field) for field in self.chain[:-1]] + [self.field.name]
        if parts[0] == "request" and len(parts) > 1:
            parts = parts[1:]
        return ".".join(part for part in parts if part)

    @property
    def named(self):
        """The path as errors name it, for a value of a map without the field of the value's kind."""
        return self.path.removesuffix(f".{self.field.name}") if is_map_value(self) else self.path

    def __str__(self):
        return f"{self.rpc} {'.'.join(field.name for field in self.chain)}"


def is_map(field):
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def is_map_value(entry):
    return len(entry.chain) > 1 and is_map(entry.chain[-2])


def _path_part(field):
    if is_map(field):
        return f'{field.name}["{KEYS[field.containing_type.name]}"]'
    return f"{field.name}[0]" if field.is_repeated else field.name


def field_paths(rpc, kind=None, chain=()):
    """Yield the path of every field of an RPC's request and of the messages in it."""
    for field in (kind or RPCS[rpc].input_type).fields:
        longer = (*chain, field)
        yield FieldPath(rpc, longer)
        if is_map(field):
            yield from field_paths(rpc, field.message_type.fields_by_name["value"].message_type, longer)
        elif field.message_type is not None:
            yield from field_paths(rpc, field.message_type, longer)


ALL = [entry for rpc in RPCS for entry in field_paths(rpc)]
NUMBERS = [entry for entry in ALL if entry.field.type in WHOLE | PARTED and not entry.field.is_repeated]
TEXTS = [entry for entry in ALL if entry.field.type == Kind.TYPE_STRING and not entry.field.is_repeated]
LISTS = [entry for entry in ALL if entry.field.is_repeated]
KNOWN = WHOLE | PARTED | FLAGS | {Kind.TYPE_STRING, Kind.TYPE_MESSAGE}

with Image.open(PHOTOS["rocket"]) as rocket:
    PHOTO = jpeg(np.asarray(rocket.resize((320, 214))))
BOX = explain_pb2.Box(left=100, top=50, right=150, bottom=100)


def name(index):
    return explain_pb2.ClassName(class_index=index)


TARGETS = {
    "class_index": ("tiny", explain_pb2.Target(class_index=1)),
    "label": ("tiny", explain_pb2.Target(label="1")),
    "contrast": ("tiny", explain_pb2.Target(contrast=explain_pb2.Contrast(why=name(1), why_not=name(2)))),
    "finer": ("tiny", explain_pb2.Target(finer=explain_pb2.Finer(why=name(1), against=[name(2)]))),
    "similarity": ("tiny", explain_pb2.Target(similarity=explain_pb2.Similarity(image=PHOTO))),
    "text": ("named", explain_pb2.Target(text="a red square")),
    "segment": ("parts", explain_pb2.Target(segment=explain_pb2.Segment(class_name=name(1), region=BOX))),
    "detection": ("finder", explain_pb2.Target(detection=explain_pb2.Detection(class_name=name(1), box=BOX))),
    "softmax": ("tiny", explain_pb2.Target(class_index=1, softmax=True)),
}
"""A model and a valid target for each kind of target."""


def valid_request(entry):
    """Return a request in which all fields but this one are set and valid, so that only this field can be at fault."""
    request = message_factory.GetMessageClass(RPCS[entry.rpc].input_type)()
    part = {"request": "request", "explain": "explain"}.get(next(iter(request.DESCRIPTOR.fields_by_name), ""), "")
    if entry.rpc == "ExplainStream":
        request.request_id, part = "one", "request"
    inner = getattr(request, part) if part else request
    if "image" in inner.DESCRIPTOR.fields_by_name:
        inner.image = PHOTO
    _set_target(inner, entry)
    _set_intervention(inner, entry)
    _set_ranges(inner, {field.name for field in entry.chain})
    if entry.rpc == "ExtractFeatures":
        request.raw = True
        _set_components(request, {field.name for field in entry.chain})
    if entry.rpc in {"LoadModel", "UnloadModel"}:
        request.name = "tiny"
    named = [field.name for field in entry.chain]
    if "methods" in named:
        inner.methods.add(name="smoothgrad", parameters={KEYS["Method"]: explain_pb2.Parameter(number=2)})
    if "metrics" in named:
        request.metrics.add(name="deletion", parameters={KEYS["Metric"]: explain_pb2.Parameter(number=8)})
    if entry.rpc == "Evaluate" and named[0] == "box":
        request.box.CopyFrom(BOX)
    return request


def _set_components(request, names):
    """Ask for principal components if one of their fields is tested."""
    if names & {"fit_images", "basis", "foreground"}:
        request.rank = explain_pb2.CHANNEL_RANK_PCA
    if "basis" in names:
        channels = 4
        request.basis.mean = bytes(4 * channels)
        request.basis.vectors = bytes(4 * channels)
        request.basis.shares = bytes(4)
        request.basis.ranges = bytes(8)


def _set_target(request, entry):
    kind = next((field.name for field in entry.chain if field.full_name.startswith("camserve.v1.Target.")), None)
    if not kind:
        return
    request.model, target = TARGETS[kind]
    target_field = next(field for field in entry.chain if field.message_type and field.message_type.name == "Target")
    if target_field.is_repeated:
        request.targets.append(target)
    else:
        request.target.CopyFrom(target)
        for part, box in (("segment", "region"), ("detection", "box")):  # these RPCs accept targets without a box
            if kind == part and box not in [field.name for field in entry.chain]:
                getattr(request.target, part).ClearField(box)


def _set_ranges(request, names):
    if "value_range" in names:
        request.value_range.minimum, request.value_range.maximum = 0.5, 2
    if "window" in names:
        request.rendering.window.centre, request.rendering.window.width = 0, 1


def _set_intervention(request, entry):
    if "interventions" in [field.name for field in entry.chain]:
        request.interventions.add(layer="1", scale=0.5)


def put(request, entry, value):
    """Set the field to a value; return the request."""
    message = request
    for field in entry.chain[:-1]:
        inner = getattr(message, field.name)
        if is_map(field):
            message = inner[KEYS[field.containing_type.name]]
        elif field.is_repeated:
            message = inner[0] if inner else inner.add()
        else:
            message = inner
    setattr(message, entry.field.name, value)
    return request


def fill(request, entry, count, key="p"):
    """Put `count` elements into a list, or into a map under different keys; return the request."""
    message = request
    for field in entry.chain[:-1]:
        inner = getattr(message, field.name)
        message = (inner[0] if inner else inner.add()) if field.is_repeated else inner
    items = getattr(message, entry.field.name)
    if is_map(entry.field):
        for number in range(count):
            items[f"{key}{number}"].number = 1
    elif entry.field.type in WHOLE:
        items.extend(range(count))
    elif entry.field.message_type is None:
        names = [f"name{number}" for number in range(count)]
        items.extend([name.encode() for name in names] if entry.field.type == Kind.TYPE_BYTES else names)
    else:
        items.extend([items[0] if items else items.add()] * count)
    return request


def values(entry, cap):
    """Yield the test values of a numeric field, each with a label."""
    if entry.field.type in PARTED:
        beyond = math.nextafter(cap, math.inf) if entry.field.type == Kind.TYPE_DOUBLE else cap * (1 + 1e-6)
        yield from {"-1": -1, "0": 0, "cap + 1": cap + 1, "just beyond the cap": beyond}.items()
        yield from {"2^31 - 1": 2**31 - 1, "NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}.items()
        return
    # Unsigned fields have no -1: the wire turns it into the largest value.
    yield "-1", 2**32 - 1 if entry.field.type == Kind.TYPE_UINT32 else -1
    yield from {"0": 0, "cap + 1": cap + 1, "2^31 - 1": 2**31 - 1}.items()


def texts(message):
    """Return every text in a message."""
    result = []
    for field, value in message.ListFields():
        items = [value]
        if is_map(field):
            items = [*value, *value.values()]
        elif field.is_repeated:
            items = list(value)
        for item in items[:100]:
            result += [item] if isinstance(item, str) else texts(item) if hasattr(item, "ListFields") else []
    return result
