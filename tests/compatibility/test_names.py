"""Every recorded public name still exists: in the client, the commands, the settings, the imports, the package."""

import importlib

import pytest

from compatibility import comparing, storage, surfaces

pytestmark = pytest.mark.slow
IMPORTS = storage.read("imports")
SETTINGS = storage.read("settings")


def test_client_has_every_recorded_name_signature_field_and_error():
    assert comparing.lost(storage.read("client"), surfaces.client()) == []


def test_programs_have_every_recorded_command_and_flag():
    assert comparing.lost(storage.read("commands"), surfaces.commands()) == []


def test_settings_have_every_recorded_name_type_range_and_default():
    assert comparing.lost(SETTINGS, surfaces.settings()) == []


def another(schema):
    """Return a value of a setting other than its default, as text and parsed."""
    schema = {**schema.get("anyOf", [{}])[0], **schema}  # the first of several types
    if "enum" in schema:
        value = next(choice for choice in schema["enum"] if choice != schema["default"])
        return value, value
    if schema["type"] == "boolean":
        return "true", True
    if schema["type"] in ("integer", "number"):
        value = schema["default"] + 1 if schema["default"] != schema.get("maximum") else schema["minimum"]
        return str(value), value
    if schema["type"] == "string":
        return "127.0.0.1:1234", "127.0.0.1:1234"
    items = ("one", "two") if "pattern" in schema["items"] else ("https://one.example", "https://two.example")
    return " ".join(items), items


@pytest.mark.parametrize("name", SETTINGS["settings"])
def test_environment_sets_every_recorded_setting(name):
    text, value = another(SETTINGS["settings"][name])

    assert surfaces.setting_of(name, {f"CAMSERVE_{name.upper()}": text}) == value


@pytest.mark.filterwarnings("ignore:import (Edit|View) from:DeprecationWarning")
@pytest.mark.parametrize("module", IMPORTS)
def test_recorded_names_are_imported_from_where_they_were(module):
    assert comparing.lost(IMPORTS[module], surfaces.imported(module, IMPORTS[module])) == []


def test_package_has_every_recorded_script_extra_and_entry_point():
    assert comparing.lost(storage.read("package"), surfaces.package()) == []


@pytest.mark.parametrize("target", storage.read("package")["scripts"].values())
def test_recorded_scripts_start(target):
    module, _, name = target.partition(":")

    assert callable(getattr(importlib.import_module(module), name))
