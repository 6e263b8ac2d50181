"""Pauses the garbage collector while the package is imported: it would walk many new objects that stay,
which takes a third of the time.
"""

from __future__ import annotations

import gc

_was_on = gc.isenabled()
gc.disable()


def done() -> None:
    """The import has ended."""
    if _was_on:
        gc.enable()
