"""The service by the name that it has on the wire, which is not that of its messages in this process.

Protobuf knows a message by its full name, once in a process. So that tritonclient's `inference.ModelInferRequest` finds
room beside ours, ours is called `open_inference.v2.ModelInferRequest`. Names of messages are never sent, but by
reflection.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor

from camserve_server.api.oip.v2 import inference_pb2

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
"""What the RPCs are."""

NAME = f"inference.{SERVICE.name}"
"""What the service is called on the wire."""

NAMES = {rpc.name: f"{NAME}/{rpc.name}" for rpc in SERVICE.methods}
"""The full names of the RPCs, by their own."""

_OWN, _THEIRS = f"{inference_pb2.DESCRIPTOR.package}.", "inference."


def known_as(name: str) -> str:
    """Return the name by which callers know a message or service of ours; that of any other as it is."""
    return _THEIRS + name.removeprefix(_OWN) if name.startswith(_OWN) else name


def own_name(name: str) -> str:
    """Return the name that one of the wire has in this process; that of any other as it is."""
    return _OWN + name.removeprefix(_THEIRS) if name.startswith(_THEIRS) else name


def add_to_server(servicer: object, server: grpc.aio.Server) -> None:
    """Let a server answer the RPCs by the methods of a servicer that have their names."""
    handlers = {rpc.name: _handler(rpc, getattr(servicer, rpc.name)) for rpc in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)  # as generated code does


def _handler(rpc: MethodDescriptor, answer: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    make = grpc.stream_stream_rpc_method_handler if rpc.client_streaming else grpc.unary_unary_rpc_method_handler
    asked, answered = map(message_factory.GetMessageClass, (rpc.input_type, rpc.output_type))
    return make(answer, request_deserializer=asked.FromString, response_serializer=answered.SerializeToString)


def pool_of(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Return descriptors for reflection: of these services, and of this one by its name on the wire."""
    pool, added = descriptor_pool.DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for other in file.dependencies:
                add(other)
            pool.AddSerializedFile(file.serialized_pb)

    for service in services:
        add(descriptor_pool.Default().FindFileContainingSymbol(service))
    pool.AddSerializedFile(_renamed().SerializeToString())
    return pool


def _renamed() -> descriptor_pb2.FileDescriptorProto:
    ours = descriptor_pb2.FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(ours)
    text = text_format.MessageToString(ours).replace(_OWN, _THEIRS)
    theirs = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    theirs.name, theirs.package = "inference.proto", _THEIRS.rstrip(".")
    return theirs
