"""A checkpointed function runs again in the backward: a change of the state that it reads is refused (DM252), any
other change is none of its business.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.base.errors import CaptureError

FACTOR, UNREAD = 2.0, 2.0
TABLE = {"factor": 2.0, "unread": 2.0}
ITEMS = [2.0]


class Holder:
    factor = 2.0

    def get(self) -> float:
        return self.factor


class OfClass(torch.nn.Module):
    factor = 2.0


HOLDER, MODULE = Holder(), OfClass()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.calls = torch.nn.Linear(3, 3), 2.0, 0

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.factor).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return checkpoint(self.part, x, use_reentrant=False).exp()


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "FACTOR = 7.0": lambda x: x * FACTOR,
    "TABLE['factor'] = 7.0": lambda x: x * TABLE["factor"],
    "ITEMS[0] = 7.0": lambda x: x * ITEMS[0],
    "ITEMS.append(1.0)": lambda x: x * sum(ITEMS),
    "HOLDER.factor = 7.0": lambda x: x * HOLDER.factor,
    "Holder.factor = 7.0": lambda x: x * getattr(HOLDER, "factor"),  # noqa: B009
    "helper = torch.cos": helper,
}


@pytest.fixture
def space() -> Any:
    found = globals()
    before, table = dict(found), dict(TABLE)
    yield found
    found.update(before)
    TABLE.update(table)
    ITEMS[:], Holder.factor = [2.0], 2.0
    vars(HOLDER).clear()
    vars(MODULE).pop("factor", None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("change", READS)
def test_a_change_of_state_that_is_read_is_refused(
    space: dict, change: str, reentrant: bool, backend: str
) -> None:
    read = READS[change] if change != "helper = torch.cos" else lambda x: helper(x)

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: read(y).sin(), x * 1, use_reentrant=reentrant).exp().sum()

    compiled = dynamotor.compile(program, backend=backend, fullgraph=True)
    x, y = (torch.linspace(0.1, 1, 4).requires_grad_() for _ in range(2))
    program(x).backward()
    loss = compiled(y)
    exec("UNREAD = 7.0; TABLE['unread'] = 7.0", space)
    loss.backward()
    torch.testing.assert_close(x.grad, y.grad)
    loss = compiled(y)
    exec(change, space)
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "factor", 7.0),
        lambda m: setattr(m, "linear", torch.nn.Linear(3, 3)),
        lambda m: setattr(m.linear, "weight", torch.nn.Parameter(torch.ones(3, 3))),
        lambda m: setattr(m, "forward", m.part),
    ],
)
def test_attributes_of_a_model(change: Callable[[Model], None]) -> None:
    model = Model()
    loss = dynamotor.compile(model, backend="aot_eager")(torch.ones(2, 3)).sum()
    change(model)
    if "forward" in vars(model):  # not read by the checkpointed function
        return loss.backward()
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()


def test_a_variable_and_an_attribute_that_the_program_sets_itself() -> None:
    def variable(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0
        y = checkpoint(lambda x: (x * factor).sin().exp(), x, use_reentrant=False)
        factor = 3.0
        return y.sum()

    def attribute(x: torch.Tensor) -> torch.Tensor:
        HOLDER.count = getattr(HOLDER, "count", 0) + 1  # type: ignore[attr-defined]
        return checkpoint(lambda x: (x * HOLDER.count).sin().exp(), x, use_reentrant=False).sum()  # type: ignore[attr-defined]

    for program in (variable, attribute):
        found = []
        for call in (program, dynamotor.compile(program, backend="aot_eager")):
            vars(HOLDER).clear()
            x = torch.linspace(0.1, 1, 4).requires_grad_()
            call(x).backward()
            found.append(x.grad)
        torch.testing.assert_close(*found)


@pytest.mark.usefixtures("collector_off")
def test_a_graph_that_a_model_keeps_does_not_keep_the_model() -> None:
    model = Model()
    compiled = dynamotor.compile(model, backend="aot_eager")
    model.kept = compiled(torch.ones(2, 3))
    gone = weakref.ref(model)
    del model, compiled
    gc.collect(1)
    assert gone() is None


SHIFT = torch.tensor(2.0)


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().part(x)) + SHIFT


@pytest.mark.parametrize("written", ["parameter", "global"])
def test_a_tensor_that_is_written_in_place_before_the_backward_is_refused(written: str) -> None:
    model = Model() if written == "parameter" else Normed().eval()
    tensor = model.linear.weight if written == "parameter" else SHIFT
    compiled = dynamotor.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            tensor.mul_(0.5)
    loss = compiled(torch.ones(2, 3)).sum()
    with torch.no_grad():
        tensor.mul_(2)
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()


def test_a_buffer_that_the_function_writes_itself_may_be_written_again() -> None:
    compiled = dynamotor.compile(Normed(), backend="aot_eager")
    (compiled(torch.randn(4, 3)) + compiled(torch.randn(4, 3))).sum().backward()


def test_a_setting_that_the_function_asks_for_is_that_of_the_recomputation() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        wide = lambda x: x.sin() * (3.0 if torch.get_default_dtype() is torch.float64 else 2.0)  # noqa: E731
        return checkpoint(wide, x, use_reentrant=False).exp().sum()

    found = []
    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        x = torch.ones(3, requires_grad=True)
        loss = function(x)
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_change_is_refused_when_the_argument_of_the_call_is_gone() -> None:
    compiled = dynamotor.compile(Model(), backend="aot_eager")
    for factor in (2.0, 3.0):  # a number that is an input at the second call
        compiled.factor = factor
        loss = compiled(torch.ones(2, 3, requires_grad=True) * 1).sum()
        compiled.factor = 7.0
        with pytest.raises(CaptureError, match="DM252"):
            loss.backward()


def _after(block: Any, x: torch.Tensor, held: torch.Tensor, reentrant: bool) -> torch.Tensor:
    y = checkpoint(block, x, use_reentrant=reentrant)
    held.add_(1)
    return y


def _between(block: Any, x: torch.Tensor, held: torch.Tensor, reentrant: bool) -> torch.Tensor:
    held.view(1).add_(1)
    y = checkpoint(block, x, use_reentrant=reentrant)
    held[:].mul_(2)
    return y.exp()


def _made(block: Any, x: torch.Tensor, held: torch.Tensor, reentrant: bool) -> torch.Tensor:
    held = held * 1
    y = checkpoint(lambda x: block(x) * held.clone(), x, use_reentrant=reentrant)
    held.add_(1)
    return y


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("program", [_after, _between, _made])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_tensor_that_the_graph_writes_behind_the_checkpoint(
    backend: str, program: Any, reentrant: bool
) -> None:
    """The recomputation finds the new contents (the gradient had the old ones)."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * kept.clone()

    kept, found = torch.tensor([2.0]), []
    for function in (program, dynamotor.compile(program, backend=backend)):
        kept.fill_(2.0)
        x = torch.ones(3, requires_grad=True)
        function(block, x, kept, reentrant).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("held", [True, False])
