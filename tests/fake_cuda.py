"""A driver of CUDA's without a GPU: a library that is found as libcuda.so.1, and does what a test wants of it.

libcudart asks a driver for its version and then to start, before anything else; so far this one goes. It writes down
which process it starts in, and has started once the test says so.
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


@dataclass
class Driver:
    """A driver, and what it did.

    Attributes:
        folder: that it is in.
        environment: variables by which a process finds it.
    """

    folder: Path
    environment: dict[str, str]

    def go(self):
        """Let it start, in whatever process."""
        (self.folder / "gate").touch()

    def processes(self, word):
        """Return how often it noted a word, "starts" or "started", by the id of the process."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(int(line.split()[0]) for line in lines if line.split()[1] == word)


def compiled(folder, version=99_000):
    """Return a driver for CUDA of a version, 12020 for 12.2, that finds no GPU; skip the test without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip(needs.COMPILER)
    source = folder / "driver.c"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    fakes = {"LOG": folder / "log", "GATE": folder / "gate", "VERSION": version}
    environment = {f"FAKE_CUDA_{name}": str(value) for name, value in fakes.items()}
    return Driver(folder, environment | {"LD_LIBRARY_PATH": str(folder)})
