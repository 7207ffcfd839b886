"""Programs of the benchmarks, forked from a process that has imported torch: for a new one that takes seconds."""

import contextlib
import os
import subprocess
import sys

import fork_server

PROGRAM = """
import os, runpy, sys

number, way, *arguments = sys.argv[1:]
os.dup2(int(number), 0)
os.close(int(number))
sys.stdin = os.fdopen(0, closefd=False)
if way == "-m":
    sys.argv[:] = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
elif way == "-c":
    sys.argv[:] = ["-c", *arguments[1:]]
    exec(arguments[0], {"__name__": "__main__"})
else:
    sys.argv[:] = [way, *arguments]
    runpy.run_path(way, run_name="__main__")
"""
"""Program that gets its standard input from a file descriptor, and is then what the words after `python` say."""


class Popen:
    """A forked program of Python with pipes, with the attributes of `subprocess.Popen` that benchmarks use."""

    def __init__(self, command, *, stdin, stdout, stderr=None, cwd=None, env=None, text=False):
        assert (command[0], stdin, stdout) == (sys.executable, subprocess.PIPE, subprocess.PIPE)
        (given, own_input), (own_output, output) = os.pipe(), os.pipe()
        self.stdin, self.stdout = (
            os.fdopen(own_input, "w" if text else "wb"),
            os.fdopen(own_output, "r" if text else "rb"),
        )
        words = (PROGRAM, given, *command[1:])
        how = {"cwd": cwd, "environment": env, "stdout": output, "stderr": stderr, "pass_fds": (given,)}
        self._process = fork_server.start(*words, **how)
        os.close(given)
        os.close(output)

    def __getattr__(self, name):
        return getattr(self._process, name)

    def communicate(self, timeout=None):
        self.stdin.close()
        self.wait(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):  # the program ended without reading all
                pipe.close()
        self.wait()


def run(command, *, stdout, env, text, check):
    """Run a program of Python to its end, as `subprocess.run` does."""
    assert (stdout, text, check) == (subprocess.PIPE, True, True)
    with Popen(command, stdin=subprocess.PIPE, stdout=stdout, env=env, text=text) as process:
        process.stdin.close()
        shown = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, shown)
    return subprocess.CompletedProcess(command, process.returncode, shown)


class Forking:
    """Names of `subprocess` that benchmarks use, with forked programs."""

    Popen, PIPE, TimeoutExpired, run = Popen, subprocess.PIPE, subprocess.TimeoutExpired, staticmethod(run)


def fork(patch, *modules):
    """Let modules of the benchmarks fork the programs that they start with `Popen` or `run`."""
    for module in modules:
        patch.setattr(module, "subprocess", Forking)
