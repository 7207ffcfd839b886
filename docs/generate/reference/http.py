"""The calls and messages of HTTP with JSON, from the OpenAPI document."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camserve_server.api import http
from reference.markdown import code, joined, listed, table

DOCUMENT = Path(str(http.__file__)).parent / "openapi.json"
PACKAGE = "camserve.v1."


def parts() -> Mapping[str, str]:
    """Return the headers, an overview of the calls, the calls and the messages."""
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    paths, components = document["paths"], document["components"]
    headers = (
        (code(each["name"]), kind(each["schema"]), each["description"]) for each in components["parameters"].values()
    )
    schemas = components["schemas"].items()
    return {
        "headers": table(("header", "type", "meaning"), headers),
        "overview": table(("path", "request", "response"), (row(path, methods) for path, methods in paths.items())),
        "calls": joined(part for path, methods in paths.items() for part in call(path, methods)),
        "messages": joined(part for name, schema in schemas for part in message(name, schema)),
    }


def row(path: str, methods: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the row of a path in the overview."""
    ((verb, operation),) = methods.items()
    link = f"[`{verb.upper()} {path}`](#{operation['operationId'].lower()})"
    return link, bodies(operation.get("requestBody", {})), bodies(operation["responses"]["200"])


def call(path: str, methods: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of a call."""
    ((verb, operation),) = methods.items()
    yield f"### {operation['operationId']}"
    yield code(f"{verb.upper()} {path}")
    yield operation["description"]
    if "requestBody" in operation:
        yield f"- Request: {bodies(operation['requestBody'])}\n" + "\n".join(responses(operation))
    else:
        yield "\n".join(responses(operation))


def responses(operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each response."""
    for status, response in operation["responses"].items():
        if status != "default":
            yield f"- Response {status}: {bodies(response)}. {response['description']}"


def bodies(body: Mapping[str, Any]) -> str:
    """Return the media types of a body with their messages."""
    contents = body.get("content", {}).items()
    typed = [f"{kind(each['schema'])} as {code(media)}" for media, each in contents if each]
    return ", or ".join(
        [*typed, *([listed(media for media, each in contents if not each)] * (len(typed) < len(contents)))]
    )


def message(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of a message or an enum."""
    yield f"### {title(name)}"
    yield schema["description"]
    if schema.get("properties"):
        yield table(("field", "type", "meaning"), fields(schema["properties"]))


def fields(properties: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each field of a message, with the fields of the objects in its lists."""
    for name, each in properties.items():
        yield code(parent + name), kind(each), each.get("description", "")
        inner = each.get("items", {}).get("properties", {})
        yield from fields(inner, f"{parent}{name}[].")


def kind(schema: Mapping[str, Any]) -> str:
    """Describe the type of a value."""
    if "$ref" in schema:
        name = title(schema["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower().replace(' ', '-')})"
    if "items" in schema:
        return f"list of {kind(schema['items'])}"
    if schema.get("additionalProperties"):
        return f"object with values of {kind(schema['additionalProperties'])}"
    if "properties" in schema:
        return f"object with {', '.join(f'{code(name)} ({kind(each)})' for name, each in schema['properties'].items())}"
    return simple_kind(schema)


def simple_kind(schema: Mapping[str, Any]) -> str:
    """Describe the type of a value that is no object and no list."""
    if "enum" in schema:
        return f"string: {listed(schema['enum'])}"
    if "contentEncoding" in schema:
        return "bytes"
    return "float" if "anyOf" in schema else str(schema.get("format", schema["type"]))


def title(name: str) -> str:
    """Return the heading of a message."""
    return name.removeprefix(PACKAGE) if name.startswith(PACKAGE) else f"{name} of a call"
