"""Looks at a file of settings as `serve` would, and says all that is wrong with it at once."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camserve_server import models
from camserve_server.api import auth
from camserve_server.core import config, devices
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError
from camserve_server.methods import add_plugins
from camserve_server.models import ModelSpec
from camserve_server.models.values import ModelInfo

LOCAL = str(Settings.model_fields["address"].default)  # where only this machine can call

Told = Callable[[ModelInfo], object]
"""Is told of each model that was loaded."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """Something that is wrong.

    Attributes:
        line: of the file, from 1; 0 where no line is to blame.
        words: that say what.
    """

    line: int
    words: str


@dataclass(frozen=True, slots=True)
class _File:
    """A file of settings.

    Attributes:
        text: that it holds.
        values: what that says.
    """

    text: str
    values: Mapping[str, Any]

    def line_of(self, setting: str, value: str = "") -> int:
        """Return the line where a setting begins, or where a value of it stands; 0 where it is nowhere."""
        lines = self.text.splitlines()
        begins = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(setting)}\b")
        first = next((number for number, line in enumerate(lines) if begins.match(line)), -1)
        if first >= 0 and value:
            return 1 + next((number for number, line in enumerate(lines[first:], first) if value in line), first)
        return 1 + first


def check(path: str | Path, loading: Told | None = None) -> list[Fault]:
    """Find what is wrong with a file of settings, whatever the environment and flags may add.

    Args:
        path: of the file.
        loading: is told of each model that could be loaded; None to load none.

    Returns:
        The faults, in the order of the file's lines.
    """
    try:
        values = config.read(path)  # first: its words say what is wrong with a file
        file = _File(Path(path).read_text(encoding="utf-8"), values)
    except ConfigError as error:
        where = re.search(r"at line (\d+)", str(error))
        return [Fault(int(where[1]) if where else 0, str(error))]
    wrong = config.faults_of(file.values)
    names = {name for name, _ in wrong}
    sound = Settings.model_validate({name: value for name, value in file.values.items() if name not in names})
    found = [Fault(file.line_of(name), words) for name, words in wrong]
    found += _faults_of_models(file, sound.models)
    found += [Fault(file.line_of(setting), words) for setting, words in _faults_of_all(sound)]
    if not found and loading:
        found = _faults_of_loading(file, sound, loading)
    return sorted(found)


def _faults_of_models(file: _File, named: Sequence[str]) -> Iterator[Fault]:
    seen: set[str] = set()
    for text in named:
        try:
            spec = models.parse(text)
            models.search_current_folder(spec)
            models.check(spec)
        except ConfigError as error:
            yield Fault(file.line_of("models", text), f"models: {_about(text, error)}")
            continue
        if spec.name in seen:
            words = f'models: two are called "{spec.name}": name one as NAME={spec.origin}'
            yield Fault(file.line_of("models", text), words)
        seen.add(spec.name)


def _about(text: str, error: ConfigError) -> str:
    return str(error) if text in str(error) else f'model "{text}": {error}'


def _faults_of_all(settings: Settings) -> Iterator[tuple[str, str]]:
    """Look at what settings say of the world, and of one another."""

    def folder() -> None:
        if settings.model_folder and not Path(settings.model_folder).is_dir():
            raise ConfigError(f"model_folder = {settings.model_folder}: there is no such folder")

    looks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("device", lambda: devices.devices_named(settings.device)),
        ("address", lambda: auth.check(settings.model_copy(update={"metrics_address": None}))),
        ("metrics_address", lambda: auth.check(settings.model_copy(update={"address": LOCAL}))),
        ("tls_cert" if settings.tls_cert else "tls_key", lambda: auth.credentials(settings)),
        ("tokens_file", lambda: settings.tokens_file and auth.tokens_file(settings.tokens_file)),
        ("model_folder", folder),
        ("", add_plugins),
    )
    for setting, look in looks:
        try:
            look()
        except ConfigError as error:
            yield setting, str(error)


def _faults_of_loading(file: _File, settings: Settings, loaded: Told) -> list[Fault]:
    found = []
    device = devices.devices_named(settings.device)[0]
    for text in settings.models:
        try:
            loaded(_loaded(models.parse(text), device))
        except ConfigError as error:
            found.append(Fault(file.line_of("models", text), f"models: {_about(text, error)}"))
    return found


def _loaded(spec: ModelSpec, device: str) -> ModelInfo:
    """Load a model, and let it go again."""
    try:
        return models.load(spec, device).info
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's module does
        raise ConfigError(f"model {spec.name} ({spec.origin}): {type(error).__name__}: {error}") from error
