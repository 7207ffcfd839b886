"""Fake CUDA driver: a library named libcuda.so.1 that finds no GPU and whose start tests control.

libcudart first gets the driver's version and then calls cuInit; the fake implements these two calls. It logs
the process in which it starts, and its start ends when the test allows it.
"""

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import needs

SOURCE = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char *word) {
    char line[64];
    int file = open(getenv("FAKE_CUDA_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (write(file, line, snprintf(line, sizeof line, "%d %s\n", getpid(), word)) < 0) abort();
    close(file);
}

int cuInit(unsigned flags) {
    static int started;
    if (!started) {
        note("starts");
        while (access(getenv("FAKE_CUDA_GATE"), F_OK)) usleep(2000);
        note("started");
        started = 1;
    }
    return 100;  /* CUDA_ERROR_NO_DEVICE */
}

int cuDriverGetVersion(int *version) { *version = atoi(getenv("FAKE_CUDA_VERSION")); return 0; }

int cuGetExportTable(const void **table, const void *id) { return 1; }  /* CUDA_ERROR_INVALID_VALUE */

static int unknown(void) { return 801; }  /* CUDA_ERROR_NOT_SUPPORTED */

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int *status) {
    *found = !strcmp(name, "cuInit") ? (void *)cuInit
        : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
        : !strcmp(name, "cuGetExportTable") ? (void *)cuGetExportTable
        : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2
        : (void *)unknown;
    return 0;
}
"""

NAME = "libcuda.so.1"
"""The name in the library, too: by it, the dynamic linker finds a library that the process has already loaded."""


@dataclass
class Driver:
    """A fake driver and its log.

    Attributes:
        folder: the folder of the library and its log.
        environment: variables of the library.
    """

    folder: Path
    environment: dict[str, str]

    @property
    def search_path(self):
        """The variable with which a new process loads the library."""
        return {"LD_LIBRARY_PATH": str(self.folder)}

    @property
    def load(self):
        """A statement that loads the library: for a forked process, which reads no LD_LIBRARY_PATH."""
        return f"import ctypes; ctypes.CDLL({str(self.folder / NAME)!r})"

    def go(self):
        """Allow the start, in all processes."""
        (self.folder / "gate").touch()

    def processes(self, word):
        """Return the number of log entries of a word, "starts" or "started", by process id."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(int(line.split()[0]) for line in lines if line.split()[1] == word)


def compile_driver(folder, version=99_000):
    """Compile a driver for a version of CUDA, such as 12020 for 12.2; skip the test without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip(needs.COMPILER)
    source = folder / "driver.c"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", folder / NAME, source], check=True)
    fakes = {"LOG": folder / "log", "GATE": folder / "gate", "VERSION": version}
    environment = {f"FAKE_CUDA_{name}": str(value) for name, value in fakes.items()}
    return Driver(folder, environment)
