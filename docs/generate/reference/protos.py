"""The protocol, from the .proto files and their comments, which buf compiles."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

from reference.markdown import code, joined, table

ROOT = Path(__file__).parents[3]
FILES = ("explain.proto", "models.proto", "evaluate.proto")
Comments = Mapping[tuple[int, ...], str]

# Numbers of fields in descriptor.proto, from which the paths of comments are made.
SYNTAX, MESSAGE, ENUM, SERVICE, FIELD, VALUE, RPC = 12, 4, 5, 6, 2, 2, 2


def parts() -> Mapping[str, str]:
    """Return the services, messages and enums of each file."""
    files = {Path(file.name).name: file for file in compile_protos().file}
    return {name: joined(sections(files[name])) for name in FILES}


def compile_protos() -> FileDescriptorSet:
    """Return the descriptors of the files, with comments."""
    buf = Path(sys.executable).parent / "buf"
    image = subprocess.run([buf, "build", "protos", "-o", "-"], check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout  # noqa: S603 -- our own files
    return FileDescriptorSet.FromString(image)


def sections(file: FileDescriptorProto) -> Iterator[str]:
    """Yield the sections of a file: its comment, services, messages and enums."""
    comments = {tuple(each.path): paragraphs(each.leading_comments) for each in file.source_code_info.location}
    yield comments[SYNTAX,]
    for index, service in enumerate(file.service):
        yield f"### {service.name}"
        yield comments[SERVICE, index]
        for number, rpc in enumerate(service.method):
            yield f"#### {rpc.name}\n\n{signature(rpc)}\n\n{comments[SERVICE, index, RPC, number]}"
    for index, message in enumerate(file.message_type):
        yield f"### {message.name}"
        yield comments[MESSAGE, index]
        if message.field:
            rows = (
                (str(field.number), code(field.name), kind(message, field), comments[MESSAGE, index, FIELD, number])
                for number, field in enumerate(message.field)
            )
            yield table(("no.", "field", "type", "meaning"), rows)
    for index, enum in enumerate(file.enum_type):
        yield f"### {enum.name}"
        yield comments[ENUM, index]
        values = (
            (str(value.number), code(value.name), comments[ENUM, index, VALUE, number])
            for number, value in enumerate(enum.value)
        )
        yield table(("no.", "value", "meaning"), values)


def paragraphs(comment: str) -> str:
    """Return a comment with one line for each paragraph and each item of a list."""
    items = comment.replace("\n   -", "\n\n-").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in items).replace("\n\n- ", "\n- ").replace(":\n- ", ":\n\n- ")


def signature(rpc: MethodDescriptorProto) -> str:
    """Return the request and the response of an RPC."""
    request, response = link(rpc.input_type), link(rpc.output_type)
    return f"{'stream of ' * rpc.client_streaming}{request} → {'stream of ' * rpc.server_streaming}{response}"


def kind(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return the type of a field with its labels."""
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry:
        return f"map of {name_of(entry.field[0])} to {name_of(entry.field[1])}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name_of(field)}"
    if field.proto3_optional:
        return f"optional {name_of(field)}"
    oneof = f"one of {code(message.oneof_decl[field.oneof_index].name)}: " if field.HasField("oneof_index") else ""
    return oneof + name_of(field)


def name_of(field: FieldDescriptorProto) -> str:
    """Return the name of a field's type, with a link if this page describes it."""
    return link(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()


def link(type_name: str) -> str:
    """Return a link to the section of a message or an enum."""
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"
