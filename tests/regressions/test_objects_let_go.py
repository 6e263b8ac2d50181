"""What ends when a program lets go of it: finalizers run where eager runs them, and nothing is kept alive."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor

LOG: list[str] = []
SEEN: list[Any] = []


class Finalized:
    def __del__(self) -> None:
        LOG.append("ended")


def _started() -> Iterator[int]:
    def numbers() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            LOG.append("ended")

    generator = numbers()
    next(generator)
    return generator


def _attribute(box: Any) -> None:
    box.held = None


def _item(box: Any) -> None:
    box.table["k"] = None


def _deleted(box: Any) -> None:
    box.table.pop("k", None)


def _first(box: Any) -> None:
    box.rows[0] = None


def _cleared(box: Any) -> None:
    box.rows.clear()


@pytest.mark.parametrize("let_go", [_attribute, _item, _deleted, _first, _cleared])
@pytest.mark.parametrize("make", [Finalized, _started])
def test_a_write_that_ends_an_object_runs_its_finalizer_there(
    let_go: Callable[[Any], None], make: Callable[[], Any]
) -> None:
    def f(box: Any, x: torch.Tensor) -> torch.Tensor:
        if box.active:
            let_go(box)
        LOG.append("after")
        return x + 1

    logs = []
    for run in (f, dynamotor.compile(f, backend="eager")):
        LOG.clear()
        for active in (False, True):
            place = {_attribute: "held", _first: "rows", _cleared: "rows"}.get(let_go, "table")
            box = types.SimpleNamespace(active=active, held=None, table={"k": None}, rows=[None])
            for filled in (False, True):  # the guards of the first call must see the finalizer
                if filled:
                    content: Any = {"held": make, "rows": lambda: [make()], "table": lambda: {"k": make()}}
                    setattr(box, place, content[place]())
                run(box, torch.ones(2))
                LOG.append("returned")
            box = None
        logs.append(list(LOG))
    assert logs[0] == logs[1]


class Held:
    sizes = (1, 2)


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(SEEN[0]().sizes)


def _breaks(x: torch.Tensor) -> torch.Tensor:
    held = SEEN[0]()
    for n in held.sizes:
        print(end="")
        x = x + n
    return x


def _runs_eager(x: torch.Tensor) -> torch.Tensor:
    _started()
    return x + len(SEEN[0]().sizes)


@pytest.mark.parametrize("function", [_raises, _breaks, _runs_eager])
def test_a_capture_keeps_nothing_alive(function: Callable[..., Any]) -> None:
    held = Held()
    SEEN[:] = [weakref.ref(held)]
    compiled = dynamotor.compile(function, backend="eager")
    with contextlib.suppress(ValueError):
        compiled(torch.ones(2))
    del held
    assert SEEN[0]() is None
