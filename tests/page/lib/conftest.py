"""Run the page's modules in Node.js."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import needs

LIBRARY = Path(__file__).parents[3] / "clients/python/camserve/page/lib"
NODE = shutil.which("node")


ANSWER = """
import { createInterface } from "node:readline";
const Function = (async () => {}).constructor;
for await (const line of createInterface({ input: process.stdin })) {
  const { body, values } = JSON.parse(line);
  const names = { ...modules, ...values };
  let answer;
  try {
    answer = { result: await new Function(...Object.keys(names), `"use strict"; ${body}`)(...Object.values(names)) };
  } catch (error) {
    answer = { error: error.stack };
  }
  process.stdout.write(JSON.stringify(answer) + "\\n");
}
"""


@pytest.fixture(scope="session")
def node():
    """Process of Node.js that answers each line of its input: starting one for each test took half of their time."""
    if NODE is None:
        pytest.skip(needs.NODE)
    modules = {file.stem: file.as_uri() for file in LIBRARY.glob("*.js")}
    imports = "".join(f'import * as {name} from "{address}";\n' for name, address in modules.items())
    program = f"{imports}const modules = {{ {', '.join(modules)} }};\n{ANSWER}"
    command = [NODE, "--input-type=module", "-e", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def js(node):
    """Function that runs the body of a function on values, with the modules as constants; return its result."""

    def run(body, **values):
        node.stdin.write(json.dumps({"body": body, "values": values}) + "\n")
        answer = json.loads(node.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    return run
