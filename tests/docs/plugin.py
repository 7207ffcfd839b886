"""The plugin of examples/plugin, as if it were installed."""

import contextlib
import os
import sys
import tomllib
from pathlib import Path

from camserve_server import methods, running

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@contextlib.contextmanager
def installed(folder):
    """Make the plugin's modules and entry points available from a folder, without pip; take them away at the end."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (about / "METADATA").write_text(metadata)
    (about / "entry_points.txt").write_text("\n".join(lines))
    kept, paths = dict(methods.METHODS), [str(folder), str(EXAMPLE)]
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "camserve_example"]:
            del sys.modules[name]
        methods.METHODS.clear()
        methods.METHODS.update(kept)


def serve_example(stack):
    """Install the plugin in the working folder, and make a server that has it the default one of the client."""
    stack.enter_context(installed(Path("installed")))
    os.environ["CAMSERVE_SERVER"] = stack.enter_context(running("efficientnet_lite0?size=64"))
