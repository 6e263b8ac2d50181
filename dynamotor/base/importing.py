"""Pauses the garbage collector while the package is imported: it would walk many new objects that stay,
which takes a third of the time, and once more behind the import.
"""

from __future__ import annotations

import gc

from .collector import age

_was_on = gc.isenabled()
gc.disable()


def done() -> None:
    """The import has ended."""
    if _was_on:
        age()
        gc.enable()
