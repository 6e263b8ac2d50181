"""The two processes as fixtures: started once a file, and again when a test lost them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pair


@pytest.fixture(scope="module")
def _pairs() -> Iterator[list[Pair]]:
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.close()


@pytest.fixture
def pair(_pairs: list[Pair]) -> Pair:
    """The file's two processes; new ones when an earlier test lost them."""
    if not _pairs or not _pairs[-1].alive:
        _pairs.append(Pair())
    return _pairs[-1]
