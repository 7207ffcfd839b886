"""Make the corpus with `python -m robustness.make_corpus`: for each kind of response, the shortest of many mutants.

Inputs that once got a wrong response are added by hand. Files in `images` may have any name; those in `messages` begin
with their RPC and a dash.
"""

import re
import sys

import grpc

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from robustness import fields, fuzzing, mutations, nets
from support import serving

COUNT = 20_000
MAX_INPUT = 3000  # bytes


def pattern_of(text):
    """Return an error message with its quoted texts and numbers replaced."""
    return re.sub(r'"[^"]*"|[\d,.]+', "#", text)


def image_outcome(data):
    """Return the kind of response that an image gets."""
    magic = next((kind for kind, known in images._MAGIC.items() if known.match(data)), "")
    try:
        size = images.decode(data, Limits()).shape
    except InvalidArgument as error:
        return magic, pattern_of(error.message), len(data).bit_length()
    return magic, size, len(data).bit_length()


def message_outcome(channel, rpc, data):
    """Return the kind of response that a message gets."""
    try:
        if rpc == "ExplainStream":
            (*_, last) = channel.stream_stream(fields.METHODS[rpc])(iter([data]), timeout=30)
            return rpc, pattern_of(str(fuzzing.explain_pb2.ExplainStreamResponse.FromString(last).error.message))
        channel.unary_unary(fields.METHODS[rpc])(data, timeout=30)
    except grpc.RpcError as error:
        return rpc, error.code().name, pattern_of(error.details())
    return rpc, "OK", ""


def keep(into, key, data):
    """Keep the shortest input of each kind."""
    if len(data) <= MAX_INPUT and len(data) < len(into.get(key, b" " * (MAX_INPUT + 1))):
        into[key] = data


def write_files(folder, names):
    """Replace the files of a folder; return the sum of their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in names.items():
        (folder / name).write_bytes(data)
    return sum(map(len, names.values()))


def main():
    pictures, messages = {}, {}
    for data in [*mutations.photos().values(), *mutations.images(COUNT)]:
        keep(pictures, image_outcome(data), data)
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, max_request_rows=fuzzing.ROWS) as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        for rpc, data in [*mutations.requests(), *mutations.messages(COUNT)]:
            keep(messages, message_outcome(channel, rpc, data), data)
    size = write_files(fuzzing.CORPUS / "images", {f"{n:03}": data for n, data in enumerate(pictures.values())})
    names = {f"{key[0]}-{n:03}": data for n, (key, data) in enumerate(messages.items())}
    size += write_files(fuzzing.CORPUS / "messages", names)
    sys.stdout.write(f"{len(pictures)} images and {len(messages)} messages: {size:,} bytes\n")


if __name__ == "__main__":
    main()
