"""The garbage collector paused while compiling: it would walk every object of torch several times and free
nothing.

Nor does it walk new objects when the pause ends (0.1 to 0.3 s behind a cold first call): those objects are
old from the start, most of them belong to the program that was compiled. Cycles among them wait for a full
collection, which is due after so many objects.

>>> with collector_paused():
...     compile_something()
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

MOST = 3_000_000  # objects that pauses may leave unseen before a full collection
_unseen = 0
_frozen = False  # the user has frozen objects, which would thaw; to ask walks over all of them


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
        age()
        gc.enable()


def age() -> None:
    """Move all objects to the oldest generation without looking at them; collect them all where there have
    been too many.
    """
    global _unseen, _frozen
    _unseen += gc.get_count()[0]
    if _unseen > MOST:
        _unseen = 0
        gc.collect()
    elif not (_frozen := _frozen or gc.get_freeze_count() > 0):
        gc.freeze()
        gc.unfreeze()
