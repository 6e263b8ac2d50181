"""What ends when a program lets go of it: finalizers run where eager runs them, and nothing is kept alive."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """What ends does so with its last reference, not when garbage happens to be collected."""
    gc.disable()
    yield
    gc.enable()


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


def _seen_weakly() -> Any:
    made = Plain()
    seen, also = weakref.ref(made), weakref.proxy(made)
    there = seen() is made
    del made
    return there, seen() is None, weakref.ref(Plain())() is None, type(also).__name__


class Plain:
    pass


def test_a_weak_reference_to_what_a_call_makes() -> None:
    assert dynamotor.compile(_seen_weakly, backend="eager")() == _seen_weakly()


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


def _ends_a_loop(x: torch.Tensor) -> torch.Tensor:
    held = SEEN[0]()
    for _ in range(1):
        print(end="")
    return x + len(held.sizes)


def _asks_for_what_is_not_there(x: torch.Tensor) -> torch.Tensor:
    held = SEEN[0]()
    return x + len(held.sizes) + getattr(held, "more", 0) + len(list(map(int, held.sizes)))


def _runs_eager(x: torch.Tensor) -> torch.Tensor:
    _started()
    return x + len(SEEN[0]().sizes)


@pytest.mark.parametrize(
    "function", [_raises, _breaks, _ends_a_loop, _asks_for_what_is_not_there, _runs_eager]
)
def test_a_capture_keeps_nothing_alive(function: Callable[..., Any]) -> None:
    held = Held()
    SEEN[:] = [weakref.ref(held)]
    compiled = dynamotor.compile(function, backend="eager")
    with contextlib.suppress(ValueError):
        compiled(torch.ones(2))
    del held
    assert SEEN[0]() is None


class Weights:
    def __init__(self) -> None:
        self.w, self.rows = torch.ones(2), [torch.ones(2)]


MODEL: Any = None


def _reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * MODEL.w + MODEL.rows[0]


def _reads_it_twice(x: torch.Tensor) -> torch.Tensor:
    x = x * MODEL.w
    print(end="")
    return x + MODEL.rows[0]


def _two() -> int:
    return 2 + 0 * len(LOG)


def _calls_a_function_of_its_module(x: torch.Tensor) -> torch.Tensor:
    """The values of the function and of the globals that lead to it refer to each other."""
    x = x * MODEL.w * _two()
    print(end="")
    return x + MODEL.rows[0]


@pytest.mark.parametrize("function", [_reads_a_global, _reads_it_twice, _calls_a_function_of_its_module])
def test_a_global_that_is_replaced_is_let_go_at_once(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries held what their guards had last seen until the next call."""
    compiled, x = dynamotor.compile(function), torch.randn(2)
    for value in (1.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "MODEL", Weights())
        MODEL.w.fill_(value)
        seen = [weakref.ref(MODEL), weakref.ref(MODEL.w), weakref.ref(MODEL.rows[0])]
        for _ in range(2):
            torch.testing.assert_close(compiled(x), function(x))
        monkeypatch.undo()
        assert [ref() for ref in seen] == [None] * 3


def test_what_a_guard_asks_may_replace_what_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restless:
        @property
        def kind(self) -> int:
            globals()["MODEL"] = Weights()
            return 2

    def f(x: torch.Tensor, restless: Restless) -> torch.Tensor:
        return x * MODEL.w * restless.kind + MODEL.rows[0]

    monkeypatch.setitem(globals(), "MODEL", Weights())
    compiled, x = dynamotor.compile(f), torch.randn(2)
    for _ in range(4):
        torch.testing.assert_close(compiled(x, Restless()), f(x, Restless()))


def begun(n: int) -> Iterator[int]:
    try:
        yield from range(n)
    finally:
        LOG.append("closed")


def replaces_an_error(x: torch.Tensor, box: types.SimpleNamespace) -> torch.Tensor:
    try:
        numbers = begun(3)
        LOG.append(str(next(numbers)))
        raise ValueError
    except ValueError as error:
        box.error = error
        LOG.append("caught")
    return x + 1


def test_an_error_that_is_replaced_lets_go_of_its_frames() -> None:
    found = []
    for run in (replaces_an_error, dynamotor.compile(replaces_an_error, backend="eager")):
        LOG.clear()
        box = types.SimpleNamespace()
        for _ in range(3):
            run(torch.ones(2), box)
        found.append(list(LOG))
    assert found[0] == found[1]


def raises_in_a_handler(x: torch.Tensor) -> None:
    numbers = begun(3)
    try:
        try:
            raise ValueError
        except ValueError:
            raised_behind(x)
    except RuntimeError:
        pass
    LOG.append(str(next(numbers)))


def raised_behind(x: torch.Tensor) -> None:
    x.t()
    raise RuntimeError


def test_an_error_raised_while_another_is_handled_lets_go_of_its_frames() -> None:
    compiled = dynamotor.compile(raises_in_a_handler, backend="eager")
    for _ in range(2):
        LOG.clear()
        compiled(torch.ones(2, 2))
        assert LOG == ["0", "closed"]


@dynamotor.disable
def left_alone(kind: Any = Plain) -> Any:
    return kind()


def _a_folder() -> bool:
    folder = tempfile.TemporaryDirectory()
    path = folder.name
    left_alone()
    there = os.path.exists(path)
    left_alone()
    return there and os.path.exists(path)


def _a_folder_of_an_inlined_call() -> tuple[bool, bool]:
    return _a_folder(), _a_folder()


def _seen_weakly_behind_breaks() -> tuple[bool, bool]:
    one = left_alone()
    inside = [left_alone()]
    seen = [weakref.ref(one), weakref.ref(inside[0])]
    left_alone()
    alive = [ref() is not None for ref in seen]
    left_alone()
    one = None
    left_alone()
    return *alive, seen[0]() is None


@pytest.mark.parametrize("part", [_a_folder, _a_folder_of_an_inlined_call, _seen_weakly_behind_breaks])
def test_a_variable_that_nothing_reads_holds_its_object_behind_a_break(part: Callable[[], Any]) -> None:
    compiled = dynamotor.compile(lambda x: (x * 2, part()), backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2))[1] == part()
