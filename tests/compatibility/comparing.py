"""Compare a later release with the records: report removals and changes, and allow additions."""

import io

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from PIL import Image

CLOSE = 1e-5
"""The tolerance of `camserve replay`, as a share of the largest value."""

LEVELS = 1.0
"""The largest mean difference of two pictures' values, 0 to 255: rounding can move a pixel to the next colour."""

IGNORED = {
    "request_id",
    "timing",
    "version",  # a model's number of loads, or the server's release
    "versions",
    "device",
}
"""Fields that differ between two calls, machines or releases."""

PROSE = {"message", "verdict_message", "summary", "formula", "reason", "description", "needs", "paper"}
"""Fields for people, whose wording may change."""

IMAGES = {"image", "overlay", "heatmap_image", "picture"}


def lost(record, now, path=""):
    """Return a line for each removal or change between two JSON values.

    An object may gain keys, and a list may gain items at its end. A set is written as an object with empty values.
    """
    if isinstance(record, dict) and isinstance(now, dict):
        gone = [f"{path}.{key}: gone" for key in record if key not in now]
        return gone + [line for key in record if key in now for line in lost(record[key], now[key], f"{path}.{key}")]
    if isinstance(record, list) and isinstance(now, list):
        gone = [f"{path}[{number}:]: gone"] if (number := len(now)) < len(record) else []
        pairs = enumerate(zip(record, now, strict=False))
        return gone + [line for at, (then, new) in pairs for line in lost(then, new, f"{path}[{at}]")]
    return [] if record == now else [f"{path}: {now!r}, and it was {record!r}"]


def close(then, now):
    """Return True if two arrays differ by no more than rounding."""
    then, now = (np.asarray(values, np.float64) for values in (then, now))
    if then.shape != now.shape or not np.array_equal(np.isnan(then), np.isnan(now)):
        return False
    largest = np.nanmax(np.abs(then), initial=0.0)
    return bool(np.nanmax(np.abs(then - now), initial=0.0) <= CLOSE * max(largest, np.finfo(np.float32).tiny))


def close_number(then, now):
    """Return True if two scores differ by no more than rounding. Near zero, float32 errs by as much as at one."""
    return bool(np.isclose(then, now, rtol=CLOSE, atol=CLOSE, equal_nan=True))


def same_picture(then, now):
    """Return True if two image files have the same format, size and, but for rounding, pixels."""
    if then == now:
        return True
    before, after = (Image.open(io.BytesIO(data)) for data in (then, now))
    if (before.format, before.size) != (after.format, after.size):
        return False
    before, after = (np.asarray(image.convert("RGB"), np.float64) for image in (before, after))
    return bool(np.abs(before - after).mean() <= LEVELS)


def differences(then, now, known, path=""):
    """Return a line for each field of a message that differs from the record.

    Args:
        then: The recorded message.
        now: The message to check.
        known: The recorded field names by message name; other fields are additions.
        path: The path of this message in the one that contains it.
    """
    lines = []
    for field in then.DESCRIPTOR.fields:
        if field.name not in known[then.DESCRIPTOR.full_name] or field.name in IGNORED | PROSE:
            continue
        if field.has_presence and then.HasField(field.name) != now.HasField(field.name):
            lines.append(f"{path}.{field.name}: {'gone' if then.HasField(field.name) else 'added'}")
        elif not field.has_presence or then.HasField(field.name):
            lines += _field(field, then, now, known, f"{path}.{field.name}")
    return lines


def _field(field, then, now, known, path):
    before, after = getattr(then, field.name), getattr(now, field.name)
    if field.name == "raw_output_contents":
        return [] if _same_tensors(then, now) else [f"{path}: other values"]
    if field.message_type and field.message_type.GetOptions().map_entry:
        return _map(field, before, after, known, path)
    if field.is_repeated:
        return _repeated(field, before, after, known, path)
    if field.message_type:
        return differences(before, after, known, path)
    return [] if _same(field, before, after, then) else [f"{path}: {_brief(after)}, and it was {_brief(before)}"]


def _map(field, before, after, known, path):
    value = field.message_type.fields_by_name["value"]
    lines = [f"{path}[{key}]: gone" for key in before if key not in after]
    for key in (key for key in before if key in after):
        if value.message_type:
            lines += differences(before[key], after[key], known, f"{path}[{key}]")
        elif before[key] != after[key]:
            lines.append(f"{path}[{key}]: {after[key]!r}, and it was {before[key]!r}")
    return lines


def _repeated(field, before, after, known, path):
    if not field.message_type:
        numbers = field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
        same = close(before, after) if numbers else list(after[: len(before)]) == list(before)
        return [] if same else [f"{path}: {_brief(list(after))}, and it was {_brief(list(before))}"]
    if "name" in field.message_type.fields_by_name and field.message_type.name != "Curve":
        by_name = {item.name: item for item in after}
        lines = [f"{path}[{item.name}]: gone" for item in before if item.name not in by_name]
        pairs = [(item.name, item, by_name[item.name]) for item in before if item.name in by_name]
    else:
        lines = [] if len(before) == len(after) else [f"{path}: {len(after)}, and there were {len(before)}"]
        pairs = [(at, *pair) for at, pair in enumerate(zip(before, after, strict=False))]
    return lines + [line for at, *pair in pairs for line in differences(*pair, known, f"{path}[{at}]")]


def _same(field, before, after, then):
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return close_number(before, after)
    if field.type != FieldDescriptor.TYPE_BYTES:
        return before == after
    if then.DESCRIPTOR.name == "Picture" or field.name in IMAGES:
        return same_picture(before, after)
    return len(before) == len(after) and close(np.frombuffer(before, "<f4"), np.frombuffer(after, "<f4"))


def _same_tensors(then, now):
    """Return True if two inferences have the same outputs."""
    if len(then.raw_output_contents) != len(now.raw_output_contents):
        return False
    for output, before, after in zip(then.outputs, then.raw_output_contents, now.raw_output_contents, strict=True):
        if output.name == "overlay":
            same = same_picture(before[4:], after[4:])  # the first four bytes are the length
        elif output.datatype == "FP32":
            same = close(np.frombuffer(before, "<f4"), np.frombuffer(after, "<f4"))
        else:
            same = before == after
        if not same:
            return False
    return True


def _brief(value):
    return repr(value)[:80]
