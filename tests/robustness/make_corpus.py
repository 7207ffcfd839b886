"""Extend the corpus with `python -m robustness.make_corpus`: for new kinds of response, the shortest of many mutants.

Inputs that once got a wrong response are added by hand. The names of files in `images` begin with their model and a
dash, those in `messages` with their RPC.
"""

import re
import sys

import grpc

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import headers, images
from robustness import fields, fuzzing, mutations, raster_files

COUNT = 20_000
MAX_INPUT = 2000  # bytes


def pattern_of(text):
    """Return an error message with its quoted texts and numbers replaced."""
    return re.sub(r'"[^"]*"|[\d,.]+', "#", text)


def image_outcome(model, data):
    """Return the kind of response that an image gets."""
    magic = next((kind for kind, known in headers._MAGIC.items() if known.match(data)), "")
    try:
        photo = images.decode(data, Limits(), raster_files.CHANNELS[model])
    except InvalidArgument as error:
        return model, magic, pattern_of(error.message)
    return model, magic, photo.dtype.name, photo.shape[2]


def message_outcome(channel, rpc, data):
    """Return the kind of response that a message gets."""
    try:
        if rpc == "ExplainStream":
            (*_, last) = channel.stream_stream(fields.METHODS[rpc])(iter([data]))
            return rpc, pattern_of(str(fuzzing.explain_pb2.ExplainStreamResponse.FromString(last).error.message))
        channel.unary_unary(fields.METHODS[rpc])(data)
    except grpc.RpcError as error:
        return rpc, error.code().name, pattern_of(error.details())
    return rpc, "OK", ""


def shortest(known, outcomes):
    """Return the shortest of the inputs of each kind that is not known, from pairs of a kind and an input."""
    found = {}
    for key, data in outcomes:
        if key not in known and len(data) <= min(MAX_INPUT, len(found.get(key, b" " * MAX_INPUT))):
            found[key] = data
    return found


def add_files(folder, found):
    """Add the inputs to a folder, numbered after its own; return the sum of their bytes."""
    start = 1 + max(int(path.name.rpartition("-")[2]) for path in folder.iterdir())
    for number, (key, data) in enumerate(found.items(), start):
        (folder / f"{key[0]}-{number:03}").write_bytes(data)
    return sum(map(len, found.values()))


def main():
    kept_images, kept_messages = fuzzing.corpus()
    known = {image_outcome(*image) for image in kept_images}
    mutants = [*mutations.valid_images(), *mutations.images(COUNT)]
    pictures = shortest(known, ((image_outcome(model, data), data) for model, data in mutants))
    with fuzzing.open_server() as served, grpc.insecure_channel(served.address) as channel:
        known = {message_outcome(channel, *message) for message in kept_messages}
        mutants = [*mutations.requests(), *mutations.messages(COUNT)]
        messages = shortest(known, ((message_outcome(channel, rpc, data), data) for rpc, data in mutants))
    size = add_files(fuzzing.CORPUS / "images", pictures) + add_files(fuzzing.CORPUS / "messages", messages)
    sys.stdout.write(f"{len(pictures)} images and {len(messages)} messages: {size:,} bytes\n")


if __name__ == "__main__":
    main()
