"""Pages of the documentation as tests: their code blocks run in order, as a reader would run them.

Sybil finds the blocks, and this module runs them:

- `python` blocks of a page share their names. They may await.
- `sh` blocks run in bash. What they export stays for the later blocks. A line that is nothing but a command of camserve
  runs in a fork of a process that has torch imported, which saves seconds. So does a block that is such a command with
  `|| echo "exit code $?"`. `pip install` and `make` are not run.
- `camserve-server serve` starts a server, which runs until the end of the page, or until the page starts another one on
  the same port. Pages without a server of their own use one with the default model, which also serves HTTP and metrics:
  if a page starts such a server, it is this one.
- A `text` block is the output of the block before it, in which "..." stands for anything.
- `<!-- skip: next "reason" -->`: the next block is not run. Python is compiled, and commands of camserve are parsed.
- `<!-- invisible-code-block: python` prepares what readers already have.

The documented ports are replaced by those that the servers report.
"""

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from unittest import SkipTest

import click
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

import camserve
import camserve.cli
import fork_server
from camserve_server import Explainer
from camserve_server.cli import commands
from server_process import server_process

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts)]

PROGRAMS = {"camserve": "from camserve.cli import main; main()", "camserve-server": fork_server.SERVER}
FORKS_WORKERS = """
from camserve_server.workers import fork_server
fork_server.open_fork_server()
"""
"""The start of a program whose worker process is a fork, and need not import torch."""
GROUPS = {"camserve": camserve.cli.main, "camserve-server": commands.program}
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

PORT = re.compile(
    r"(?P<before>\b(?:localhost|127\.0\.0\.1|0\.0\.0\.0):|--(?:http|metrics)-address[ =])(?P<port>\d{4,5})\b"
)
ADDRESS = re.compile(r"--(http-|metrics-|)address[ =]\S*?(\d+)(?!\S)")
CLIENT = re.compile(r"""(Client\("localhost:50051")(?![^)]*timeout=)""")
SERVE = re.compile(r"^((?:\w+=\S* )*camserve-server serve\b(?:\\\n|[^\n])*)$", re.MULTILINE)
COMMAND = re.compile(r"^(?:\w+=\S* )*camserve.*$", re.MULTILINE)
SCRIPT = re.compile(r"[|&;<>$`*()\\]|^(?:cd|export|for|if|while) ", re.MULTILINE)
"""What makes a block a script for bash."""
WITH_EXIT_CODE = re.compile(
    r"""(?P<command>camserve(?:-server)?[ ](?:[^\n|&;<>$`*()\\]|\\\n)*) \|\| \s* echo[ ]"exit\ code\ \$\?"\s*""",
    re.VERBOSE,
)
"""A script that needs no bash: a command of camserve that may fail."""


class Servers:
    """Servers of a page; the port of each replaces the one that its text names."""

    def __init__(self):
        self.ports, self._running = {}, {}

    def start(self, words, folder):
        """Start `camserve-server` with these words, and wait until it serves."""
        text = shlex.join(words)
        named = {"": 50051} | {kind: int(port) for kind, port in ADDRESS.findall(text)}
        if earlier := self._running.pop(named[""], None):  # a reader stops it before
            earlier.close()
        self.ports |= dict.fromkeys(named.values(), 0)
        _, *flags = shlex.split(self.replaced(text))
        self._running[named[""]] = stack = contextlib.ExitStack()
        server = stack.enter_context(server_process((), *flags, forked=True, cwd=folder))
        addresses = {"": "address", "http-": "http_address", "metrics-": "metrics_address"}
        for kind, port in named.items():
            self.ports[port] = getattr(server, addresses[kind]).rpartition(":")[2]

    def shared(self, words):
        """Return true if a running server has these words: one of the default model, at most with more ports."""
        ports = dict(zip(words[1::2], words[2::2], strict=False))
        return ports.keys() <= {"--http-address", "--metrics-address"} and {*map(int, ports.values())} <= {*self.ports}

    def replaced(self, text):
        """Return a text of a page with the ports of these servers."""
        return PORT.sub(lambda found: found["before"] + str(self.ports.get(int(found["port"]), found["port"])), text)

    def stop(self):
        for stack in self._running.values():
            stack.close()


