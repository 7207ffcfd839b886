"""Send mutated images and messages to a server in this process; print the status codes, the faults and the memory.

Arguments: the number of images, the number of messages, and names of faults. For each fault, the decoder is given that
fault and a few images are sent again.
"""

import hashlib
import json
import logging
import os
import sys
import threading
from collections import Counter, deque
from pathlib import Path

import grpc
import torch
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from camserve.v1 import explain_pb2
from camserve_server.imaging import images
from robustness import error_checks, fields, mutations, nets, process_audit
from support import serving

CORPUS = Path(__file__).parent / "corpus"
ROWS = 256
IN_FLIGHT = 8  # requests at a time
ALLOWED = {"OK", "INVALID_ARGUMENT"}
OTHER_NAME = {"NOT_FOUND", "FAILED_PRECONDITION"}
"""Codes allowed for messages, because a mutation may change a name or the index of a class."""


class Tally:
    """Counts of the status codes, and the responses that are wrong."""

    def __init__(self, allowed):
        self.allowed, self.codes, self.bad = allowed, Counter(), []

    def add(self, number, code, wrong):
        """Count one response."""
        self.codes[code] += 1
        if code not in self.allowed or wrong:
            self.bad.append((number, code, *wrong))

    @property
    def summary(self):
        return {"codes": self.codes, "bad": self.bad[:10], "count": self.codes.total()}


def tally(send, channel, inputs, allowed):
    """Send all inputs; return the summary of the responses."""
    responses = Tally(allowed)
    for response in send(channel, inputs):
        responses.add(*response)
    return responses.summary


def send_images(channel, files):
    """Send files, each with its model, through one stream; yield each one's number, status code and faults."""
    free = threading.Semaphore(IN_FLIGHT)

    def requests():
        for number, (model, image) in enumerate(files):
            free.acquire()
            yield explain_pb2.ExplainStreamRequest(request_id=str(number), request={"model": model, "image": image})

    call = channel.stream_stream(
        fields.METHODS["ExplainStream"],
        explain_pb2.ExplainStreamRequest.SerializeToString,
        explain_pb2.ExplainStreamResponse.FromString,
    )
    for reply in call(requests()):
        free.release()
        code = code_pb2.Code.Name(reply.error.code) if reply.HasField("error") else "OK"
        wrong = error_checks.leaks(reply.error.message)
        names_image = [violation.field for violation in reply.error.fields] in ([], ["image"])
        yield int(reply.request_id), code, wrong + ["another field is named"] * (not names_image)


def send_messages(channel, messages):
    """Send messages, a few at a time; yield each one's number, status code and faults."""
    waiting = deque()
    for number, (rpc, data) in enumerate(messages):
        if rpc == "ExplainStream":
            yield number, *send_stream(channel, data)
            continue
        if len(waiting) == IN_FLIGHT:
            yield response_of(*waiting.popleft())
        waiting.append((number, start_call(channel, rpc, data), data))
    while waiting:
        yield response_of(*waiting.popleft())


def send_stream(channel, data):
    """Send a message as the only one of a stream; return the last response's status code and faults."""
    sent = texts_of(data)
    try:
        last = list(channel.stream_stream(fields.METHODS["ExplainStream"])(iter([data])))[-1]
    except grpc.RpcError as error:
        return error.code().name, error_checks.faults(error, sent)
    reply = explain_pb2.ExplainStreamResponse.FromString(last)
    code = code_pb2.Code.Name(reply.error.code) if reply.HasField("error") else "OK"
    return code, error_checks.leaks(reply.error.message, sent)


def start_call(channel, rpc, data):
    return channel.unary_unary(fields.METHODS[rpc]).future(data)


def response_of(number, call, data):
    """Wait for a response; return its number, status code and faults."""
    error = call.exception()
    if error is None:
        return number, "OK", []
    return number, error.code().name, error_checks.faults(error, texts_of(data))


def texts_of(data):
    """Return the texts of every message type that these bytes can be parsed as."""
    texts = []
    for kind in {rpc.input_type for rpc in (fields.RPCS | fields.INFERENCE).values()}:
        message = message_factory.GetMessageClass(kind)()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        texts += fields.texts(message)
    return texts


FAULTS = {
    "crash": os.abort,
    "leak": lambda: LEAKED.append(b"x" * (40 << 20)),
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("/usr/lib/libpng.so: no such row")),
}
LEAKED = []


def plant(fault):
    """Give the decoder a fault that shows at about one image in sixteen."""
    decode_image = images.decode

    def decode(data, *args, **options):
        if hashlib.sha256(data).digest()[0] < 16:
            FAULTS[fault]()
        return decode_image(data, *args, **options)

    images.decode = decode


def corpus():
    """Return the images, each with its model, and the messages of the corpus, each with its RPC."""
    folders = [sorted((CORPUS / name).iterdir()) for name in ("images", "messages")]
    return tuple([(path.name.partition("-")[0], path.read_bytes()) for path in paths] for paths in folders)


def open_server():
    """Start a server with the models of the mutants."""
    return serving(models=(nets.TINY, *nets.OTHERS), device="cpu", threads=1, max_request_rows=ROWS)


def send_with_fault(fault, count):
    """Send images to a server whose decoder has a fault; return the summary of the responses."""
    plant(fault)
    with open_server() as served, grpc.insecure_channel(served.address) as channel:
        return tally(send_images, channel, mutations.images(count), ALLOWED)


def main(count_images, count_messages, *faults):
    torch.set_num_threads(1)
    logging.getLogger("camserve_server").addHandler(logging.NullHandler())
    seed = int(os.environ.get("FUZZ_SEED", "0"))
    pictures = list(mutations.images(count_images, seed + 1))
    messages = list(mutations.messages(count_messages, seed + 2))
    kept_images, kept_messages = corpus()
    with (
        open_server() as served,
        grpc.insecure_channel(served.address) as channel,
    ):
        list(send_images(channel, mutations.valid_images() * 2))
        list(send_messages(channel, mutations.requests()))
        summaries, cost = {}, {}
        with process_audit.measure_memory(cost):
            summaries["kept images"] = tally(send_images, channel, kept_images, ALLOWED)
            summaries["kept messages"] = tally(send_messages, channel, kept_messages, ALLOWED | OTHER_NAME)
            summaries["images"] = tally(send_images, channel, pictures, ALLOWED)
            summaries["messages"] = tally(send_messages, channel, messages, ALLOWED | OTHER_NAME)
        for fault in faults:
            with process_audit.measure_memory(fault_cost := {}):
                decode_image = images.decode
                plant(fault)
                summaries[fault] = tally(send_images, channel, pictures[:60], ALLOWED)
                images.decode = decode_image
            summaries[fault] |= fault_cost
        summaries["after"] = tally(send_images, channel, [("tiny", mutations.photos()["png"])], {"OK"})
    sys.stdout.write(json.dumps(summaries | cost) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
