"""The garbage collector paused while compiling: it would walk every object of torch several times and free
nothing.

>>> with collector_paused():
...     compile_something()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection inside; nothing changes when the collector is off already (or paused further
    out).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
