"""Generate the OpenAPI document of HTTP/JSON from the protos and their comments; `--check` compares it instead.

It runs in the environment of `make protos`, which has the compiler.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "service/camserve_server/api/http/openapi.json"
FILES = ("models.proto", "explain.proto", "evaluate.proto")
DESCRIPTION = """Explanations of vision models: an image goes in, and heatmaps of why the model answered so come out.

The messages are those of the gRPC services in protobuf's JSON mapping: names in lowerCamelCase (snake_case is \
accepted too), bytes in base64, 64-bit integers as strings. The calls follow the Connect protocol, <https://connectrpc.com>."""

Json: TypeAlias = dict[str, Any]
Path_: TypeAlias = tuple[int, ...]

# Numbers of fields in descriptor.proto, from which the paths of comments are made.
MESSAGE, ENUM, SERVICE, FIELD, VALUE, RPC = 4, 5, 6, 2, 2, 2
NUMBERS = {"INT32": (-(2**31), 2**31 - 1), "UINT32": (0, 2**32 - 1)}
LONG_NUMBERS = {"INT64": "int64", "UINT64": "uint64"}
SPECIAL_NUMBERS = ["NaN", "Infinity", "-Infinity"]
CODES = [
    "canceled",
    "unknown",
    "invalid_argument",
    "deadline_exceeded",
    "not_found",
    "already_exists",
    "permission_denied",
    "resource_exhausted",
    "failed_precondition",
    "aborted",
    "out_of_range",
    "unimplemented",
    "internal",
    "unavailable",
    "data_loss",
    "unauthenticated",
]
STREAM = (
    "The replies, each on a line of its own. If the stream itself fails after a reply, the last line is"
    ' `{"streamError": …}` with an error'
)
PICTURES = ("image/jpeg", "image/png", "image/webp")


def document() -> Json:
    """Return the document."""
    files = [file for file in _compile().file if file.name.endswith(FILES)]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "camserve",
            "version": "1",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"token": []}],
        "tags": [tag for file in files for tag in _tags(file)],
        "paths": dict(path for file in files for path in _paths(file)) | {"/health": {"get": _HEALTH}},
        "components": {
            "schemas": dict(sorted(schema for file in files for schema in _schemas(file))) | {"Error": _ERROR},
            "parameters": _PARAMETERS,
            "responses": {"Error": _ERROR_RESPONSE},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _compile() -> descriptor_pb2.FileDescriptorSet:
    with tempfile.NamedTemporaryFile() as out:
        flags = ("-Iprotos", "--include_source_info", "--include_imports", f"--descriptor_set_out={out.name}")
        names = [f"protos/camserve/v1/{name}" for name in FILES]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *names], check=True, cwd=ROOT)  # noqa: S603 -- our own files
        return descriptor_pb2.FileDescriptorSet.FromString(out.read())


def _comments(file: FileDescriptorProto) -> dict[Path_, str]:
    """Return the comments of a file by the paths of what they describe, with one line for each paragraph."""
    return {tuple(each.path): _unwrapped(each.leading_comments) for each in file.source_code_info.location}


def _unwrapped(comment: str) -> str:
    paragraphs = comment.replace("\n   -", "\n\n-").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _tags(file: FileDescriptorProto) -> Iterator[Json]:
    comments = _comments(file)
    for index, service in enumerate(file.service):
        yield {"name": service.name, "description": comments[SERVICE, index]}


def _paths(file: FileDescriptorProto) -> Iterator[tuple[str, Json]]:
    comments = _comments(file)
    for index, service in enumerate(file.service):
        for number, rpc in enumerate(service.method):
            operation = {
                "operationId": rpc.name,
                "tags": [service.name],
                "description": comments[SERVICE, index, RPC, number],
                "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS],
                "requestBody": {"required": True, "content": _content(rpc.input_type, stream=rpc.client_streaming)},
                "responses": {"200": _reply(rpc), "default": {"$ref": "#/components/responses/Error"}},
            }
            yield f"/{file.package}.{service.name}/{rpc.name}", {"post": operation}


def _content(type_name: str, *, stream: bool) -> Json:
    return {"application/x-ndjson" if stream else "application/json": {"schema": _reference(type_name)}}


def _reply(rpc: descriptor_pb2.MethodDescriptorProto) -> Json:
    content = _content(rpc.output_type, stream=rpc.server_streaming)
    if rpc.name == "Explain":
        content |= {name: {} for name in PICTURES}
    kind = STREAM if rpc.server_streaming else "The reply"
    pictures = "; with the header Accept: image/jpeg, the first overlay itself" if rpc.name == "Explain" else ""
    return {"description": f"{kind}{pictures}.", "content": content}