def test_a_tensor_that_is_written_by_the_graph_and_by_its_caller(held: bool) -> None:
    kept = torch.tensor([2.0])

    def program(x: torch.Tensor) -> Any:
        kept.add_(1)
        made = kept * 1
        read = kept if held else made
        return checkpoint(lambda x: x.sin() * read.clone(), x, use_reentrant=False).exp(), read

    out, read = dynamotor.compile(program, backend="aot_eager")(torch.ones(3, requires_grad=True))
    read.fill_(7.0)
    with pytest.raises(CaptureError, match="DM252"):
        out.sum().backward()


def test_a_result_that_is_written_behind_a_break_and_let_go() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        made = x.detach() * 2
        y = checkpoint(lambda x: x.sin() * made.clone(), x, use_reentrant=False)
        print(end="")
        made.add_(1)
        return y.sum()

    loss = dynamotor.compile(program, backend="aot_eager")(torch.ones(3, requires_grad=True))
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_container_that_the_program_changed_before_the_checkpoint(backend: str, space: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        ITEMS.append(3.0)
        return checkpoint(lambda x: x.sin() * len(ITEMS), x, use_reentrant=False).sum()

    found = []
    for function in (program, dynamotor.compile(program, backend=backend)):
        ITEMS[:] = [2.0]
        x = torch.ones(3, requires_grad=True)
        function(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


@functools.lru_cache
def cached_factor() -> float:
    return HOLDER.factor


WEAKLY, GET, BOUND = weakref.ref(HOLDER), TABLE.get, HOLDER.get
AROUND: dict[str, tuple[Any, Any, str]] = {
    "met through a weak reference": (
        lambda x: x * WEAKLY().factor,  # type: ignore[union-attr]
        lambda x: x * operator.attrgetter("factor")(HOLDER),
        "HOLDER.factor = 7.0",
    ),
    "met as a whole": (
        lambda x: x * sum(TABLE.values()),
        lambda x: x * GET("factor"),
        "TABLE['factor'] = 7.0",
    ),
    "in a container met before": (
        lambda x: x * sum(HOLDER.items),  # type: ignore[attr-defined]
        lambda x: x * sum(HOLDER.items),  # type: ignore[attr-defined]
        "HOLDER.items[0] = 7.0",
    ),
    "of the class at first, by a bound method": (
        lambda x: x * HOLDER.factor,
        lambda x: x * BOUND(),
        "HOLDER.factor = 7.0",
    ),
    "of the class at first, by a default": (
        lambda x: x * HOLDER.factor,
        lambda x, of=HOLDER: x * of.factor,
        "HOLDER.factor = 7.0",
    ),
    "of a module's class at first": (
        lambda x: x * MODULE.factor,
        lambda x: x * MODULE.factor,
        "MODULE.factor = 7.0",
    ),
    "asked for by the same question": (
        lambda x: x * cached_factor(),
        lambda x: x * cached_factor(),
        "HOLDER.factor = 7.0; cached_factor.cache_clear()",
    ),
    "given as an argument": (
        lambda x: x * sum(ITEMS),
        lambda x, items: x * sum(items),
        "ITEMS[0] = 7.0",
    ),
}


@pytest.mark.parametrize("kind", AROUND)
def test_state_that_the_program_had_read_before_the_checkpoint(kind: str, space: Any) -> None:
    """The read inside installs no guard of its own, and another path leads to the object."""
    before, block, change = AROUND[kind]
    more = [ITEMS] if kind == "given as an argument" else []
    HOLDER.items = [2.0]  # type: ignore[attr-defined]
    cached_factor.cache_clear()

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, before(x), *more, use_reentrant=False).exp().sum()

    loss = dynamotor.compile(program, backend="aot_eager")(torch.ones(3, requires_grad=True))
    exec(change, globals())
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_number_that_equalled_a_size_of_a_tensor(reentrant: bool) -> None:
    """One input of the graph stood for both: the number alone changes before the backward."""
    items: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * len(items)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant).sum()

    compiled = dynamotor.compile(loss, backend="eager")
    for rows, before, after in ((2, 5, 5), (3, 3, 3), (3, 3, 2)):
        items[:] = range(before)
        found = compiled(torch.ones(rows, 3, requires_grad=True))
        items[:] = range(after)
        with contextlib.nullcontext() if before == after else pytest.raises(CaptureError, match="DM252"):
            found.backward()


