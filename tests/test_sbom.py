"""The SBOM of a release names the packages of the image with their licences."""

import json
import re
import sys
from types import ModuleType
from unittest import mock

import pytest
from tools import sbom

ROOT = sbom.PAGE.parents[1]
LOCK = (ROOT / "service" / "requirements.lock").read_text(encoding="utf-8")
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE))
PAGE = "| package | version | part of | licence |\n|---|---|---|---|\n| Jinja2 | 3.1.6 | server | BSD License |\n"
PAGE += "| typing_extensions | 4.16.0 | client, server | PSF-2.0 |\n| cuda-toolkit | 13.0 | server | none said |\n"


def entry(name, version):
    """Return a package as cyclonedx-py writes it."""
    line = {"bom-ref": "requirements-L9", "description": "requirements line 9: ..."}
    return {**line, "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}


def document(*components):
    return {"metadata": {"component": {"bom-ref": "root"}}, "components": list(components), "dependencies": []}


@pytest.mark.parametrize(
    ("name", "version", "licence"),
    [
        ("jinja2", "3.1.6", "BSD License"),
        ("typing-extensions", "4.16.0", "PSF-2.0"),
        ("jinja2", "3.1.7", None),
        ("cuda-toolkit", "13.0", None),
        ("colorama", "0.4.6", None),
    ],
)
def test_licence_is_that_of_exactly_this_version(name, version, licence):
    (component,) = sbom.with_licences(document(entry(name, version)), PAGE)["components"]

    assert component.get("licenses") == (licence and [{"license": {"name": licence}}])


def test_packages_are_identified_by_their_url_and_not_by_a_line():
    made = sbom.with_licences(document(entry("jinja2", "3.1.6")), PAGE)

    assert "requirements" not in json.dumps(made)
    assert made["dependencies"] == [{"ref": "root"}, {"ref": "pkg:pypi/jinja2@3.1.6"}]


def test_table_has_the_licences_of_all_packages_of_the_image_for_linux():
    known = sbom.licences(sbom.PAGE.read_text(encoding="utf-8"))
    others = set(re.findall(r"^([\w.-]+)==\S+ ;[^\n]*sys_platform == '(?:win32|emscripten)'", LOCK, re.MULTILINE))

    assert {(name, version) for name, version in LOCKED.items() if name not in others} <= known.keys()


def test_invalid_document_is_an_error():
    """The validator is installed for releases only. Here it is replaced."""
    validation = ModuleType("cyclonedx.validation.json")
    validation.JsonStrictValidator = lambda _version: mock.Mock(validate_str=lambda text: text and f"wrong: {text}")
    schema = ModuleType("cyclonedx.schema")
    schema.SchemaVersion = mock.Mock()
    with mock.patch.dict(sys.modules, {"cyclonedx.schema": schema, "cyclonedx.validation.json": validation}):
        sbom.check("")
        with pytest.raises(SystemExit, match=r"the SBOM is not valid: wrong: \{\}"):
            sbom.check("{}")
