"""Modules of one class that are compiled one by one share programs: each one's own facts, parameters and
objects are what its calls use.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import counters

KNOWN: dict[Any, Any] = {}


class Block(nn.Module):
    """One of three; `number` is 0, 1 or 2."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("buffer", torch.full((4,), number + 1.0))
        self.also(number)

    def also(self, number: int) -> None:
        """What else a block has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w + self.b + self.buffer)


class Plain(Block):
    """All are alike."""


class Counting(Block):
    def also(self, number: int) -> None:
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.shape[0])
        return super().forward(x)


class Averaging(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer = self.buffer * 0.9 + x.detach().mean(0) * 0.1
        return super().forward(x)


class Norm(Block):
    def also(self, number: int) -> None:
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x @ self.w)


class Tensor(Block):
    def also(self, number: int) -> None:
        self.t = torch.full((4,), 0.3 * number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.w + self.t)
        self.t = y.detach().mean(0)
        return y


class Closure(Block):
    def also(self, number: int) -> None:
        self.act = lambda x: x * (number + 1) + self.b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.act(x @ self.w))


class Partial(Block):
    def also(self, number: int) -> None:
        self.act = functools.partial(self.scaled, number + 2.0)

    def scaled(self, by: float, x: torch.Tensor) -> torch.Tensor:
        return x * by + self.b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.act(x @ self.w))


class Known(Block):
    """One of them is known to the program by a name."""

    def also(self, number: int) -> None:
        KNOWN[number] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) + (1 if self is KNOWN[0] else 2) + KNOWN[1].b


class Key(Block):
    def also(self, number: int) -> None:
        KNOWN[self] = number + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) * KNOWN[self]


class Around(Block):
    """Leads to itself."""

    def also(self, number: int) -> None:
        self.ring, self.weak = [self], weakref.ref(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.ring[0].w + self.weak().b)


class Tied(Block):
    """One of them has one parameter twice."""

    def also(self, number: int) -> None:
        self.v = self.w if number == 1 else nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w @ self.v)


class TiedFirst(Tied):
    def also(self, number: int) -> None:
        self.v = self.w if number == 0 else nn.Parameter(torch.randn(4, 4))


class Overlapping(Block):
    """In one of them a buffer that is written is part of another one's memory."""

    def also(self, number: int) -> None:
        self.register_buffer("part", self.buffer[:2] if number == 2 else torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.buffer.add_(1)
        return torch.tanh(x @ self.w + self.part.sum())


class Sharing(Block):
    """A submodule belongs to all."""

    def also(self, number: int) -> None:
        self.inner = KNOWN.setdefault("inner", nn.Linear(4, 4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x) @ self.w)


class Number(Block):
    def also(self, number: int) -> None:
        self.number, self.factor = number, 0.1 * number + 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) * self.number * self.factor


class Frozen(Block):
    def also(self, number: int) -> None:
        self.w.requires_grad_(number != 1)


class Hooked(Block):
    def also(self, number: int) -> None:
        self.w.register_hook(lambda grad: grad * (number + 1))
        if number:
            self.register_forward_hook(lambda module, args, out: out * (number + 1) + module.b)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Block) -> torch.Tensor:
        ctx.module = module
        return x * module.buffer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.module.buffer * 3, None


class Function(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Double.apply(x @ self.w, self))


class Breaking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.w)
        print(end="")
        return y * self.buffer + self.b


