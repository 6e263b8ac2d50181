"""Code of a backward reads objects, draws random numbers and has effects when the backward runs, as in eager.

Each program is a pair: `forward(x)` and `between()`, which changes an object between forward and backward.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import dynamotor
from dynamotor.base.events import counters

FACTOR = 2.0
TABLE = {"factor": 2.0}
LOG: list[float] = []


def helper(g: torch.Tensor) -> torch.Tensor:
    return g * FACTOR


class Scaled(torch.autograd.Function):
    """`read` is the part that differs."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * Scaled.factor


class OfGlobal(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * FACTOR


class OfTable(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * TABLE["factor"]


class OfHelper(Scaled):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return helper(g)


class OfObjectInContext(Scaled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.table = TABLE
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.table["factor"]


class WithSetup(Scaled):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.table = TABLE

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.table["factor"]


class OfClassInContext(Scaled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.owner = Scaled
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.owner.factor


class Counting(Scaled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.calls = 0
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        ctx.calls += 1
        LOG.append(ctx.calls)
        return g * ctx.calls


class Noise(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * torch.rand_like(g)


class SystemNoise(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * random.random()


class OfMode(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * (3 if torch.is_autocast_enabled("cpu") else 2)


FUNCTIONS = [
    Scaled, OfGlobal, OfTable, OfHelper, OfObjectInContext, OfClassInContext, WithSetup, Counting, Noise, SystemNoise, OfMode,
]  # fmt: skip


def change(value: float) -> None:
    global FACTOR
    FACTOR = TABLE["factor"] = Scaled.factor = value


def both(forward: Callable[..., Any], between: Callable[[], Any], backend: str | None) -> list[Any]:
    """Gradients of two backwards of each of two calls, and the effects."""
    found: list[Any] = []
    call = forward if backend is None else dynamotor.compile(forward, backend=backend)
    for value in (2.0, 5.0):
        change(value)
        LOG.clear()
        torch.manual_seed(0)
        random.seed(0)
        x = torch.linspace(0.5, 1, 4, requires_grad=True)
        loss = call(x)
        found.append(torch.get_rng_state())
        between()
        for keep in (True, False):
            loss.backward(retain_graph=keep)
            found.append(x.grad)
            x.grad = None
        found += [list(LOG), torch.get_rng_state()]
    change(2.0)
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.allclose(a.double(), b.double())
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


BACKENDS = ["eager", "aot_eager", "native"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_backwards_of_functions(function: Any, backend: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return function.apply(x.sin()).exp().sum()

    def between() -> None:
        change(7.0)

    breaks = counters["breaks"].total()
    assert same(both(forward, between, None), both(forward, between, backend))
    assert counters["breaks"].total() == breaks  # the call is live, the rest is compiled


class Hooked(torch.nn.Module):
    def __init__(self, hook: Callable[[Hooked], Callable[..., Any]]) -> None:
        super().__init__()
        self.calls, self.factor, self.make = 0, 2.0, hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(self.make(self))
        self.calls += 1
        return y.sin().sum()


def counting(module: Hooked) -> Callable[..., Any]:
    def hook(g: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        return g * module.calls

    return hook


HOOKS: dict[str, Callable[[Hooked], Callable[..., Any]]] = {
    "an attribute": lambda module: lambda g: g * module.calls,
    "an attribute that changes": lambda module: lambda g: g * module.factor,
    "a global": lambda module: lambda g: g * FACTOR,
    "a helper": lambda module: helper,
    "a counter": counting,
    "random numbers": lambda module: lambda g: g * torch.rand_like(g),
    "a constant": lambda module: lambda g: g * 3,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name: str, backend: str) -> None:
    def run(backend: str | None) -> list[Any]:
        module = Hooked(HOOKS[name])

        def between() -> None:
            change(7.0)
            module.factor += 1

        return both(module, between, backend)

    assert same(run(None), run(backend))


def test_a_variable_that_is_set_after_the_hook_is_registered() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for k in range(1, 4):
            y = x * k
            y.register_hook(lambda g: g * k)  # noqa: B023 (the last one holds for all)
            x = y.sin()
        return x.sum()

    def again(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0
        y = x * 2
        y.register_hook(lambda g: g * factor)
        factor = 3.0
        return y.sum()

    def shared(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0

        def more() -> None:
            nonlocal factor
            factor += 1

        y = x * 2
        y.register_hook(lambda g: g * factor)
        more()
        return y.sum()

    for program in (loop, again, shared):
        assert same(both(program, int, None), both(program, int, "aot_eager")), program.__name__


def test_hooks_of_constants_stay_in_the_graph() -> None:
    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda g: g * factor

    def program(x: torch.Tensor) -> torch.Tensor:
        k = x.detach().sum()
        y = x * 2
        y.register_hook(scaled(3.0))
        y.register_hook(lambda g: (g * k).clamp(-1, 1))
        return y.sin().sum()

    compiled = dynamotor.compile(program, backend="aot_eager", fullgraph=True)
    x, z = (torch.linspace(0.1, 1, 4, requires_grad=True) for _ in range(2))
    program(x).backward()
    compiled(z).backward()
    assert same(x.grad, z.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_on_the_node_of_a_tensor_see_the_gradients_of_its_own_op(backend: str) -> None:
    weight = torch.ones(4, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = (x * weight).sin()
        y.grad_fn.register_hook(lambda given, arrived: LOG.append(len(given)) or (given[0] * FACTOR,))
        return y.sum()

    def run(backend: str | None) -> list[Any]:
        weight.grad = None
        return [*both(program, lambda: change(7.0), backend), weight.grad]

    assert same(run(None), run(backend))


library = torch.library.Library("time_of_reading", "FRAGMENT")
library.define("composite(Tensor x) -> Tensor")
library.impl("composite", lambda x: x * FACTOR, "CompositeImplicitAutograd")
library.define("plain(Tensor x) -> Tensor")
library.impl("plain", lambda x: x * 2, "CPU")
torch.library.register_fake("time_of_reading::plain", lambda x: torch.empty_like(x), lib=library)
torch.library.register_autograd("time_of_reading::plain", lambda ctx, g: g * FACTOR, lib=library)


@torch.library.custom_op("time_of_reading::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("time_of_reading::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * 2


custom.register_fake(torch.empty_like)
custom.register_autograd(lambda ctx, g: g * FACTOR)
noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, g: g * torch.rand_like(g))
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "composite": torch.ops.time_of_reading.composite,
    "register_autograd": torch.ops.time_of_reading.plain,
    "custom_op": custom,
    "random numbers": noise,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_python_behind_operators(name: str, backend: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return OPERATORS[name](x.sin()).exp().sum()

    def between() -> None:
        change(7.0)

    assert same(both(forward, between, None), both(forward, between, backend))


class ScaledBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
        ctx.holder = holder
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        held = ctx.holder[0] if isinstance(ctx.holder, tuple) else ctx.holder
        return g * (held["k"] if isinstance(held, dict) else held[0]), None


@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_sees_changes_of_a_container_that_it_was_given(kind: type, backend: str) -> None:
    inner = {"k": 2.0} if kind is not list else [2.0]
    given = (inner,) if kind is tuple else inner
    compiled = dynamotor.compile(lambda x: ScaledBy.apply(x.sin(), given).sum(), backend=backend)
    for factor in (5.0, 7.0):
        x = torch.ones(3, requires_grad=True)
        loss = compiled(x)
        inner[0 if kind is list else "k"] = factor
        loss.backward()
        torch.testing.assert_close(x.grad, torch.ones(3).cos() * factor)


class Box:
    pass


def _attributes_behind_a_break(x: torch.Tensor) -> Any:
    box: Any = Box()
    box.y = 2
    seen = [vars(box)]
    print(end="")
    box.y = 5
    return seen, vars(box) is seen[0]


def _attributes_that_were_given(x: torch.Tensor) -> Any:
    box, given = Box(), {"y": 1}
    before = box.__dict__
    box.__dict__ = given
    print(end="")
    given["y"] = 3
    return box.y, before, vars(box) is given  # type: ignore[attr-defined]


def _a_warning_that_the_function_records(x: torch.Tensor) -> Any:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        warnings.warn("said", stacklevel=1)
        return len(record), str(record[0].message)


@pytest.mark.regression
@pytest.mark.parametrize(
    "function",
    [_attributes_behind_a_break, _attributes_that_were_given, _a_warning_that_the_function_records],
)
def test_what_changes_later_is_seen(function: Callable[..., Any]) -> None:
    x = torch.ones(2)
    assert dynamotor.compile(function, backend="eager")(x) == function(x)


class Read:
    k = 2.0

    def get(self) -> float:
        return self.k

    @classmethod
    def of_class(cls) -> float:
        return cls.k


READ, READS = Read(), {"k": 2.0}
GAIN = 2.0
weakly, bound, of_class, item = weakref.ref(READ), READ.get, Read.of_class, READS.get
partly = functools.partial(lambda o: o.k, READ)
layer = torch.nn.Linear(1, 1, bias=False)


def imported(g: torch.Tensor) -> torch.Tensor:
    from state_of_a_test import k  # type: ignore[import-not-found]

    return g * k


LEADING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weak reference": lambda g: g * weakly().k,  # type: ignore[union-attr]
    "bound method": lambda g: g * bound(),
    "method of a class": lambda g: g * of_class(),
    "method of a dict": lambda g: g * item("k"),
    "partial": lambda g: g * partly(),
    "globals()": lambda g: g * globals()["GAIN"],
    "eval": lambda g: g * eval("GAIN"),
    "import": imported,
    "layer": lambda g: g * layer.weight.detach()[0, 0],
}


@pytest.mark.parametrize("hooked", [True, False], ids=["hook", "function"])
@pytest.mark.parametrize("name", LEADING)
def test_callables_that_lead_to_objects_that_change(
    name: str, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, module = LEADING[name], types.ModuleType("state_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Late(Scaled):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return read(g)

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 3 if hooked else Late.apply(x * 3)
        if hooked:
            y.register_hook(read)
        return (y * y).sum()

    def change(value: float) -> None:
        monkeypatch.setattr(Read, "k", value)
        monkeypatch.setitem(READS, "k", value)
        monkeypatch.setitem(globals(), "GAIN", value)
        module.k = value  # type: ignore[attr-defined]
        layer.weight.data.fill_(value)

    compiled = dynamotor.compile(program, backend="aot_eager")
    for value in (5.0, 7.0):
        change(2.0)
        x = torch.ones(3, requires_grad=True)
        loss = compiled(x)
        change(value)
        loss.backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 18 * value))
