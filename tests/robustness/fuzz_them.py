"""Sends what chance made of images and messages to a server in its process; says what came of it, and what it cost.

The names of faults may follow: then a few images are sent again while the server has each of them.
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
from robustness import fields, hygiene, mutants, nets, watched
from support import serving

CORPUS = Path(__file__).parent / "corpus"
ROWS = 256
TOGETHER = 8
ALLOWED = {"OK", "INVALID_ARGUMENT"}
NAMES_ANOTHER = {"NOT_FOUND", "FAILED_PRECONDITION"}
"""What a message may be answered with whose names, or numbers of classes, became others by chance."""


class Record:
    """What came of what was sent."""

    def __init__(self, allowed):
        self.allowed, self.codes, self.bad = allowed, Counter(), []

    def add(self, number, code, wrong):
        """Record one answer."""
        self.codes[code] += 1
        if code not in self.allowed or wrong:
            self.bad.append((number, code, *wrong))

    @property
    def told(self):
        return {"codes": self.codes, "bad": self.bad[:10], "count": self.codes.total()}


def tried(send, line, sent, allowed):
    """Send all, and return what came of it."""
    record = Record(allowed)
    for answer in send(line, sent):
        record.add(*answer)
    return record.told


def send_images(line, data):
    """Send images through one stream, some at a time; yield for each its number, status and what is wrong."""
    free = threading.Semaphore(TOGETHER)

    def ask():
        for number, image in enumerate(data):
            free.acquire()
            yield explain_pb2.ExplainStreamRequest(request_id=str(number), request={"image": image})

    call = line.stream_stream(
        fields.METHODS["ExplainStream"],
        explain_pb2.ExplainStreamRequest.SerializeToString,
        explain_pb2.ExplainStreamResponse.FromString,
    )
    for reply in call(ask()):
        free.release()
        code = code_pb2.Code.Name(reply.error.code) if reply.HasField("error") else "OK"
        wrong = hygiene.told(reply.error.message)
        named = [one.field for one in reply.error.fields] in ([], ["image"])
        yield int(reply.request_id), code, wrong + ["another field is named"] * (not named)


def send_messages(line, messages):
    """Send messages, some at a time; yield for each its number, status and what is wrong."""
    waiting = deque()
    for number, (rpc, data) in enumerate(messages):
        if rpc == "ExplainStream":
            yield number, *item_of(line, data)
            continue
        if len(waiting) == TOGETHER:
            yield answer_of(*waiting.popleft())
        waiting.append((number, called(line, rpc, data), data))
    while waiting:
        yield answer_of(*waiting.popleft())


def item_of(line, data):
    """Send a message as the only one of a stream; return the last answer's status and what is wrong."""
    sent = said(data)
    try:
        last = list(line.stream_stream(fields.METHODS["ExplainStream"])(iter([data]), timeout=60))[-1]
    except grpc.RpcError as error:
        return error.code().name, hygiene.faults(error, sent)
    reply = explain_pb2.ExplainStreamResponse.FromString(last)
    code = code_pb2.Code.Name(reply.error.code) if reply.HasField("error") else "OK"
    return code, hygiene.told(reply.error.message, sent)


def called(line, rpc, data):
    return line.unary_unary(fields.METHODS[rpc]).future(data, timeout=60)


def answer_of(number, call, data):
    """Wait for an answer; return its number, status and what is wrong."""
    error = call.exception()
    if error is None:
        return number, "OK", []
    return number, error.code().name, hygiene.faults(error, said(data))


def said(data):
    """Return the texts of a message, as far as it is one."""
    found = []
    for kind in {rpc.input_type for rpc in (fields.RPCS | fields.INFERENCE).values()}:
        message = message_factory.GetMessageClass(kind)()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        found += fields.texts(message)
    return found


FAULTS = {
    "crash": os.abort,
    "leak": lambda: LEAKED.append(b"x" * (40 << 20)),
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("/usr/lib/libpng.so: no such row")),
}
LEAKED = []


def plant(fault):
    """Have the decoder fail at one image in sixteen or so, as it must never do."""
    honest = images.decode

    def decode(data, limits):
        if hashlib.sha256(data).digest()[0] < 16:
            FAULTS[fault]()
        return honest(data, limits)

    images.decode = decode


def corpus():
    """Return the kept images, and the kept messages each with its RPC."""
    kept = [path.read_bytes() for path in sorted((CORPUS / "images").iterdir())]
    return kept, [(path.name.partition("-")[0], path.read_bytes()) for path in sorted((CORPUS / "messages").iterdir())]


def main(count_images, count_messages, *faults):
    torch.set_num_threads(1)
    logging.getLogger("camserve_server").addHandler(logging.NullHandler())
    pictures, messages = list(mutants.images(count_images)), list(mutants.messages(count_messages))
    kept_images, kept_messages = corpus()
    with (
        serving(models=(nets.TINY,), device="cpu", threads=1, max_request_rows=ROWS) as served,
        grpc.insecure_channel(served.address) as line,
    ):
        list(send_images(line, list(mutants.photos().values()) * 10))
        list(send_messages(line, mutants.requests() * 5))
        told, cost = {}, {}
        with watched.measured(cost):
            told["kept images"] = tried(send_images, line, kept_images, ALLOWED)
            told["kept messages"] = tried(send_messages, line, kept_messages, ALLOWED | NAMES_ANOTHER)
            told["images"] = tried(send_images, line, pictures, ALLOWED)
            told["messages"] = tried(send_messages, line, messages, ALLOWED | NAMES_ANOTHER)
        for fault in faults:
            with watched.measured(its := {}):
                honest = images.decode
                plant(fault)
                told[fault] = tried(send_images, line, pictures[:150], ALLOWED)
                images.decode = honest
            told[fault] |= its
        told["after"] = tried(send_images, line, [mutants.photos()["png"]], {"OK"})
    sys.stdout.write(json.dumps(told | cost) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
