"""Checks, when the package is imported, that `dynamotor._C` was built from the C sources beside it: an older
one reads the package's tables by an older format, and crashes.
"""

from __future__ import annotations

from pathlib import Path

from .. import _C
from .platform import PlatformError
from .source_digest import source_digest

SOURCES = Path(__file__).resolve().parents[1] / "csrc"


def check_extension(built_from: str | None, sources: Path) -> None:
    """Raise a coded error for an extension built from other C sources than these. `built_from` is its digest:
    None for an extension older than digests, empty for one that a plain compiler call built.
    """
    wanted = source_digest(sources)
    if built_from not in ("", wanted) and wanted:
        raise PlatformError(
            "DM695",
            "the C extension dynamotor._C was built from other sources than those of this package",
            why=f"it was built before {sources} changed, or for another version of dynamotor",
            cure="run `pip install -e .` (or `python setup.py build_ext --inplace --force`) with this Python",
        )


check_extension(getattr(_C, "built_from", None), SOURCES)