class OfId(Block):
    """Facts of a held module only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) + (id(self) == KNOWN.get("id"))


BLOCKS = [
    Plain, Counting, Averaging, Norm, Tensor, Closure, Partial, Known, Key, Around, Tied, TiedFirst, Overlapping, Sharing,
    Number, Frozen, Hooked, Function, Breaking, OfId,
]  # fmt: skip


def compiled_in_place(module: Any, backend: str) -> Any:
    with dynamotor.replace_torch_compile():
        module.compile(backend=backend)
    return module


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "compile": lambda module, backend: dynamotor.compile(module, backend=backend),
    "module.compile": compiled_in_place,
}


def state(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {k: v.detach().clone() for k, v in module.state_dict().items()}
    found |= {f"{k}.grad": p.grad.clone() for k, p in module.named_parameters() if p.grad is not None}
    own = {k: vars(module)[k] for k in ("calls", "seen", "t") if k in vars(module)}
    return found | copy.deepcopy(own)


def steps(cls: type[Block], way: Callable[[Any], Any]) -> list[Any]:
    """Two steps, a new parameter, a step in the other order, another requires_grad, a step; each with and
    without gradients."""
    KNOWN.clear()
    torch.manual_seed(0)
    blocks: list[Any] = [cls(number).double() for number in range(3)]
    calls = [way(block) for block in blocks]
    found: list[Any] = []
    for step in range(4):
        if step == 2:
            blocks[1].w = nn.Parameter(blocks[1].w.detach() * 0.5)
            blocks[0].buffer.data = blocks[0].buffer.data + 1
            calls.reverse()
        if step == 3:
            blocks[2].w.requires_grad_(not blocks[2].w.requires_grad)
        x = torch.randn(3 + step % 2, 4, dtype=torch.float64).requires_grad_()
        out = x
        for block in blocks:
            block.zero_grad()
        for call in calls:
            out = call(out)
        (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        found += [out.detach(), x.grad, [state(block) for block in blocks]]
        with torch.no_grad():
            for block in blocks:
                for p in block.parameters():
                    p -= 0.01 * (0 if p.grad is None else p.grad)
            found += [[call(x.detach()) for call in calls], [state(block) for block in blocks]]
    return found


@pytest.mark.sweep(16)
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", BLOCKS, ids=lambda cls: cls.__name__)
def test_steps(cls: type[Block], way: str, backend: str) -> None:
    want = steps(cls, lambda module: module)
    got = steps(cls, lambda module: WAYS[way](module, backend))
    torch.testing.assert_close(got, want)


def fresh(base: type[Block]) -> type[Block]:
    """A class of which nothing is compiled."""
    return type(base.__name__, (base,), {})


def graphs(calls: list[Any], x: torch.Tensor) -> int:
    before = counters["capture"]["graphs"]
    for call in calls:
        call(x)
    return counters["capture"]["graphs"] - before


def test_one_graph_serves_all() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    cls = fresh(Norm)
    calls = [dynamotor.compile(cls(k), backend="eager", fullgraph=True) for k in range(20)]
    assert graphs(calls, x) == 1
    assert graphs(calls, x) == 0
    assert "1 graph, " in str(dynamotor.explain(calls[7])(x))
    dynamotor.reset()
    assert graphs(calls, x) == 1


def test_a_size_that_differs_makes_one_more() -> None:
    cls = fresh(Plain)
    calls = [dynamotor.compile(cls(k), backend="eager") for k in range(6)]
    assert graphs(calls, torch.ones(3, 4, requires_grad=True)) == 1
    assert graphs(calls, torch.ones(5, 4, requires_grad=True)) == 1
    assert graphs(calls, torch.ones(7, 4, requires_grad=True)) == 0


def test_what_shares_nothing() -> None:
    x, cls, other = torch.ones(3, 4, requires_grad=True), fresh(Plain), fresh(Plain)
    blocks = [cls(number) for number in range(2)]
    backends = zip(blocks, ("eager", "aot_eager"))
    assert graphs([dynamotor.compile(block, backend=backend) for block, backend in backends], x) == 2
    options = zip(blocks, ({"strict": False}, {"strict": True}))
    assert graphs([dynamotor.compile(block, backend="eager", options=o) for block, o in options], x) == 2
    assert graphs([dynamotor.compile(c(0), backend="eager", dynamic=False) for c in (cls, other)], x) == 2


@torch.no_grad()
def test_without_gradients_programs_are_few() -> None:
    x, cls = torch.ones(3, 4), fresh(Plain)
    calls = [dynamotor.compile(cls(k), backend="eager") for k in range(20)]
    assert graphs(calls, x) == dynamotor.config.cache_size_limit // 2 + 1


@pytest.mark.usefixtures("collector_off")
def test_a_shared_program_holds_no_module() -> None:
    cls = fresh(Norm)
    blocks = [cls(k) for k in range(3)]
    calls = [dynamotor.compile(block, backend="native") for block in blocks]
    x = torch.ones(3, 4, requires_grad=True)
    for call in calls:
        call(x).sum().backward()
    first = weakref.ref(blocks.pop(0))
    del calls[0], call
    gc.collect(1)
    assert first() is None
    calls.append(dynamotor.compile(cls(3), backend="native"))
    assert graphs(calls, x) == 0


def test_a_graph_that_raises_is_its_own_modules() -> None:
    class Table(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w[x]

    calls = [dynamotor.compile(Table(k), backend="native") for k in range(2)]
    for call in calls:
        call(torch.tensor([1, 2]))
        with pytest.raises(IndexError):
            call(torch.tensor([1, 9]))


def test_modules_that_come_as_arguments() -> None:
    def call(module: Block, x: torch.Tensor) -> torch.Tensor:
        return module(x) * 2

    compiled, blocks = dynamotor.compile(call, backend="eager"), [Norm(k) for k in range(6)]
    twins, before = copy.deepcopy(blocks), counters["capture"]["graphs"]
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        for block, twin in zip(blocks, twins):
            compiled(block, x).sum().backward()
            call(twin, x).sum().backward()
            torch.testing.assert_close(state(block), state(twin))
    assert counters["capture"]["graphs"] - before == 2


def test_a_module_that_is_made_at_each_call() -> None:
    def rest(model: Block, x: torch.Tensor) -> torch.Tensor:
        made = copy.deepcopy(model)
        print(end="")
        return made(x)

    compiled, model = dynamotor.compile(rest, backend="eager"), Plain(0)
    before = counters["capture"]["graphs"]
    for scale in range(6):
        with torch.no_grad():
            model.w.mul_(scale)
            torch.testing.assert_close(compiled(model, torch.ones(3, 4)), rest(model, torch.ones(3, 4)))
    assert counters["capture"]["graphs"] - before == 3


def step_of(block: Block | None, k: int, default: float = 1.0) -> Callable[..., Any]:
    held, calls = torch.full((4,), float(k)), 0

    def step(x: torch.Tensor, *, by: float = default) -> Any:
        nonlocal calls
        calls += 1
        return (x if block is None else block(x)) * by + held * calls, calls

    return step


def recursive(k: float) -> Callable[..., Any]:
    def step(x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return x if depth == 0 else step(x + k, depth - 1)

    return step


def itself(k: int) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> Any:
        return x * (2 if KNOWN["step"] is step else 3)

    KNOWN["step"] = step
    return step


FACTORIES: dict[str, tuple[Callable[[int], Callable[..., Any]], int]] = {
    "tensors": (lambda k: step_of(None, k), 1),
    "modules": (lambda k: step_of(Norm(k), k), 1),
    "defaults": (lambda k: step_of(None, k, k + 0.5), 7),
    "itself": (recursive, 3),
    "known": (itself, 2),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_functions_of_one_code(name: str) -> None:
    make, most = FACTORIES[name]
    torch.manual_seed(0)
    functions = [make(k) for k in range(4)]
    torch.manual_seed(0)
    twins = functions if name == "known" else [make(k) for k in range(4)]
    compiled = [dynamotor.compile(function, backend="eager") for function in functions]
    x, before = torch.randn(3, 4, requires_grad=True), counters["capture"]["graphs"]
    for _ in range(2):
        for call, twin in zip(compiled, twins):
            torch.testing.assert_close(call(x), twin(x))
    assert counters["capture"]["graphs"] - before <= most + 1


def plain(x):
    return torch.relu(x) * 2 + 1


def _a_closure_over_a_number(i):
    scale = 2 + i // 5
    return lambda x: plain(x) * scale


def _a_closure_over_a_float(i):
    scale = i * 0.5
    return lambda x: plain(x) * scale


def _a_closure_over_a_tensor(i):
    scale = torch.full((4,), float(i))
    return lambda x: plain(x) * scale


def _a_closure_over_a_model(i):
    model = nn.Linear(4, 4)
    return lambda x: plain(model(x))


_MODEL = nn.Linear(4, 4)
_AGAIN = {
    "function": lambda i: plain,
    "module": lambda i: _MODEL,
    "method": lambda i: _MODEL.forward,
    "global module": lambda i: lambda x: plain(_MODEL(x)),
    "number": _a_closure_over_a_number,
    "float": _a_closure_over_a_float,
    "tensor": _a_closure_over_a_tensor,
    "model": _a_closure_over_a_model,
}


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", _AGAIN.values(), ids=_AGAIN)
def test_compiled_anew_in_a_loop(make, grad):
    dynamotor.reset()
    x = torch.randn(3, 4)
    with torch.set_grad_enabled(grad):
        for i in range(10):
            function = make(i)
            torch.testing.assert_close(dynamotor.compile(function, backend="eager")(x), function(x))
            gc.collect(1)
    assert counters["frames"]["captured"] <= 3


@pytest.mark.usefixtures("collector_off")
def test_kept_programs_hold_no_model():
    dynamotor.reset()

    def use():
        model = nn.Linear(4, 4)
        for _ in range(3):
            dynamotor.compile(lambda x: plain(model(x)), backend="eager")(torch.ones(4))
        return weakref.ref(model)

    model = use()
    gc.collect(1)
    assert model() is None and counters["frames"]["captured"] == 2


def test_closures_made_anew_while_a_break_runs():
    dynamotor.reset()

    @dynamotor.disable
    def opened(x):
        return [x, x + 1]

    class Reader:
        def __init__(self, shift):
            self.shift = shift

        @property
        def value(self):
            scaled = lambda x: plain(x) * self.shift  # noqa: E731
            return sum(map(scaled, opened(torch.ones(4))))

    readers = [Reader(torch.full((4,), float(i))) for i in range(6)]
    compiled = dynamotor.compile(lambda x, reader: reader.value + x, backend="eager")
    for reader in readers:
        torch.testing.assert_close(compiled(torch.ones(4), reader), reader.value + 1)
    names = counters["frames"]["captured"]
    assert names <= 8, names
