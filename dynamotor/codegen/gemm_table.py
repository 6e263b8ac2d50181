"""The stored table of matrix products and convolutions: measurements on a GPU, and which other sizes
that speaks for.

>>> stored("NVIDIA H200 bf16 1x4096x3072x768 nt+bias > mul,normal_cdf reads nothing writes bf16")
Tiling(m=128, n=256, k=64, ...)

Written by `python -m bench.gpu_gemm`; a row without a tiling is one where the library was faster.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from .triton_gemm import Tiling

PATH = Path(__file__).with_name("gemm_table.json")
REACH = 2.0  # times as many samples, or as few, that a row still speaks for
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+) (\w)")


@functools.cache
def table() -> dict[str, Tiling | None]:
    """ "GPU label" → the tiling under which a template won, None where the library did."""
    rows = json.loads(PATH.read_text())["rows"]
    return {key: None if row is None else Tiling(**row) for key, row in rows.items()}


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """As if the table were empty: all is measured anew."""
    global table
    before, table = table, functools.cache(dict)
    _layers.cache_clear()
    try:
        yield
    finally:
        table = before
        _layers.cache_clear()


def knows(gpu: str) -> bool:
    """Whether anything was measured on such a GPU."""
    return any(key.startswith(f"{gpu} ") for key in table())


def stored(key: str) -> Tiling | None:
    """The table's entry of exactly this product, "GPU label"."""
    return table().get(key)


def nearest(key: str) -> Tiling | None:
    """Its entry of the same layer with the most similar number of samples, if that is in reach."""
    layer, samples = _layer(key)
    rows = _layers().get(layer, {})
    closest = min(rows, key=lambda n: abs(math.log(n / samples)), default=None)
    return rows[closest] if closest is not None and 1 / REACH <= closest / samples <= REACH else None


@functools.cache
def _layers() -> dict[str, dict[int, Tiling | None]]:
    found: dict[str, dict[int, Tiling | None]] = {}
    for key, tiling in table().items():
        layer, samples = _layer(key)
        found.setdefault(layer, {})[samples] = tiling
    return found


def _layer(key: str) -> tuple[str, int]:
    """A row's key without the size that the number of samples decides, and that size.

    It is the number of products where there are several, else the rows of the result; in a weight's gradient,
    whose first operand is transposed, it is the summed dimension.
    """
    match = _SIZES.search(key)
    if match is None:
        return key, 1
    sizes, layout = [int(n) for n in match.groups()[:4]], match.group(5)
    at = 0 if sizes[0] > 1 else 3 if layout == "t" else 1
    samples, sizes[at] = max(sizes[at], 1), 0
    return f"{key[: match.start()]}{sizes} {key[match.end() - 1 :]}", samples


def forget() -> None:
    """Read the table again."""
    table.cache_clear()
    _layers.cache_clear()
