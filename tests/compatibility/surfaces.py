"""The public surface as JSON: the Python client, the commands, the settings, the protobuf descriptors, the package."""

import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
from google.protobuf import descriptor_pb2

import camserve
import fork_server
from camserve_server.core import config

ROOT = Path(__file__).parents[2]
PROGRAMS = ("camserve.cli", "camserve_server.cli")
COMMANDS = "import runpy; runpy.run_module('compatibility.commands', run_name='__main__')"


def value(result):
    """Return a result of the client as JSON, with a SHA-256 in place of bytes and arrays.

    Other objects, such as the photo of a result in a notebook, are written as the name of their class.
    """
    for kinds, describe in _DESCRIBED:
        if isinstance(result, kinds):
            return describe(result)
    if dataclasses.is_dataclass(result):
        return _value_of(result)
    return result if isinstance(result, str | int | None) else type(result).__name__


def _error(error):
    return {"error": type(error).__name__, "code": error.code.name, "fields": dict(error.fields)}


_DESCRIBED = (
    (camserve.CamserveError, _error),
    (enum.Enum, lambda member: member.value),
    (np.ndarray, lambda array: {"shape": list(array.shape), "type": str(array.dtype), **_digest(array.tobytes())}),
    (bytes, lambda data: {"bytes": len(data), **_digest(data)}),
    (Mapping, lambda mapping: {str(key): value(item) for key, item in mapping.items()}),
    ((list, tuple), lambda values: [value(item) for item in values]),
    (float, repr),
)


def _value_of(subject):
    names = [each.name for each in dataclasses.fields(subject) if not each.name.startswith("_")]
    values = {name: value(getattr(subject, name)) for name in names} | {"kind": type(subject).__name__}
    if isinstance(subject, camserve.Explanation):
        values["receipt"] = value(subject.receipt)
    return values


def _digest(data):
    return {"sha256": hashlib.sha256(data).hexdigest()}


def client():
    """Return the public names of the client with their signatures, fields and members."""
    return {name: _named(getattr(camserve, name)) for name in camserve.__all__}


def _named(subject):
    if not inspect.isclass(subject):
        return {"is": "function", **_signature(subject)} if inspect.isfunction(subject) else {"is": "type"}
    if issubclass(subject, dict):  # a TypedDict
        return {"is": "options", "options": dict.fromkeys(sorted(subject.__annotations__), "")}
    if issubclass(subject, enum.Enum):
        return {"is": "enum", "members": {each.name: each.value for each in subject}}
    return {"is": "class", "has": _members(subject), **_constructor(subject), **_error_class(subject)}


def _error_class(subject):
    if not issubclass(subject, BaseException):
        return {}
    bases = dict.fromkeys((each.__name__ for each in subject.__mro__[1:] if each.__module__ != "builtins"), "")
    return {"bases": bases, "code": subject("words").code.name}


def _constructor(subject):
    """Return the fields of a dataclass, or the signature of another class."""
    if not dataclasses.is_dataclass(subject):
        return {"made": _signature(subject)}
    public = [each for each in dataclasses.fields(subject) if not each.name.startswith("_")]
    return {
        "fields": [f"{each.name}{_default(each)}" for each in public],
        "frozen": subject.__dataclass_params__.frozen,
    }


def _default(field):
    if field.default is not dataclasses.MISSING:
        return f"={_default_as_code(field.default)}"
    return "" if field.default_factory is dataclasses.MISSING else "=made"


def _members(subject):
    fields = {each.name for each in dataclasses.fields(subject)} if dataclasses.is_dataclass(subject) else set()
    public = {name for name in dir(subject) if not name.startswith("_")} | (
        {"__enter__", "__aenter__"} & set(dir(subject))
    )
    own = {name for name in public - fields if not hasattr(BaseException, name)}
    return {name: _member(inspect.getattr_static(subject, name), getattr(subject, name)) for name in sorted(own)}


def _member(static, subject):
    if not callable(subject):
        return {"is": "property"}
    kind = "coroutine" if inspect.iscoroutinefunction(subject) else "method"
    return {"is": f"static {kind}" if isinstance(static, staticmethod | classmethod) else kind, **_signature(subject)}


