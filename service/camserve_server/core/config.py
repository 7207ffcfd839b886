"""Settings: a TOML file, overridden by the environment, overridden by flags."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.core.limits import Limits

ENVIRONMENT = "CAMSERVE_"
ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})", re.ASCII)
LAST_PORT = 65_535


class Settings(BaseModel):
    """All that an operator can set; each field's description is what the README says of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(default="127.0.0.1:50051", description="Host and port to listen on; port 0 takes a free one.")
    models: tuple[str, ...] = Field(
        default=("efficientnet_lite0",),
        min_length=1,
        description="Models to load, as `[NAME=]SOURCE:ARCH[?option=value]`; the first is the default.",
    )
    device: str = Field(
        default="auto",
        description="`cpu`, `cuda:N`, or `cuda` for every GPU; several with commas between, an engine for each, and two"
        " for one named twice. `auto` takes the first GPU if there is one.",
    )
    isolation: Literal["process", "thread"] = Field(
        default="process",
        description="Where engines live: each in a process of its own, which is watched, and started anew when it dies"
        " or hangs; or in threads of the server.",
    )
    metrics_address: str = Field(
        default="",
        description="Where Prometheus finds the metrics, as HOST:PORT; a port alone is on 127.0.0.1. None without it.",
    )
    traces: bool = Field(
        default=False,
        description="Send traces by OpenTelemetry, to where its own variables `OTEL_*` say; needs `camserve[otel]`.",
    )
    max_batch_seconds: float = Field(
        default=60.0, ge=1, le=3600, description="How long a batch may take; then its engine is taken for hung."
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads that decode and draw, and that torch computes with; 0 for one a core.",
    )
    max_batch_rows: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Inputs in a batch at most (the targets of one image share one); 0 for 8 on a CPU, and 64 on a GPU."
        " Where the memory is enough for fewer, a batch has fewer.",
    )
    max_batch_mib: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Memory, in MiB, that the batches under way on a CPU may take together: fewer inputs go into one"
        " where they would take more. A sixth of all memory, or of a container's limit, if that is less.",
    )
    max_queue_rows: int = Field(
        default=1024, ge=1, le=1_000_000, description="Rows accepted and not yet answered at most; more is refused."
    )
    max_queue_delay_ms: float = Field(
        default=0.0, ge=0, le=10_000, description="How long the oldest row may be held back for company."
    )
    max_request_rows: int = Field(
        default=16_384, ge=1, le=1_000_000, description="Rows that one request may cost: copies of its image to run."
    )
    max_explanations: int = Field(default=64, ge=1, le=4096, description="Maps that one request may ask for.")
    max_drawn_pixels: int = Field(
        default=200_000_000, ge=1, description="Pixels of all the pictures that one request may ask for, together."
    )
    max_message_mib: int = Field(default=8, ge=1, le=1024, description="Size of a request at most.")
    max_metadata_kib: int = Field(
        default=8, ge=1, le=1024, description="Size of a call's metadata at most, a token's too."
    )
    max_pixels: int = Field(default=16_777_216, ge=1, description="Pixels of a photo at most; checked before decoding.")
    max_side: int = Field(default=16_384, ge=1, description="Longer side of a photo at most, in pixels.")
    max_streams: int = Field(default=100, ge=1, le=10_000, description="Calls under way on one connection at most.")
    max_connections: int = Field(
        default=1000, ge=1, le=1_000_000, description="Connections open at most; one more is closed at once."
    )
    idle_seconds: float = Field(
        default=20.0,
        gt=0,
        le=86_400,
        description="How long a call may keep the server waiting for its message, and a stream for its next one while"
        " none of it is under way.",
    )
    connection_idle_seconds: float = Field(
        default=300.0, gt=0, le=86_400, description="How long a connection may be open without a call."
    )
    connection_age_seconds: float = Field(
        default=3600.0,
        gt=0,
        le=604_800,
        description="How long a connection may take new calls; a client then opens another by itself.",
    )
    connection_grace_seconds: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="How long calls that are under way then may take, before they are cut off.",
    )
    stream_in_flight: int = Field(
        default=32, ge=1, le=1024, description="Requests of one ExplainStream under way at most; the rest wait unread."
    )
    tls_cert: str = Field(
        default="", description="PEM file of the certificate, and of those that vouch for it; with `tls_key`, for TLS."
    )
    tls_key: str = Field(default="", description="PEM file of the certificate's key, not encrypted.")
    tls_client_ca: str = Field(
        default="", description="PEM file of the authority by which callers must have a certificate (mutual TLS)."
    )
    tokens_file: str = Field(
        default="", description="File of the tokens that may call: see `camserve-server token new`."
    )
    insecure: bool = Field(
        default=False,
        description="Listen beyond this machine even without TLS and tokens; whoever reaches it may call.",
    )
    admin: bool = Field(
        default=False,
        description="Whether models can be loaded again and unloaded while the server runs; with `tokens_file` by those"
        " with the role `admin`, else by all who may call.",
    )
    model_folder: str = Field(
        default="", description="Folder whose files of weights may be named when a model is loaded again."
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, le=3600, description="How long a stopping server may take to finish what it accepted."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    log_format: Literal["text", "json"] = Field(default="text", description="`text` for people, `json` for machines.")

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Take the models apart that an environment variable holds, separated by spaces or commas."""
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        """Refuse what gRPC would guess at: no port, or one that is none."""
        if not value.startswith("unix:") and not (
            (form := ADDRESS.fullmatch(value)) and int(form["port"]) <= LAST_PORT
        ):
            raise PydanticCustomError("address", f"write HOST:PORT, the port from 0 to {LAST_PORT}")
        return value

    @field_validator("metrics_address")
    @classmethod
    def _check_metrics_address(cls, value: str) -> str:
        """Take a port alone for one of this machine's own; refuse what is no address."""
        value = f"127.0.0.1:{value}" if re.fullmatch(r"\d{1,5}", value, re.ASCII) else value
        if value and not ((form := ADDRESS.fullmatch(value)) and int(form["port"]) <= LAST_PORT):
            raise PydanticCustomError("address", f"write HOST:PORT, or a port alone, from 0 to {LAST_PORT}")
        return value

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(
            pixels=self.max_pixels,
            side=self.max_side,
            rows=self.max_request_rows,
            chunk=min(Limits().chunk, self.max_queue_rows),
            explanations=self.max_explanations,
            drawn_pixels=self.max_drawn_pixels,
        )


def load(
    path: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Put the settings together.

    Args:
        path: of a TOML file, or None.
        flags: that were given; those that are None were not.
        environment: where `CAMSERVE_MAX_QUEUE_ROWS` stands for `max_queue_rows`.

    Raises:
        ConfigError: something cannot be read, is unknown or is out of range.
    """
    values = read(path) if path else {}
    values |= from_environment(environment)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    faults = faults_of(values)
    if faults:
        raise ConfigError("; ".join(words for _, words in faults))
    return Settings.model_validate(values)


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that the environment has, as texts, by their names."""
    known = Settings.model_fields
    return {name: environment[key] for name in known if (key := ENVIRONMENT + name.upper()) in environment}


def faults_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all that is wrong with settings, each as the setting's name and words for the operator."""
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        return [(str(one["loc"][0]), _words(one)) for one in error.errors()]
    return []


def schema() -> dict[str, Any]:
    """Return the JSON schema of a file of settings, by which editors complete and check it as it is written."""
    made = Settings.model_json_schema()
    for setting in made["properties"].values():
        del setting["title"]  # the name once more
    made["properties"]["models"]["items"]["pattern"] = r"^([\w.-]+=)?([\w.]+:)?[^?]+(\?.*)?$"
    return (
        {"$schema": "http://json-schema.org/draft-07/schema#"}
        | made
        | {
            "title": "Settings of camserve-server",
            "description": "The file of `camserve-server serve --config FILE`.",
        }
    )


def read(path: str | Path) -> dict[str, Any]:
    """Read what stands in a file, unchecked.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def _words(error: Any) -> str:
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f'unknown setting "{name}"{did_you_mean(name, Settings.model_fields)}'
    said = "name at least one" if error["type"] == "too_short" else f"{error['msg'][0].lower()}{error['msg'][1:]}"
    return f"{name} = {error['input']!r}: {said}"
