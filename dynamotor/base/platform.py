"""The package's requirements, checked when it is imported: the Python version and the built
C extension.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from .errors import CaptureError

# Rows of capture/opcode_tables.py, and the versions that csrc/python_compat.h knows.
SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))


def _known() -> str:
    *first, last = (f"{a}.{b}" for a, b in SUPPORTED_PYTHONS)
    return f"{', '.join(first)} or {last}"


class PlatformError(CaptureError, ImportError):
    """DM160, DM201, DM202, DM695: the package cannot work in this Python, so it is not imported."""


def _hidden_package() -> Path | None:
    """The folder of an installed package with its extension, where this one is a source tree before it."""
    from importlib import metadata  # takes time, and only an error needs it

    endings = importlib.machinery.EXTENSION_SUFFIXES
    for distribution in metadata.distributions(name="dynamotor"):
        folder = Path(str(distribution.locate_file("dynamotor")))
        if any((folder / f"_C{ending}").exists() for ending in endings):
            return folder.parent
    return None


def check_platform() -> None:
    """Raise a coded error where the compiler cannot work: it reads CPython's bytecode and frames, which each
    version changes.
    """
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in SUPPORTED_PYTHONS:
        raise PlatformError(
            "DM201",
            f"dynamotor does not support {sys.implementation.name} {sys.version.split()[0]}",
            why="functions are captured from CPython's bytecode, which differs between versions",
            cure=f"use CPython {_known()}",
        )
    if "t" in getattr(sys, "abiflags", ""):
        raise PlatformError(
            "DM160",
            f"dynamotor does not support the free-threaded build of CPython {sys.version.split()[0]}",
            why="guards and frames are read without locks, which is only safe with the GIL",
            cure=f"use CPython {_known()} as built by default",
        )
    if importlib.util.find_spec("dynamotor._C") is None:
        here, hidden = Path(__file__).parents[2], _hidden_package()
        raise PlatformError(
            "DM202",
            f"the C extension dynamotor._C is not built in {here}",
            why="the package is used from a source tree, or was built for another Python",
            cure=f"start Python in another folder than {here}, which hides the package installed in {hidden}"
            if hidden
            else "run `pip install -e .` (or `python setup.py build_ext --inplace`) with this Python",
        )


check_platform()
