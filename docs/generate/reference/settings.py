"""The settings of the server, from their model and the flags of `camserve-server serve`."""

from collections.abc import Mapping
from typing import Any

from camserve_server.cli import commands
from camserve_server.core import config
from reference.markdown import code, joined, listed, table

GROUPS: Mapping[str, str] = {
    "Addresses": "address http_address http_origins metrics_address",
    "Models and devices": "models device isolation processes threads admin model_folder",
    "Batches and queue": "max_batch_rows max_batch_mib max_batch_seconds max_queue_rows max_queue_delay_ms",
    "Limits of a request": "max_message_mib max_metadata_kib max_pixels max_side max_request_rows max_explanations"
    " max_drawn_pixels",
    "Connections and streams": "max_connections max_streams stream_in_flight",
    "Lifetime": "idle_seconds connection_idle_seconds connection_age_seconds connection_grace_seconds drain_seconds",
    "Access": "tls_cert tls_key tls_client_ca tokens_file insecure",
    "Logs and traces": "log_level log_format access_log_share traces",
}
"""The settings by subject."""


def parts() -> Mapping[str, str]:
    """Return a table of contents, and the settings of each subject.

    Raises:
        ValueError: a setting has no subject, or more than one.
    """
    if sorted(" ".join(GROUPS.values()).split()) != sorted(config.Settings.model_fields):
        raise ValueError("GROUPS must have every setting once")
    properties = config.schema()["properties"]
    contents = (
        (f"[{title}](#{title.lower().replace(' ', '-')})", ", ".join(f"[`{name}`](#{name})" for name in names.split()))
        for title, names in GROUPS.items()
    )
    return {"contents": table(("subject", "settings"), contents)} | {
        title: joined(describe(name, properties[name]) for name in names.split()) for title, names in GROUPS.items()
    }


def describe(name: str, schema: Mapping[str, Any]) -> str:
    """Return the section of a setting."""
    default = schema["default"]
    shown = listed(default) if isinstance(default, list) else code(literal(default))
    return f"""\
### {name}

{schema["description"]}

- Value: {values(schema)}
- Default: {"none" if default in ("", []) else shown}
- Environment: `{config.ENVIRONMENT}{name.upper()}`
- Flag: `{flags()[name]}`"""


def values(schema: Mapping[str, Any]) -> str:
    """Describe the values that a setting may have."""
    if "anyOf" in schema:
        return " or ".join(map(values, schema["anyOf"]))
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return listed(schema["enum"])
    kinds = {"integer": "integer", "number": "number", "array": "list of strings", "boolean": "`true` or `false`"}
    return kinds.get(schema["type"], "string") + limits(schema)


def limits(schema: Mapping[str, Any]) -> str:
    """Describe the range of a number; return an empty text for other values."""
    least, above, most = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    if least is not None:
        return f", {least:,} to {most:,}" if most is not None else f", {least:,} or more"
    return "" if above is None else f", above {above:,} and at most {most:,}"


def literal(value: object) -> str:
    """Return a default as it is written in a file."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def flags() -> Mapping[str, str]:
    """Return the flags of `camserve-server serve` by the names of their settings."""
    return {str(flag.name): flag.opts[0] for flag in commands.program.commands["serve"].params}
