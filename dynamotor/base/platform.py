"""What the package needs from its surroundings, checked when it is imported: the Python version and the built
C extension.
"""

from __future__ import annotations

import importlib.util
import sys

from .errors import CaptureError

SUPPORTED_PYTHONS = ((3, 11), (3, 12))


def check_platform() -> None:
    """Raise a coded error where the compiler cannot work: it reads CPython's bytecode and frames, which each
    version changes.
    """
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in SUPPORTED_PYTHONS:
        known = " or ".join(f"{a}.{b}" for a, b in SUPPORTED_PYTHONS)
        raise CaptureError(
            "DM201",
            f"dynamotor does not support {sys.implementation.name} {sys.version.split()[0]}",
            why="functions are captured from CPython's bytecode, which differs between versions",
            cure=f"use CPython {known}",
        )
    if importlib.util.find_spec("dynamotor._C") is None:
        raise CaptureError(
            "DM202",
            "the C extension dynamotor._C is not built",
            why="the package is used from a source tree, or was built for another Python",
            cure="run `pip install -e .` (or `python setup.py build_ext --inplace`) with this Python",
        )


check_platform()
