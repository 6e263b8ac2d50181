"""Regions of a `TorchFunctionMode` that a compiled function enters are part of its graph: the mode's Python is
interpreted for each call that it takes over, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import dynamotor

FACTOR = 2.0
LINEAR = torch.nn.Linear(3, 3)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * FACTOR if func in (torch.sin, torch.Tensor.sin) else found


class Noted(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append((func.__name__, len(types), len(args), kwargs))
        return func(*args, **(kwargs or {}))


class Replaced(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.exp:
            raise ValueError("no exp here")
        return {torch.add: torch.sub, torch.ones: torch.zeros}.get(func, func)(*args, **(kwargs or {}))


def noted(of: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def program(x: torch.Tensor) -> Any:
        mode = Noted()
        with mode:
            found = of(x)
        return found, x.cos(), mode.names

    return program


def one(x: torch.Tensor) -> Any:
    with Doubled():
        return torch.sin(x) + x.sin()


def two(x: torch.Tensor) -> Any:
    with Doubled(), Doubled():
        y = torch.sin(x)
    return y + torch.sin(x)


def other_functions(x: torch.Tensor) -> Any:
    with Replaced():
        return torch.add(x, 1) + torch.ones(3)


def raising(x: torch.Tensor) -> Any:
    try:
        with Replaced():
            return torch.exp(x)
    except ValueError as error:
        return x.sin(), str(error)


def entered_by_hand(x: torch.Tensor) -> Any:
    mode = Doubled()
    mode.__enter__()
    y = torch.sin(x)
    mode.__exit__(None, None, None)
    return y.sin()


def settings(x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x + 1
    return y, torch.is_grad_enabled(), x.shape[0], x.requires_grad


IN_THE_GRAPH: dict[str, Callable[[torch.Tensor], Any]] = {
    "one": one,
    "two": two,
    "other functions": other_functions,
    "an error": raising,
    "entered by hand": entered_by_hand,
    "functions": noted(lambda x: (F.softmax(LINEAR(x), -1), torch.cat([x, x]), torch.max(x, 0)[1])),
    "operators": noted(lambda x: (-(x + 1) @ (2 - x) * 2.0, x > 0, x[0], x[:, 1:])),
    "in place": noted(lambda x: x.clone().mul_(2).add_(x)),
    "settings": noted(settings),
}
BROKEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "a break": noted(lambda x: (print(end=""), x.sin())[1]),
    "the protocol of containers": noted(lambda x: (len(x), [row * 2 for row in x])),
    "a checkpoint": noted(lambda x: checkpoint(torch.sin, x, use_reentrant=False)),
    "other code that PyTorch calls": noted(lambda x: torch.vmap(lambda row: row.sin())(x)),
}


def _seen(program: Callable[[torch.Tensor], Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors that a program gives, with a gradient, and all else."""
    x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    leaves = torch.utils._pytree.tree_leaves(program(x))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors += torch.autograd.grad(sum(t.sum() for t in tensors if t.requires_grad), x)
    return tensors, [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("kind", [*IN_THE_GRAPH, *BROKEN])
def test_a_region_is_as_in_eager(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (IN_THE_GRAPH | BROKEN)[kind]
    compiled = dynamotor.compile(program, backend="aot_eager", fullgraph=kind in IN_THE_GRAPH)
    for factor in (2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        (got, said), (want, to_say) = _seen(compiled), _seen(program)
        torch.testing.assert_close(got, want)
        assert said == to_say
        assert not torch._C._len_torch_function_stack()


def test_a_region_that_stays_open() -> None:
    mode = Doubled()

    def program(x: torch.Tensor) -> torch.Tensor:
        mode.__enter__()
        return torch.sin(x)

    found = dynamotor.compile(program, backend="aot_eager")(torch.ones(3))
    assert torch._C._len_torch_function_stack() == 1
    mode.__exit__(None, None, None)
    torch.testing.assert_close(found, torch.ones(3).sin() * 2)
