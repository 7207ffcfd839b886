"""Makes the corpus: of many mutants the shortest that is answered in each way; `python -m robustness.make_corpus`.

What was ever answered wrongly belongs in it too, by hand: files in `images` have any name, those in `messages` begin
with their RPC and a dash.
"""

import re
import sys

import grpc

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from robustness import fields, fuzz_them, mutants, nets
from support import serving

COUNT = 20_000
LONGEST = 3000  # bytes


def shape_of(words):
    """Return what an answer says without what it is about."""
    return re.sub(r'"[^"]*"|[\d,.]+', "#", words)


def of_image(data):
    """Return the way in which an image is answered."""
    magic = next((kind for kind, known in images._MAGIC.items() if known.match(data)), "")
    try:
        size = images.decode(data, Limits()).shape
    except InvalidArgument as error:
        return magic, shape_of(error.message), len(data).bit_length()
    return magic, size, len(data).bit_length()


def of_message(line, rpc, data):
    """Return the way in which a message is answered."""
    try:
        if rpc == "ExplainStream":
            (*_, last) = line.stream_stream(fields.METHODS[rpc])(iter([data]), timeout=30)
            return rpc, shape_of(str(fuzz_them.explain_pb2.ExplainStreamResponse.FromString(last).error.message))
        line.unary_unary(fields.METHODS[rpc])(data, timeout=30)
    except grpc.RpcError as error:
        return rpc, error.code().name, shape_of(error.details())
    return rpc, "OK", ""


def keep(into, key, data):
    """Keep the shortest of each kind."""
    if len(data) <= LONGEST and len(data) < len(into.get(key, b" " * (LONGEST + 1))):
        into[key] = data


def written(folder, names):
    """Write files into an empty folder; return their bytes in all."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in names.items():
        (folder / name).write_bytes(data)
    return sum(map(len, names.values()))


def main():
    pictures, messages = {}, {}
    for data in [*mutants.photos().values(), *mutants.images(COUNT)]:
        keep(pictures, of_image(data), data)
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, max_request_rows=fuzz_them.ROWS) as served,
        grpc.insecure_channel(served.address) as line,
    ):
        for rpc, data in [*mutants.requests(), *mutants.messages(COUNT)]:
            keep(messages, of_message(line, rpc, data), data)
    size = written(fuzz_them.CORPUS / "images", {f"{n:03}": one for n, one in enumerate(pictures.values())})
    names = {f"{key[0]}-{n:03}": one for n, (key, one) in enumerate(messages.items())}
    size += written(fuzz_them.CORPUS / "messages", names)
    sys.stdout.write(f"{len(pictures)} images and {len(messages)} messages: {size:,} bytes\n")


if __name__ == "__main__":
    main()