class _AsksMode(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if torch.is_grad_enabled() else 5.0)


def _asks_for_a_gradient(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * (2.0 if y.requires_grad else 5.0)


def _asks_for_a_leaf(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y * (2.0 if y.is_leaf else 5.0)


_question = torch.is_grad_enabled
_holder = types.SimpleNamespace(ask=torch.is_grad_enabled, table={"of": [lambda y: y.requires_grad]})
LAYERS = [
    _AsksMode(),
    torch.nn.Sequential(torch.nn.Tanh(), _AsksMode()),
    _asks_for_a_gradient,
    _asks_for_a_leaf,
    lambda x: x * (2.0 if _question() else 5.0),
    lambda x: x * (2.0 if _holder.ask() else 5.0),
    lambda x: x * (2.0 if _holder.table["of"][0](x * 2) else 5.0),
    lambda x: x * (2.0 if getattr(torch, "_".join(("is", "grad", "enabled")))() else 5.0),
]


@pytest.mark.regression
@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_that_asks_for_the_grad_mode_in_a_reentrant_checkpoint(layer: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x * 1, use_reentrant=True).sin()

    results = []
    for fn in (program, dynamotor.compile(program)):
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])


REPLACED: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "method": (lambda o: o.ask(), "ask", lambda self: False),
    "property": (lambda o: o.kind, "kind", property(lambda self: False)),
    "call": (lambda o: o(), "__call__", lambda self: False),
    "item": (lambda o: o[0], "__getitem__", lambda self, key: False),
    "comparison": (lambda o: o == 1, "__eq__", lambda self, other: False),
    "constant": (lambda o: o.positive, "positive", False),
    "static method": (lambda o: o.static(), "static", staticmethod(lambda: False)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", REPLACED)
def test_attributes_of_a_class_are_replaced_after_the_program_had_used_them(
    kind: str, reentrant: bool
) -> None:
    class Asked:
        positive = True

        def ask(self) -> bool:
            return True

        @staticmethod
        def static() -> bool:
            return True

        kind = property(ask)
        __call__ = ask

        def __getitem__(self, key: int) -> bool:
            return True

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    asked, (question, name, other) = Asked(), REPLACED[kind]

    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp() if question(asked) else x.sin().cos()

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x + bool(question(asked)), use_reentrant=reentrant).sum()

    compiled = dynamotor.compile(program, backend="aot_eager")
    compiled(torch.ones(3, requires_grad=True)).backward()
    loss = compiled(torch.ones(3, requires_grad=True))
    setattr(Asked, name, other)
    with pytest.raises(CaptureError, match="DM252"):
        loss.backward()
