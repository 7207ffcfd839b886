"""Names of the service on the wire, which differ from the names of its messages in this process.

Protobuf registers each full name of a message only once in a process. tritonclient registers the name
`inference.ModelInferRequest`, so the message here is called `open_inference.v2.ModelInferRequest`. Only reflection
sends the names of messages.
"""

import functools
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor

from camserve_server.api.oip.v2 import inference_pb2

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
"""Descriptor of the service, with its RPCs."""

NAME = f"inference.{SERVICE.name}"
"""Full name of the service on the wire."""

NAMES = {rpc.name: f"{NAME}/{rpc.name}" for rpc in SERVICE.methods}
"""Full names of the RPCs on the wire by their short names."""

_LOCAL_PREFIX, _WIRE_PREFIX = f"{inference_pb2.DESCRIPTOR.package}.", "inference."


def known_as(name: str) -> str:
    """Return the name on the wire of a message or service of this process; other names stay as they are."""
    return _WIRE_PREFIX + name.removeprefix(_LOCAL_PREFIX) if name.startswith(_LOCAL_PREFIX) else name


def own_name(name: str) -> str:
    """Return the name in this process of a message or service on the wire; other names stay as they are."""
    return _LOCAL_PREFIX + name.removeprefix(_WIRE_PREFIX) if name.startswith(_WIRE_PREFIX) else name


def add_to_server(servicer: object, server: grpc.aio.Server) -> None:
    """Add the methods of a servicer that have the names of the RPCs to a server."""
    handlers = {rpc.name: _handler(rpc, getattr(servicer, rpc.name)) for rpc in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    server.add_registered_method_handlers(NAME, handlers)  # as generated code does


def _handler(rpc: MethodDescriptor, answer: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    make = grpc.stream_stream_rpc_method_handler if rpc.client_streaming else grpc.unary_unary_rpc_method_handler
    request, response = map(message_factory.GetMessageClass, (rpc.input_type, rpc.output_type))
    return make(answer, request_deserializer=request.FromString, response_serializer=response.SerializeToString)


def pool_of(services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Return the descriptors for reflection: those of some services, and of this one by its name on the wire."""
    pool, added = descriptor_pool.DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            pool.AddSerializedFile(file.serialized_pb)

    for service in services:
        add(descriptor_pool.Default().FindFileContainingSymbol(service))
    pool.AddSerializedFile(_wire_file())
    return pool


@functools.cache  # 0.05 s: half of what a server with a small model computes until it serves
def _wire_file() -> bytes:
    """Return the serialized descriptor of the file with the names on the wire."""
    local = descriptor_pb2.FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(local)
    text = text_format.MessageToString(local).replace(_LOCAL_PREFIX, _WIRE_PREFIX)
    wire = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    wire.name, wire.package = "inference.proto", _WIRE_PREFIX.rstrip(".")
    return wire.SerializeToString()