def _schemas(file: FileDescriptorProto) -> Iterator[tuple[str, Json]]:
    comments = _comments(file)
    for index, enum in enumerate(file.enum_type):
        values = [
            f"- `{value.name}`: {comments.get((ENUM, index, VALUE, number), '')}"
            for number, value in enumerate(enum.value)
        ]
        description = "\n".join([comments[ENUM, index], "", *values])
        names = [value.name for value in enum.value]
        yield f"{file.package}.{enum.name}", {"type": "string", "description": description, "enum": names}
    for index, message in enumerate(file.message_type):
        path = (MESSAGE, index)
        yield f"{file.package}.{message.name}", _message(message, path, comments)


def _message(message: DescriptorProto, path: Path_, comments: dict[Path_, str]) -> Json:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    properties = {
        field.json_name: _field(field, maps)
        | {"description": _description(message, field, comments[*path, FIELD, index])}
        for index, field in enumerate(message.field)
    }
    return {
        "type": "object",
        "description": comments[path],
        "properties": properties,
        "additionalProperties": False,
    }


def _description(message: DescriptorProto, field: FieldDescriptorProto, comment: str) -> str:
    """Return the comment of a field, and the fields that cannot be set together with it."""
    if not field.HasField("oneof_index") or field.proto3_optional:
        return comment
    others = [
        f"`{each.json_name}`"
        for each in message.field
        if each.HasField("oneof_index") and each.oneof_index == field.oneof_index and each is not field
    ]
    names = [name for name in others if name != f"`{field.json_name}`"]
    return f"{comment}\n\nAt most one of this and {', '.join(names)} may be set."


def _field(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> Json:
    entry = maps.get(field.type_name.rpartition(".")[2])
    if entry:
        return {"type": "object", "additionalProperties": _value(entry.field[1])}
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return {"type": "array", "items": _value(field)}
    return _value(field)


def _value(field: FieldDescriptorProto) -> Json:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_")
    if kind in ("MESSAGE", "ENUM"):
        return _reference(field.type_name)
    if kind in NUMBERS:
        least, greatest = NUMBERS[kind]
        return {"type": "integer", "minimum": least, "maximum": greatest}
    if kind in LONG_NUMBERS:
        return {"type": ["string", "integer"], "format": LONG_NUMBERS[kind]}
    simple: dict[str, Json] = {
        "FLOAT": {"anyOf": [{"type": "number"}, {"enum": SPECIAL_NUMBERS}]},
        "DOUBLE": {"anyOf": [{"type": "number"}, {"enum": SPECIAL_NUMBERS}]},
        "BOOL": {"type": "boolean"},
        "STRING": {"type": "string"},
        "BYTES": {"type": "string", "contentEncoding": "base64"},
    }
    return simple[kind]


def _reference(type_name: str) -> Json:
    return {"$ref": f"#/components/schemas/{type_name.strip('.')}"}


def _parameter(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_PARAMETERS = {
    "Timeout": _parameter(
        "Connect-Timeout-Ms", "Milliseconds after which the call is cancelled.", {"type": "integer", "minimum": 0}
    ),
    "RequestId": _parameter(
        "X-Request-Id", "Id of the request in the server's log. Default: a random one.", {"type": "string"}
    ),
}
_ERROR: Json = {
    "type": "object",
    "description": "An error of a call, as in the Connect protocol.",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "enum": CODES},
        "message": {"type": "string"},
        "details": {
            "type": "array",
            "description": "Details: the id of the request, the field at fault, and the state of the server.",
            "items": {
                "type": "object",
                "required": ["type", "value"],
                "properties": {
                    "type": {"type": "string", "description": "Name of the message, such as google.rpc.BadRequest."},
                    "value": {"type": "string", "description": "The serialized message in base64, without padding."},
                    "debug": {"type": "object", "description": "The message as JSON."},
                },
            },
        },
    },
}
_ERROR_RESPONSE: Json = {
    "description": "The call failed.",
    "headers": {"Retry-After": {"description": "Seconds after which to try again.", "schema": {"type": "integer"}}},
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_STATUS: Json = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string", "enum": ["SERVING", "NOT_SERVING"]}},
}
_HEALTH: Json = {
    "operationId": "Health",
    "description": "Tells whether the server can explain images.",
    "security": [{}],
    "responses": {
        code: {"description": text, "content": {"application/json": {"schema": _STATUS}}}
        for code, text in (("200", "It can."), ("503", "It cannot now."))
    },
}


def main(arguments: Iterable[str]) -> int:
    """Write the document, or compare it with the file; return the exit code."""
    text = json.dumps(document(), indent=1, ensure_ascii=False) + "\n"
    if "--check" not in arguments:
        DOCUMENT.write_text(text, encoding="utf-8")
        return 0
    if DOCUMENT.exists() and DOCUMENT.read_text(encoding="utf-8") == text:
        return 0
    print(f"{DOCUMENT.relative_to(ROOT)} does not match protos/: run 'make protos'")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
