"""Run the page's modules in Node.js."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import needs

LIBRARY = Path(__file__).parents[3] / "clients/python/camserve/page/lib"
NODE = shutil.which("node")


@pytest.fixture
def js():
    """Function that runs the body of a function on values, with the modules as constants; return its result."""
    if NODE is None:
        pytest.skip(needs.NODE)

    def run(body, **values):
        modules = {file.stem: file.as_uri() for file in LIBRARY.glob("*.js")}
        imports = "".join(f'import * as {name} from "{address}";\n' for name, address in modules.items())
        program = (
            f'{imports}import {{ readFileSync }} from "node:fs";\n'
            f"const {{ {', '.join(values)} }} = JSON.parse(readFileSync(0));\n"
            f"const result = await (async () => {{ {body} }})();\n"
            "process.stdout.write(JSON.stringify(result));"
        )
        command = [NODE, "--input-type=module", "-e", program]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
