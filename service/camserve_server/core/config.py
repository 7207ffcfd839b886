"""Settings of the server, from a TOML file, environment variables and flags; later sources override earlier ones."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from camserve_server.core.errors import ConfigError, did_you_mean
from camserve_server.core.limits import Limits

ENVIRONMENT = "CAMSERVE_"  # prefix of the environment variables
ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})", re.ASCII)
ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.ASCII)
LAST_PORT = 65_535
MAX_PROCESSES = 64


def _read_processes(value: object) -> object:
    """Refuse anything but a number and "auto" with one message; pydantic has one for each of the two."""
    text = str(value)
    if value != "auto" and not (re.fullmatch(r"\d{1,3}", text, re.ASCII) and 1 <= int(text) <= MAX_PROCESSES):
        raise PydanticCustomError("processes", f'write a number from 1 to {MAX_PROCESSES}, or "auto"')
    return value if value == "auto" else int(text)


Processes = Annotated[Annotated[int, Field(ge=1, le=MAX_PROCESSES)] | Literal["auto"], BeforeValidator(_read_processes)]
"""Number of server processes."""


def _check_address(value: str) -> str:
    """Refuse an address without a valid port. gRPC would guess one."""
    if not value.startswith("unix:") and not ((match := ADDRESS.fullmatch(value)) and int(match["port"]) <= LAST_PORT):
        raise PydanticCustomError("address", f"write HOST:PORT, the port from 0 to {LAST_PORT}")
    return value


def _complete_address(value: str) -> str:
    """Complete a port alone to an address on 127.0.0.1; refuse an invalid address."""
    value = f"127.0.0.1:{value}" if re.fullmatch(r"\d{1,5}", value, re.ASCII) else value
    if value and not ((match := ADDRESS.fullmatch(value)) and int(match["port"]) <= LAST_PORT):
        raise PydanticCustomError("address", f"write HOST:PORT, or a port alone, from 0 to {LAST_PORT}")
    return value


def _check_origin(value: str) -> str:
    """Refuse anything but an origin as browsers send it."""
    if not ORIGIN.fullmatch(value):
        raise PydanticCustomError("origin", "write SCHEME://HOST or SCHEME://HOST:PORT, in lower case")
    return value


Origins = tuple[Annotated[str, AfterValidator(_check_origin)], ...]
"""Origins of web pages."""


class Settings(BaseModel):
    """Every setting of the server.

    The description of a field is its text in `serve --help`, in the JSON schema and in docs/reference/settings.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[str, AfterValidator(_check_address)] = Field(
        default="127.0.0.1:50051",
        description="Address to listen on, as `HOST:PORT` or `unix:PATH`. Port 0 picks a free port.",
    )
    models: tuple[str, ...] = Field(
        default=("efficientnet_lite0",),
        min_length=1,
        description="Models to load, each as `[NAME=]SOURCE:ARCH[?option=value]`. The first is the default model.",
    )
    device: str = Field(
        default="auto",
        description="Where models run: `auto` (the first usable GPU, else the CPU), `cpu`, `cuda:N`, or `cuda` for"
        " every GPU. Separate several with commas. Each device starts one worker. Naming a device twice starts two"
        " workers on it.",
    )
    isolation: Literal["process", "thread"] = Field(
        default="process",
        description="Where workers run. `process` gives each worker a process of its own, which is monitored and"
        " restarted when it dies or hangs. `thread` runs workers in threads of the server.",
    )
    processes: Processes = Field(
        default=1,
        description="Server processes that share the port, each with its own workers. They divide the cores and the"
        " limits among them. `auto` chooses the number by cores and memory. Linux only.",
    )
    metrics_address: Annotated[str, AfterValidator(_complete_address)] = Field(
        default="",
        description="Address of the Prometheus metrics endpoint, as `HOST:PORT`, or a port alone for 127.0.0.1. Without"
        " it there is no endpoint.",
    )
    http_address: Annotated[str, AfterValidator(_complete_address)] = Field(
        default="",
        description="Address of HTTP with JSON and of the web page, written like `metrics_address`. Default: no HTTP.",
    )
    http_origins: Origins = Field(
        default=(),
        description="Further origins whose pages may call, and whose host names are allowed, as `https://example.com`.",
    )
    traces: bool = Field(
        default=False,
        description="Send OpenTelemetry traces, configured by the standard `OTEL_*` environment variables. Needs"
        " `camserve[otel]`.",
    )
    max_batch_seconds: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="Seconds that a batch may take before its worker is killed and restarted.",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="Threads for image processing and for torch. 0 uses one per core."
    )
    max_batch_rows: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Maximum number of inputs in a batch. An input is one image tensor that the model gets. Despite its"
        " name, the setting does not count rows: an input that several targets share counts once. 0 uses 8 on a CPU and"
        " 64 on a GPU. Batches are smaller where the memory does not suffice.",
    )
    max_batch_mib: int = Field(
        default=256,
        ge=1,
        le=1_048_576,
        description="Memory budget of all batches that a worker runs on a CPU at the same time, in MiB. Batches that"
        " would exceed it get fewer inputs. The budget is never more than a sixth of the machine's memory, or of the"
        " container's memory limit.",
    )
    max_queue_rows: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Maximum rows accepted and not yet computed. More are refused. The inputs and maps of requests that"
        " are not answered yet may take 64 KiB of memory for each of these rows.",
    )
    max_queue_delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=10_000,
        description="Milliseconds that the oldest row may wait for others to join its batch. 0 never waits.",
    )
    max_request_rows: int = Field(default=16_384, ge=1, le=1_000_000, description="Maximum rows of one request.")
    max_explanations: int = Field(default=64, ge=1, le=4096, description="Maximum maps in one request.")
    max_drawn_pixels: int = Field(
        default=200_000_000, ge=1, description="Maximum pixels in all pictures of one request, in total."
    )
    max_message_mib: int = Field(default=8, ge=1, le=1024, description="Maximum size of a request, in MiB.")
    max_metadata_kib: int = Field(
        default=8, ge=1, le=1024, description="Maximum size of a call's metadata, its token included, in KiB."
    )
    max_pixels: int = Field(default=16_777_216, ge=1, description="Maximum pixels in a photo. Checked before decoding.")
    max_side: int = Field(default=16_384, ge=1, description="Maximum length of a photo's longer side, in pixels.")
    max_streams: int = Field(default=100, ge=1, le=10_000, description="Maximum concurrent calls on one connection.")
    max_connections: int = Field(
        default=1000, ge=1, le=1_000_000, description="Maximum open connections. Further ones are closed at once."
    )
    idle_seconds: float = Field(
        default=20.0,
        gt=0,
        le=86_400,
        description="Seconds that a call may take to send its first message (else DEADLINE_EXCEEDED), and that a"
        " stream may be open with no request in progress (else UNAVAILABLE).",
    )
    connection_idle_seconds: float = Field(
        default=300.0, gt=0, le=86_400, description="Seconds after which a connection without calls is closed."
    )
    connection_age_seconds: float = Field(
        default=3600.0,
        gt=0,
        le=604_800,
        description="Age of a connection, in seconds, after which it accepts no new calls. Clients then open another"
        " one automatically. gRPC varies the age at random by up to 10 %.",
    )
    connection_grace_seconds: float = Field(
        default=900.0,
        gt=0,
        le=86_400,
        description="Seconds that the calls in progress on a connection may take after `connection_age_seconds`. They"
        " are cancelled afterwards.",
    )
    stream_in_flight: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Maximum requests of one ExplainStream in progress at the same time. The server reads no"
        " further requests until one of them ends.",
    )
    tls_cert: str = Field(
        default="",
        description="PEM file with the server's certificate and intermediate certificates. TLS needs `tls_key` too.",
    )
    tls_key: str = Field(default="", description="PEM file with the certificate's private key, unencrypted.")
    tls_client_ca: str = Field(
        default="",
        description="PEM file with the certificate authority that must have issued the clients' certificates (mutual"
        " TLS).",
    )
    tokens_file: str = Field(
        default="",
        description="File with the tokens that clients authenticate with. `camserve-server token new` creates tokens.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow other machines to connect without TLS or authentication. Anyone who can reach the server may"
        " call it.",
    )
    admin: bool = Field(
        default=False,
        description="Allow clients to reload and unload models while the server runs. With `tokens_file` this takes a"
        " token with the role `admin`. Without it, every client may.",
    )
    model_folder: str = Field(
        default="", description="Folder of the weights files that clients may name when they reload a model."
    )
    drain_seconds: float = Field(
        default=30.0,
        ge=0,
        le=3600,
        description="Seconds that a stopping server has to answer accepted calls, and their callers to read the"
        " answers.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged: `debug`, `info`, `warning` or `error`."
    )
    access_log_share: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of the successful calls that are logged, from 0 for none to 1 for all. Failed calls are"
        " always logged.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log: `text` for people, `json` for programs."
    )

    @field_validator("models", "http_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split an environment variable's values at spaces and commas."""
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @property
    def sharing(self) -> int:
        """The number of server processes that divide this machine: 1 until `auto` is resolved."""
        return 1 if self.processes == "auto" else self.processes

    @property
    def limits(self) -> Limits:
        """The limits on one request."""
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
    """Load the settings.

    Args:
        path: a TOML file, or None.
        flags: values by setting; None stands for a flag that was not given.
        environment: the environment variables; `CAMSERVE_MAX_QUEUE_ROWS` sets `max_queue_rows`.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or out of range.
    """
    values = read(path) if path else {}
    values |= from_environment(environment)
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    faults = faults_of(values)
    if faults:
        raise ConfigError("; ".join(message for _, message in faults))
    return Settings.model_validate(values)


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that environment variables give, as strings by name."""
    names = Settings.model_fields
    return {name: environment[key] for name in names if (key := ENVIRONMENT + name.upper()) in environment}


def faults_of(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return every invalid setting as its name and an error message."""
    try:
        Settings.model_validate(values)
    except ValidationError as error:
        return [(str(details["loc"][0]), _message(details)) for details in error.errors()]
    return []


def schema() -> dict[str, Any]:
    """Return the JSON schema of a settings file, with which editors complete and check it."""
    generated = Settings.model_json_schema()
    for setting in generated["properties"].values():
        del setting["title"]  # pydantic repeats the name here
    generated["properties"]["models"]["items"]["pattern"] = r"^([\w.-]+=)?([\w.]+:)?[^?]+(\?.*)?$"
    return (
        {"$schema": "http://json-schema.org/draft-07/schema#"}
        | generated
        | {
            "title": "Settings of camserve-server",
            "description": "The file of `camserve-server serve --config FILE`.",
        }
    )


def read(path: str | Path) -> dict[str, Any]:
    """Return the contents of a settings file, unchecked.

    Raises:
        ConfigError: the file cannot be read, or is not valid TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _message(details: Any) -> str:
    """Return the message for one of pydantic's error details."""
    name = str(details["loc"][0])
    if details["type"] == "extra_forbidden":
        return f'unknown setting "{name}"{did_you_mean(name, Settings.model_fields)}'
    message = details["msg"]
    fault = "name at least one" if details["type"] == "too_short" else f"{message[0].lower()}{message[1:]}"
    return f"{name} = {details['input']!r}: {fault}"
