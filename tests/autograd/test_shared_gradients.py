"""Several autograd nodes of one graph compute a gradient once, and the engine's every way through them stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dynamotor
from dynamotor.base.errors import BackendError


class Layer(torch.nn.Module):
    """As a decoder's: its caches come from one input each, and its result from all."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross, self.out = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        for n, p in enumerate(self.parameters()):
            torch.nn.init.constant_(p, 0.1 * (n + 1))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, cross = self.own(x).tanh(), self.cross(memory).tanh()
        return self.out((own * cross).sin()).exp(), own, cross


class Products(TorchDispatchMode):
    """Counts matrix products."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += "mm" in func.name()
        return func(*args, **(kwargs or {}))


def call(fn: Callable[..., Any], layer: Layer) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    given = [(torch.arange(12, dtype=torch.float64).view(3, 4) / n).requires_grad_() for n in (7, 9)]
    x, memory = given[0] * 1.5, given[1].cos()
    return [*given, x, memory], fn(layer, x, memory)


def whole(x: torch.Tensor, outs: Any) -> torch.Tensor:
    return sum(out.square().sum() for out in outs)  # type: ignore[return-value]


def grads_of(given: list[torch.Tensor], layer: Layer) -> list[Any]:
    return [t.grad for t in given if t.is_leaf] + [p.grad for p in layer.parameters()]


def all_at_once(given: Any, layer: Layer, outs: Any) -> list[Any]:
    whole(given, outs).backward()
    return grads_of(given, layer)


def one_alone(n: int) -> Callable[..., list[Any]]:
    def alone(given: Any, layer: Layer, outs: Any) -> list[Any]:
        outs[n].square().sum().backward()
        return grads_of(given, layer)

    alone.__name__ = f"output {n} alone"
    return alone


def one_after_the_other(given: Any, layer: Layer, outs: Any) -> list[Any]:
    found = []
    for out in outs:
        out.square().sum().backward(retain_graph=True)
        found += [None if g is None else g.clone() for g in grads_of(given, layer)]
    return found


def twice(given: Any, layer: Layer, outs: Any) -> list[Any]:
    loss = whole(given, outs)
    loss.backward(retain_graph=True)
    loss.backward()
    return grads_of(given, layer)


def twice_without_the_graph(given: Any, layer: Layer, outs: Any) -> list[Any]:
    loss, raised = outs[0].sum(), False
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        raised = "second time" in str(error)
    return [torch.tensor(raised), *grads_of(given, layer)]


def freed_in_part(given: Any, layer: Layer, outs: Any) -> list[Any]:
    loss, raised = outs[0].sum(), False
    found = torch.autograd.grad(loss, given[0])
    try:
        loss.backward()
    except RuntimeError as error:
        raised = "second time" in str(error)
    return [torch.tensor(raised), *found]


def by_some_inputs(given: Any, layer: Layer, outs: Any) -> list[Any]:
    loss = whole(given, outs)
    found = []
    for wanted in ([given[2]], [given[3]], [given[0], layer.own.weight], [*layer.parameters()], given):
        found += torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    return found


def twice_differentiated(given: Any, layer: Layer, outs: Any) -> list[Any]:
    first = torch.autograd.grad(outs[0].sum(), [given[0], given[1], layer.own.weight], create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [*first, *grads_of(given, layer)]


def hooked(given: Any, layer: Layer, outs: Any) -> list[Any]:
    seen: list[torch.Tensor] = []
    for t in (given[2], given[3], layer.cross.weight):
        t.register_hook(lambda g: seen.append(g.clone()))
        t.register_hook(lambda g: 2 * g)
    outs[0].sum().backward()
    return sorted(seen, key=lambda t: float(t.sum())) + grads_of(given, layer)


def with_a_later_tangent(given: Any, layer: Layer, outs: Any) -> list[Any]:
    """One output's gradient needs another backward, which its hook runs."""
    late = outs[2] * 3
    inner = torch.autograd.grad(outs[0].sum(), given[3], retain_graph=True)[0]
    (outs[0].sum() + (late * inner.detach()).sum()).backward()
    return [inner, *grads_of(given, layer)]


def with_zeros(given: Any, layer: Layer, outs: Any) -> list[Any]:
    torch.autograd.backward(
        [outs[0], outs[1]],
        [torch._efficientzerotensor((3, 4), dtype=torch.float64), torch.ones_like(outs[1])],
    )
    return [g.clone() if g is not None else None for g in grads_of(given, layer)]


def many_at_once(given: Any, layer: Layer, outs: Any) -> list[Any]:
    directions = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
    return [*torch.autograd.grad(outs[0], [given[0], given[1]], directions, is_grads_batched=True)]


def after_an_error(given: Any, layer: Layer, outs: Any) -> list[Any]:
    """A hook between the leader and its siblings raises; the next backward is whole."""
    raised = False

    def fail(grad: torch.Tensor) -> None:
        raise KeyError

    handle = layer.out.weight.register_hook(fail)
    try:
        outs[0].sum().backward(retain_graph=True)
    except KeyError:
        raised = True
    handle.remove()
    for t in (*given[:2], *layer.parameters()):
        t.grad = None
    (outs[0].sum() * 3).backward()
    return [torch.tensor(raised), *grads_of(given, layer)]


WAYS = [
    all_at_once,
    *map(one_alone, range(3)),
    one_after_the_other,
    twice,
    twice_without_the_graph,
    freed_in_part,
    by_some_inputs,
    twice_differentiated,
    hooked,
    with_a_later_tangent,
    with_zeros,
    many_at_once,
    after_an_error,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_eagers(way: Callable[..., list[Any]]) -> None:
    fn = lambda layer, x, memory: layer(x, memory)  # noqa: E731
    results = []
    for each in (fn, dynamotor.compile(fn, backend="aot_eager")):
        layer = Layer()
        given, outs = call(each, layer)
        results.append(way(given, layer, outs))
    wanted, found = results
    assert [g is None for g in found] == [g is None for g in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def nodes_of(outs: Any) -> int:
    todo, seen = [out.grad_fn for out in outs], set()
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return sum(node.name().startswith("Compiled") for node in seen)


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 1, 2)])
def test_several_nodes_compute_as_much_as_one(used: tuple[int, ...]) -> None:
    fn = lambda layer, x, memory: layer(x, memory)  # noqa: E731
    products = []
    for each in (fn, dynamotor.compile(fn, backend="aot_eager")):
        given, outs = call(each, Layer())
        with Products() as counted:
            whole(given, [outs[k] for k in used]).backward()
        products.append(counted.n)
    assert nodes_of(outs) == 3 and products[1] == products[0]


def test_a_call_is_freed_with_its_results() -> None:
    import gc
    import weakref

    compiled = dynamotor.compile(lambda layer, x, memory: layer(x, memory), backend="aot_eager")
    call(compiled, layer := Layer())
    gc.disable()
    try:
        given, outs = call(compiled, layer)
        saved = weakref.ref(outs[0].grad_fn)
        outs[0].sum().backward()
        one = weakref.ref(given[2])
        del given, outs
        assert one() is None and saved() is None
    finally:
        gc.enable()


def test_a_gradient_that_a_hook_writes_meanwhile() -> None:
    """The hook of a parameter runs between the node that computes for all and the others."""
    layer = Layer()
    _, outs = call(dynamotor.compile(Layer.forward, backend="aot_eager"), layer)
    given = [torch.ones_like(out) for out in outs]
    for p in layer.parameters():
        p.register_hook(lambda g: (given[1].mul_(2), None)[1])
    with pytest.raises(BackendError, match="DM284"):
        torch.autograd.backward(outs, given)
