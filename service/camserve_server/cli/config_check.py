"""Check a settings file as `serve` would, and report all faults at once."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from camserve_server import models
from camserve_server.api import auth, exposure, tokens
from camserve_server.app import sharing
from camserve_server.core import config, device_names
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError
from camserve_server.methods import add_plugins
from camserve_server.models import ModelSpec
from camserve_server.models.values import ModelInfo

ADDRESSES = {name: Settings.model_fields[name].default for name in ("address", "metrics_address", "http_address")}
"""Settings with an address, and their defaults, which only this machine can reach."""

ModelCallback = Callable[[ModelInfo], object]
"""Called with each model that was loaded."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """A fault in a settings file.

    Attributes:
        line: number of the line, from 1; 0 if no line is at fault.
        message: description of the fault.
    """

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class _File:
    """A settings file.

    Attributes:
        text: its contents.
        values: the parsed contents.
    """

    text: str
    values: Mapping[str, Any]

    def line_of(self, setting: str, value: str = "") -> int:
        """Return the line of a setting, or of one of its values; 0 if the file does not have it."""
        lines = self.text.splitlines()
        pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(setting)}\b")
        first = next((number for number, line in enumerate(lines) if pattern.match(line)), -1)
        if first >= 0 and value:
            return 1 + next((number for number, line in enumerate(lines[first:], first) if value in line), first)
        return 1 + first


def check(path: str | Path, on_loaded: ModelCallback | None = None) -> list[Fault]:
    """Check a settings file. The environment and flags are ignored.

    Args:
        path: the file.
        on_loaded: callback for each model that was loaded; None to load no models.

    Returns:
        The faults, in the order of the file's lines.
    """
    try:
        values = config.read(path)  # first, as it has the messages for a file that cannot be read
        file = _File(Path(path).read_text(encoding="utf-8"), values)
    except ConfigError as error:
        position = re.search(r"at line (\d+)", str(error))
        return [Fault(int(position[1]) if position else 0, str(error))]
    invalid = config.faults_of(file.values)
    names = {name for name, _ in invalid}
    settings = Settings.model_validate({name: value for name, value in file.values.items() if name not in names})
    faults = [Fault(file.line_of(name), message) for name, message in invalid]
    faults += _check_models(file, settings.models)
    faults += [Fault(file.line_of(name), message) for name, message in _check_environment(settings)]
    if not faults and on_loaded:
        faults = _load_models(file, settings, on_loaded)
    return sorted(faults)


def _check_models(file: _File, texts: Sequence[str]) -> Iterator[Fault]:
    names: set[str] = set()
    for text in texts:
        try:
            spec = models.parse(text)
            models.search_current_folder(spec)
            models.check(spec)
        except ConfigError as error:
            yield Fault(file.line_of("models", text), f"models: {_with_model(text, error)}")
            continue
        if spec.name in names:
            message = f'models: two are called "{spec.name}": name one as NAME={spec.origin}'
            yield Fault(file.line_of("models", text), message)
        names.add(spec.name)


def _with_model(text: str, error: ConfigError) -> str:
    """Return the message of an error, with the model that it is about."""
    return str(error) if text in str(error) else f'model "{text}": {error}'


def _check_environment(settings: Settings) -> Iterator[tuple[str, str]]:
    """Check the files and devices that settings name, and settings that depend on one another."""

    def check_model_folder() -> None:
        if settings.model_folder and not Path(settings.model_folder).is_dir():
            raise ConfigError(f"model_folder = {settings.model_folder}: there is no such folder")

    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("device", lambda: device_names.parse_devices(settings.device)),
        ("processes", lambda: sharing.check(settings)),
        *((name, partial(_check_exposure, settings, name)) for name in ADDRESSES),
        ("tls_cert" if settings.tls_cert else "tls_key", lambda: auth.credentials(settings)),
        ("tokens_file", lambda: settings.tokens_file and tokens.file(settings.tokens_file)),
        ("model_folder", check_model_folder),
        ("", add_plugins),
    )
    for setting, check_setting in checks:
        try:
            check_setting()
        except ConfigError as error:
            yield setting, str(error)


def _check_exposure(settings: Settings, name: str) -> None:
    """Check one of the addresses of a server."""
    exposure.check(settings.model_copy(update={**ADDRESSES, name: getattr(settings, name)}))


def _load_models(file: _File, settings: Settings, on_loaded: ModelCallback) -> list[Fault]:
    faults = []
    device = device_names.parse_devices(settings.device)[0]
    for text in settings.models:
        try:
            on_loaded(_load_model(models.parse(text), device))
        except ConfigError as error:
            faults.append(Fault(file.line_of("models", text), f"models: {_with_model(text, error)}"))
    return faults


def _load_model(spec: ModelSpec, device: str) -> ModelInfo:
    """Load a model, and return its description only."""
    try:
        return models.load(spec, device).info
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"model {spec.name} ({spec.origin}): {type(error).__name__}: {error}") from error
