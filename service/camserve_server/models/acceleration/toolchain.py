"""Check the requirements of `torch.compile`: a compiler, headers, and a folder from which compiled code can be loaded.

For a CPU torch compiles C++. For a GPU Triton compiles C: a Python module that calls the driver. Both load the
resulting shared library. Triton has its own assembler and needs no CUDA toolkit. The check runs before compiling, so
that the log has one line about the missing requirement instead of one failure per module.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def missing_for(device: str) -> str:
    """Return the reason why compiling for a device cannot succeed, or an empty string."""
    if sys.platform == "win32":
        return ""
    if device != "cpu":
        return _missing_for_triton() if device.startswith("cuda") else ""
    default = "clang++" if sys.platform == "darwin" else "g++"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    return _no_compiler("C++", [os.environ.get("CXX", default)]) or _not_loadable(folder, "TORCHINDUCTOR_CACHE_DIR")


def _missing_for_triton() -> str:
    """Return the first missing requirement of Triton, each looked up where Triton looks for it, or an empty string."""
    if not find_spec("triton"):
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 -- as in Triton; it never fails
    return (
        _no_compiler("C", compilers)
        or ("" if headers.exists() else f"Python's headers are not installed: there is no {headers}")
        or _not_loadable(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache", "TRITON_CACHE_DIR")
    )


def _no_compiler(language: str, names: Sequence[str]) -> str:
    if any(map(shutil.which, names)):
        return ""
    return f"there is no {language} compiler: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def _not_loadable(folder: str, variable: str) -> str:
    """Return an error text if a folder, or its nearest existing parent, is mounted noexec; else an empty string."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.access(parent, os.F_OK))
    if not os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):  # only Linux has the flag
        return ""
    return f"compiled code cannot be loaded from {path}, which is mounted noexec; {variable} names another folder"
