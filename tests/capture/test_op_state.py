"""Operators and autograd functions written in Python see objects as the program left them, and their changes are seen."""

from __future__ import annotations

import warnings

import pytest
import torch

import dynamotor
from dynamotor.capture import op_state


class Box:
    pass


STATE = {"k": 1.0}
SEEN: list = []
BOX = Box()
FACTOR = 1.0
BUFFER = torch.zeros(3)
CONFIG = {"scale": 2.0}
library = torch.library.Library("op_state_raw", "FRAGMENT")


def _note():
    SEEN.append(STATE["k"])


def _op(name):
    def register(fn):
        op = torch.library.custom_op(f"op_state::{name}", fn, mutates_args=())
        op.register_fake(lambda x: torch.empty_like(x))
        return op

    return register


@_op("reads")
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * STATE["k"]


@_op("reads_a_global")
def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


@_op("reads_a_buffer")
def reads_a_buffer(x: torch.Tensor) -> torch.Tensor:
    return x + BUFFER


@_op("changes")
def changes(x: torch.Tensor) -> torch.Tensor:
    STATE["k"] += 1
    return x * 1


@_op("changes_an_attribute")
def changes_an_attribute(x: torch.Tensor) -> torch.Tensor:
    BOX.k = getattr(BOX, "k", 0) + 10
    return x + BOX.k


@_op("changes_by_a_function")
def changes_by_a_function(x: torch.Tensor) -> torch.Tensor:
    _note()
    return x * 1


@_op("pure")
def pure(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


@_op("reads_settings")
def reads_settings(x: torch.Tensor) -> torch.Tensor:
    return x * CONFIG["scale"]


library.define("raw(Tensor x) -> Tensor")
library.impl("raw", lambda x: x * STATE["k"], "CPU")
torch.library.register_fake("op_state_raw::raw", lambda x: torch.empty_like(x), lib=library)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.k = STATE["k"]
        return x * STATE["k"]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k


def an_object_is_changed_before(x):
    STATE["k"] = 5.0
    y = reads(x)
    STATE["k"] = 1.0
    return y


def the_implementation_is_not_known(x):
    STATE["k"] = 5.0
    y = torch.ops.op_state_raw.raw(x)
    STATE["k"] = 2.0
    return torch.ops.op_state_raw.raw(y)


def a_global_is_changed_before(x):
    global FACTOR
    FACTOR = 3.0
    y = reads_a_global(x)
    FACTOR = 1.0
    return y


def a_buffer_is_written_before(x):
    BUFFER.add_(1)
    y = reads_a_buffer(x)
    BUFFER.mul_(3)
    return reads_a_buffer(y)


def the_op_changes_what_is_read(x):
    y = changes(x)
    STATE["k"] *= 10
    return y


def the_op_changes_an_attribute(x):
    before = getattr(BOX, "k", 0)
    y = changes_an_attribute(x)
    return y * BOX.k + before


def a_function_of_the_op_changes_a_list(x):
    n = len(SEEN)
    for k in range(3):
        STATE["k"] = k
        x = changes_by_a_function(x)
    return x * (len(SEEN) - n)


def an_autograd_function_reads(x):
    STATE["k"] = 5.0
    y = Scaled.apply(x)
    STATE["k"] = 7.0
    z = Scaled.apply(y)
    STATE["k"] = 1.0
    return z


CASES = [
    an_object_is_changed_before,
    the_implementation_is_not_known,
    a_global_is_changed_before,
    a_buffer_is_written_before,
    the_op_changes_what_is_read,
    the_op_changes_an_attribute,
    a_function_of_the_op_changes_a_list,
    an_autograd_function_reads,
]


def state_after(function, requires_grad):
    global FACTOR
    FACTOR = STATE["k"] = 1.0
    vars(BOX).clear()
    SEEN.clear()
    BUFFER.zero_()
    outs = []
    for _ in range(2):
        x = torch.ones(3, requires_grad=requires_grad)
        y = function(x)
        if requires_grad:
            y.sum().backward()
        outs.append((y.tolist(), x.grad))
    return str((outs, STATE, vars(BOX), SEEN, FACTOR, BUFFER))


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_changes_are_seen_when_they_happen(function):
    requires_grad = function is an_autograd_function_reads
    expected = state_after(function, requires_grad)
    assert state_after(dynamotor.compile(function, backend="aot_eager"), requires_grad) == expected


def test_ops_without_state_stay_in_the_graph():
    def function(x):
        STATE["k"] = 5.0
        return reads_a_global(pure(x) + 1)

    assert torch.equal(dynamotor.compile(function, fullgraph=True)(torch.ones(3)), function(torch.ones(3)))


def test_ops_that_read_stay_in_the_graph_where_nothing_is_pending():
    def function(x):
        return reads_settings(x) + torch.ops.op_state_raw.raw(x)

    assert torch.equal(dynamotor.compile(function, fullgraph=True)(torch.ones(3)), function(torch.ones(3)))


def test_the_reason_names_the_operator():
    with pytest.raises(dynamotor.CaptureError, match=r"DM211.*op_state.changes"):
        dynamotor.compile(the_op_changes_what_is_read, fullgraph=True)(torch.ones(3))


@_op("warns")
def warns(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("in the operator", stacklevel=1)
    return x * 1


def test_messages_of_operators_keep_their_place() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("before", stacklevel=1)
        y = warns(x)
        warnings.warn("behind", stacklevel=1)
        return y

    compiled = dynamotor.compile(program)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            compiled(torch.ones(3))
        words = [str(w.message) for w in shown if "dynamotor" not in str(w.message)]
        assert words == ["before", "in the operator", "behind"]


def test_a_composite_operator_written_in_python_runs_once_a_call() -> None:
    library, calls = torch.library.Library("op_state_composite", "DEF"), []
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: calls.append(1) or x * 2, "CompositeImplicitAutograd")
    compiled = dynamotor.compile(lambda x: torch.ops.op_state_composite.twice(x.sin()) + 1)
    for count in (1, 2, 3):
        torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).sin() * 2 + 1)
        assert len(calls) == count


def test_long_lists_of_numbers_are_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of a broken call are searched for callables at its first calls."""
    inside, walked = op_state._inside, []
    monkeypatch.setattr(op_state, "_inside", lambda value: walked.append(value) or inside(value))

    def asks() -> bool:
        return torch.is_grad_enabled()

    numbers = [float(n) for n in range(1000)]
    assert not op_state.reaches([{"numbers": numbers, "rows": [numbers, numbers[:10]]}], bool)
    assert len(walked) == 4
    assert op_state.reaches([[*numbers, {"asks": [None, asks]}]], lambda names: "is_grad_enabled" in names)


def test_functions_of_nested_modules_are_searched_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.is_grad_enabled() else -x

    def uses(names: set[str]) -> bool:
        return "is_grad_enabled" in names

    layers = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(20)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Identity())
    inside, walked = op_state._inside, []
    monkeypatch.setattr(op_state, "_inside", lambda value: walked.append(value) or inside(value))
    assert not op_state.reaches([model.forward], uses)
    assert sum(isinstance(value, torch.nn.Module) for value in walked) == 63
    layers[7].append(Asks())
    assert op_state.reaches([model.forward], uses)
    del layers[7][-1]
    layers[3][1].forward = Asks().forward
    assert op_state.reaches([model], uses)