class Reader:
    """Reader of a page, who runs its blocks in a folder.

    Args:
        folder: the folder.
        environment: sets the variables of the environment, as pytest's `monkeypatch` does.
        ports: the ports of running servers, by those that pages name.
        later: a text of the page, and the ports that replace these in the blocks after it; None for none.

    Attributes:
        output: standard output of the last block.
        skipped: reasons of the blocks that were not run.
    """

    def __init__(self, folder, environment, ports, later=None):
        self.folder, self._environment, self.output, self.skipped = folder, environment, "", []
        self._servers, self._later = Servers(), later
        self._use(ports)

    def _use(self, ports):
        self._servers.ports |= ports
        self._environment.setenv("CAMSERVE_SERVER", self._servers.replaced("localhost:50051"))

    def read(self, path):
        """Run the blocks of a page in order.

        Raises:
            AssertionError: a block failed, or its output differs from the page; the message says where.
        """
        run = {"python": self._run_python, "sh": self._run_shell, "text": self._compare}
        parsers = [SkipParser(), *(CodeBlockParser(language, function) for language, function in run.items())]
        document = Sybil(parsers, path=str(ROOT)).parse(path)
        with contextlib.ExitStack() as stack:
            stack.callback(self._servers.stop)
            document.namespace |= {"__name__": "__main__", "stack": stack}
            stack.callback(close_all, document.namespace)
            for example in document:
                if self._later and self._later[0] in document.text[: example.start]:
                    self._use(self._later[1])
                    self._later = None
                self._run_example(example)

    def _run_example(self, example):
        try:
            example.evaluate()
        except SkipTest as skip:
            self.skipped.append(str(skip))
            check(example)
        except Exception as error:
            message = f"{example.path}:{example.line}: {type(error).__name__}: {error}\n\n{example.parsed}"
            raise AssertionError(message) from error

    def _run_python(self, example):
        source = self._servers.replaced(CLIENT.sub(r"\1, timeout=600", str(example.parsed)))
        padded = "\n" * (example.line + example.parsed.line_offset) + source
        code = compile(padded, example.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            result = eval(code, example.namespace)  # noqa: S307 -- the page's own code
            if inspect.iscoroutine(result):
                asyncio.run(result)
        self.output = output.getvalue()

    def _run_shell(self, example):
        self.output = ""
        for number, part in enumerate(SERVE.split(str(example.parsed))):
            if number % 2:
                self._serve(part)
            else:
                self._run_commands(part)

    def _serve(self, command):
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        assignments = list(assignments_of(words))
        words = words[len(assignments) + 1 :]
        if assignments or not self._servers.shared(words):
            with temporary(assignments):
                self._servers.start(words, self.folder)
            self._use({})

    def _run_commands(self, text):
        text = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
        text = re.sub(r"^(?:pip install|make) .*$", "", text, flags=re.MULTILINE)
        text = self._servers.replaced(text)
        if failing := WITH_EXIT_CODE.fullmatch(text):
            self._run_and_show_exit_code(failing["command"])
            return
        if SCRIPT.search(re.sub(r" #.*$", "", text, flags=re.MULTILINE)):
            self._run_bash(text)
            return
        for line in filter(None, text.splitlines()):
            words = shlex.split(line, comments=True)
            if words[0] in PROGRAMS:
                program = FORKS_WORKERS * ("--resume" in words) + PROGRAMS[words[0]]
                self._finish(fork_server.run(program, *patient(words)[1:], cwd=self.folder), line)
            else:
                self._run_bash(line)

    def _run_and_show_exit_code(self, command):
        words = shlex.split(command.replace("\\\n", " "))
        process = fork_server.run(PROGRAMS[words[0]], *patient(words)[1:], cwd=self.folder)
        self.output += process.stdout + (f"exit code {process.returncode}\n" if process.returncode else "")

    def _run_bash(self, script):
        with tempfile.NamedTemporaryFile("r") as environment:
            saving = f"trap 'env -0 > {shlex.quote(environment.name)}' EXIT\n"
            self._finish(
                subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", saving + script],
                    cwd=self.folder, capture_output=True, text=True, check=False,
                ),
                script,
            )  # fmt: skip
            for item in filter(None, environment.read().split("\0")):
                name, _, value = item.partition("=")
                if name.startswith("CAMSERVE_") or (name not in os.environ and name not in {"_", "SHLVL"}):
                    self._environment.setenv(name, value)

    def _finish(self, process, command):
        self.output += process.stdout
        assert process.returncode == 0, f"exit code {process.returncode} of {command}\n{process.stdout}{process.stderr}"

    def _compare(self, example):
        expected = self._servers.replaced(str(example.parsed))
        checker = doctest.OutputChecker()
        assert checker.check_output(expected, self.output, OUTPUT_FLAGS), f"the output is:\n{self.output}"


def patient(words):
    """Give a command of the client more than its 30 s, for a busy machine."""
    command = GROUPS[words[0]].commands.get(words[1])
    options = {option for parameter in command.params for option in parameter.opts} if command else set()
    return [*words, "--timeout", "600"] if "--timeout" in options - set(words) else words


def close_all(names):
    """Close the clients and explainers of a page."""
    for value in names.values():
        if isinstance(value, camserve.Client | Explainer):
            value.close()


def assignments_of(words):
    """Yield the assignments of variables before a command."""
    for word in words:
        if not re.match(r"\w+=", word):
            return
        yield word


@contextlib.contextmanager
def temporary(assignments):
    """Set environment variables inside the block."""
    before = dict(os.environ)
    os.environ.update(word.split("=", 1) for word in assignments)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check(example):
    """Compile a block of Python that is not run, or parse the commands of camserve in a shell script."""
    text, language = str(example.parsed), example.region.lexemes["arguments"]
    if language == "python":
        compile(text, example.path, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if language == "sh":
        for line in COMMAND.findall(text.replace("\\\n", " ")):
            check_command(line)


def check_command(line):
    """Check the words of a command of camserve.

    Raises:
        AssertionError: the command has no such option or argument.
    """
    words = shlex.split(line, comments=True)
    words = words[len(list(assignments_of(words))) :]
    group, rest = GROUPS[words[0]], words[1:]
    while isinstance(group, click.Group) and rest and not rest[0].startswith("-"):
        command = group.commands.get(rest[0])
        assert command, f"{line}: no command {rest[0]}"
        group, rest = command, rest[1:]
    known = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option in known, f"{line}: no option {option}"