def _signature(function):
    """Return positional parameters in order, keyword-only ones by name, and catch-alls; each with its default."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    names = {each.name: _default_of(each) for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    places = [f"{each.name}{_default_of(each)}" for each in parameters if each.kind.name.startswith("POSITIONAL")]
    rest = {str(each).partition(":")[0]: "" for each in parameters if each.kind.name.startswith("VAR_")}
    return {key: subject for key, subject in (("positions", places), ("names", names), ("rest", rest)) if subject}


def _default_of(parameter):
    return "" if parameter.default is parameter.empty else f"={_default_as_code(parameter.default)}"


def _default_as_code(default):
    """Return a default as code. Functions are all alike, since their names are private."""
    if dataclasses.is_dataclass(default):
        return _fields_as_code(default)
    return "function" if inspect.isfunction(default) else repr(default)


def _fields_as_code(default):
    """Return a dataclass instance as code, without fields at their defaults, which a later release may add."""
    values = {each.name: (getattr(default, each.name), each.default) for each in dataclasses.fields(default)}
    given = ", ".join(f"{name}={value!r}" for name, (value, usual) in values.items() if value != usual)
    return f"{type(default).__name__}({given})"


def imported(module, names):
    """Return the signatures and fields of names that are imported from a module."""
    subject = importlib.import_module(module)
    return {name: _imported(getattr(subject, name)) for name in names}


def _imported(subject):
    if dataclasses.is_dataclass(subject):
        return _constructor(subject)
    if inspect.isfunction(subject):
        return _signature(subject)
    return dict.fromkeys(subject, "") if isinstance(subject, Mapping) else {}


def commands():
    """Return the commands of both programs, each from a process that starts like its console script."""
    return {name: json.loads(_run(COMMANDS, name)) for name in PROGRAMS}


def _run(program, *arguments):
    result = fork_server.run(program, *arguments, cwd=ROOT / "tests")
    assert result.returncode == 0, result.stderr
    return result.stdout


def command(subject):
    """Return a click command's options, arguments in order, and subcommands."""
    arguments = [each for each in subject.params if isinstance(each, click.Argument)]
    described = {
        "arguments": [_parameter_of(each) for each in arguments],
        "options": {flag: _option(each) for each in subject.params if each not in arguments for flag in each.opts},
    }
    if isinstance(subject, click.Group):
        described["commands"] = {name: command(each) for name, each in subject.commands.items()}
    return described


def _option(subject):
    described = {"is": f"{_parameter_of(subject)}, default {_plain_default(subject)}"}
    if isinstance(subject.type, click.Choice):
        described["choices"] = dict.fromkeys(map(str, subject.type.choices), "")
    return described


def _parameter_of(subject):
    kind = "switch" if getattr(subject, "is_flag", False) else _type(subject.type)
    parts = [kind, f"{subject.nargs} values" if subject.nargs != 1 else "", "required" if subject.required else ""]
    parts += ["repeated" if getattr(subject, "multiple", False) else "", subject.envvar or ""]
    return ", ".join(filter(None, parts))


def _plain_default(subject):
    default = subject.get_default(click.Context(click.Command("none")))
    return repr(default) if isinstance(default, str | int | float | bool | tuple) else "none"


def _type(subject):
    if isinstance(subject, click.IntRange | click.FloatRange):
        return f"{subject.name} {subject._describe_range()}"
    if isinstance(subject, click.Path):
        return "path"
    return subject.name if subject.name in ("integer", "float", "text", "boolean", "choice", "datetime") else "own"


def settings():
    """Return the JSON schema of the settings file without its descriptions."""
    schema = json.loads(_run(fork_server.SERVER, "check-config", "--schema"))
    bare = {name: _without_words(each) for name, each in schema["properties"].items()}
    return {"settings": bare, "required": schema.get("required", []), "unknown": schema["additionalProperties"]}


def _without_words(schema):
    kept = {key: each for key, each in schema.items() if key not in ("description", "title")}
    if "enum" in kept:
        kept["enum"] = dict.fromkeys(kept["enum"], "")
    return kept


def setting_of(name, environment):
    """Return the value of a setting that is loaded from environment variables."""
    return getattr(config.load(environment=environment), name)


def descriptors(files):
    """Return the messages, enums and services of file descriptors."""
    subject = {"messages": {}, "enums": {}, "services": {}}
    for file in files:
        for message in file.message_type:
            _message(message, file.package, subject)
        for each in file.enum_type:
            _enum(each, file.package, subject)
        for service in file.service:
            rpcs = {rpc.name: _rpc(rpc) for rpc in service.method}
            subject["services"][f"{file.package}.{service.name}"] = rpcs
    return subject


def _message(message, scope, subject):
    name = f"{scope}.{message.name}"
    subject["messages"][name] = {field.name: _field(field, message) for field in message.field}
    for inner in message.nested_type:
        _message(inner, name, subject)
    for inner in message.enum_type:
        _enum(inner, name, subject)


def _enum(each, scope, subject):
    subject["enums"][f"{scope}.{each.name}"] = {named.name: named.number for named in each.value}


def _field(field, message):
    kinds = descriptor_pb2.FieldDescriptorProto
    label = "optional" if field.proto3_optional else kinds.Label.Name(field.label).removeprefix("LABEL_")
    kind = field.type_name or kinds.Type.Name(field.type).removeprefix("TYPE_")
    inside = field.HasField("oneof_index") and not field.proto3_optional
    return f"{field.number} {label} {kind}" + (f" of {message.oneof_decl[field.oneof_index].name}" if inside else "")


def _rpc(rpc):
    return {
        "takes": rpc.input_type,
        "returns": rpc.output_type,
        "stream in": rpc.client_streaming,
        "stream out": rpc.server_streaming,
    }


def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def version():
    """Return the version of this tree."""
    return _project()["version"]


def package():
    """Return the package's console scripts, entry points, extras and lowest Python version."""
    project = _project()
    return {
        "name": project["name"],
        "scripts": project["scripts"],
        "entry points": project.get("entry-points", {}),
        "extras": dict.fromkeys(project["optional-dependencies"], ""),
        "python": project["requires-python"],
    }
