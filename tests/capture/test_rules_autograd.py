"""Custom autograd functions are nodes of the graph where a recording of them shows all that they do."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd.function import once_differentiable

import dynamotor
from dynamotor.base.events import counters
from tests.support.wrapper_classes import Quantised

scale = 2.0
seen = []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        return 2 * x * grad * ctx.factor, None


class Straight(torch.autograd.Function):
    """The gradient is not the derivative: forward may not be differentiated instead."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * scale


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, (x > y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        seen.append("backward")
        return grad * 2


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.shape[0] > 2:
            raise ValueError("too many rows")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


weight = torch.full((4,), 3.0)


class ReadsATensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * weight


class Reverse(torch.autograd.Function):
    """Returns a view of its argument."""

    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Trebles(torch.autograd.Function):
    """Returns its argument, of which PyTorch makes a view."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def square(x):
    return Square.apply(x.sin(), 3.0).cos()


def straight(x):
    return Straight.apply(x * 3).sin() + 1


def two_outputs(x):
    product, larger = TwoOutputs.apply(x.cos(), x * 2)
    return torch.where(larger, product, x)


def reverses(x):
    y = x.sin()
    return Reverse.apply(y, 0.5).cos() + Trebles.apply(y) * y + Trebles.apply(x)


class Weighted(torch.autograd.Function):
    """Takes tensors in a list, to which no gradient goes."""

    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(*weights)
        return x * sum(weights)

    @staticmethod
    def backward(ctx, grad):
        return grad * sum(ctx.saved_tensors), None


def weighted(x):
    return Weighted.apply(x.sin(), [x, weight]).cos()


def noisy(x):
    return Noisy.apply(x) + 1


def noisy_backward(x):
    return NoisyBackward.apply(x) + 1


def writes(x):
    return Writes.apply(x * 2) + 1


def refuses(x):
    try:
        return Refuses.apply(x)
    except ValueError:
        return x * 5


def reads_a_tensor(x):
    return ReadsATensor.apply(x).sin()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize(
    ("function", "one_graph"),
    [
        (square, True),
        (straight, True),
        (two_outputs, True),
        (reverses, True),
        (weighted, True),
        (refuses, True),
        (noisy, False),
        (noisy_backward, True),
        (writes, True),
        (reads_a_tensor, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_results_gradients_and_effects_are_eagers(function, one_graph, backend):
    start, results, effects = torch.randn(3, 4), [], []
    dynamotor.reset()
    for run in (function, dynamotor.compile(function, backend=backend)):
        seen.clear()
        x = start.clone().requires_grad_()
        for _ in range(2):
            y = run(x)
            y.square().sum().backward()
        with torch.no_grad():
            plain = run(start.clone())
        results.append((y.detach(), plain, x.grad))
        effects.append(list(seen))
    torch.testing.assert_close(results[1], results[0])
    assert effects[1] == effects[0]
    assert not counters["frames"]["graph raised"]  # the call would have run eager, and nothing else said so
    breaks = dynamotor.explain(function)(start.clone().requires_grad_()).graph_break_count
    assert (breaks == 0) == one_graph


def test_what_backward_reads_is_read_anew():
    global scale
    compiled = dynamotor.compile(straight)
    try:
        for value in (2.0, 5.0):
            scale = value
            x, same = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
            compiled(x).sum().backward()
            straight(same).sum().backward()
            torch.testing.assert_close(x.grad, same.grad)
    finally:
        scale = 2.0


def test_transforms_are_one_break_each():
    def function(x):
        y = torch.func.grad(lambda a: (a.sin() * 2).sum())(x * 2)
        return y + torch.vmap(lambda row: row / row.sum())(x)

    x = torch.rand(3, 4) + 1
    torch.testing.assert_close(dynamotor.compile(function)(x), function(x))
    assert dynamotor.explain(function)(x).graph_count <= 2


class WithLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers, seen):
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
            seen.append(x)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


@pytest.mark.parametrize("graded", [False, True])
def test_arguments_that_are_no_tensors_where_nothing_is_differentiated(graded):
    layers = [torch.nn.Linear(3, 3), torch.nn.ReLU()]
    x = torch.randn(2, 3)

    def program(x):
        states = []
        return WithLayers.apply(x, layers, states), states, torch.is_grad_enabled()

    with torch.set_grad_enabled(graded):
        found = dynamotor.compile(program, fullgraph=True)(x)
        torch.testing.assert_close(found, program(x))
        assert not found[0].requires_grad and not found[1][0].requires_grad


def test_arguments_that_are_no_tensors_break_where_a_gradient_is_asked():
    layers = [torch.nn.Linear(3, 3)]
    x = torch.randn(2, 3, requires_grad=True)
    out = dynamotor.compile(lambda x: WithLayers.apply(x + 1, layers, []) * 2)(x)
    out.sum().backward()
    assert x.grad.equal(torch.full((2, 3), 2.0))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by + 1, None

    @classmethod
    def of(cls, x):
        return super().apply(x, 3.0)


class Overridden(Scaled):
    @classmethod
    def apply(cls, x):
        return super().apply(x, 4.0) * 2


held_apply = Scaled.apply


def test_apply_is_found_on_its_class_through_super_and_as_a_held_method():
    """A C class method since PyTorch 2.14."""

    def program(x):
        same = Scaled.apply == held_apply, Scaled.apply.__self__ is Scaled, Scaled.apply.__name__
        return Scaled.of(x) + Overridden.apply(x) + held_apply(x, 2.0), Scaled.apply, same

    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    found, expected = dynamotor.compile(program, fullgraph=True)(x), program(y)
    assert found[1:] == expected[1:]
    found[0].sum().backward()
    expected[0].sum().backward()
    torch.testing.assert_close((found[0], x.grad), (expected[0], y.grad))


class Names(dict):
    @classmethod
    def both(cls, x):
        return super().fromkeys("ab", x)


def test_a_c_class_method_through_super_is_bound_to_the_class_of_the_call():
    found = dynamotor.compile(lambda x: Names.both(x + 1))(torch.zeros(2))
    assert type(found) is Names and found["a"].equal(torch.ones(2))


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class _AddsAndSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(0.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x * x, x

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * 2 * x + h


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("function", [_Doubles, _AddsAndSquares])
def test_an_argument_that_is_written_is_the_result(function, backend):
    def program(x):
        y = x * 1
        found = function.apply(y)
        first = found[0] if isinstance(found, tuple) else found
        return first.sin() + y, y

    breaks, results = counters["breaks"].total(), []
    for call in (program, dynamotor.compile(program, backend=backend)):
        x = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
        outs = call(x)
        sum(out.sum() for out in outs).backward()
        results.append((*outs, x.grad))
    torch.testing.assert_close(results[1], results[0])
    assert counters["breaks"].total() == breaks


class NoneForUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 5 if second is None else second


class ViewOfItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.reshape(4) * 3


@pytest.mark.regression
def test_autograd_functions_that_ask_for_none() -> None:
    gradients = []
    for run in (NoneForUnused.apply, dynamotor.compile(lambda x: NoneForUnused.apply(x))):
        x = torch.ones(4, requires_grad=True)
        run(x)[0].sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.regression
def test_a_write_into_a_view_that_an_autograd_function_made() -> None:
    with pytest.raises(RuntimeError, match="created inside a custom Function"):
        dynamotor.compile(lambda x: ViewOfItsInput.apply(x * 2).mul_(2))(torch.ones(4, requires_grad=True))


def test_a_returned_argument_that_leaves_the_graph_is_eagers_view() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x.sin()
        z = Reverse.apply(y, 0.5)
        return y, z, z[0].cos()

    breaks, results = counters["breaks"].total(), []
    for run in (program, dynamotor.compile(program)):
        x = torch.ones(2, 2, requires_grad=True)
        y, z, w = run(x)
        (y.sum() + 2 * z.square().sum() + w.sum()).backward()
        results.append((y.detach().clone(), z.detach().clone(), w.detach().clone(), x.grad))
        assert z._base is y and z.data_ptr() == y.data_ptr()
        with pytest.raises(RuntimeError, match="created inside a custom Function"):
            z.mul_(2)
    torch.testing.assert_close(results[1], results[0])
    assert counters["breaks"].total() == breaks


FACTOR = torch.tensor(2.0)


class ReadsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


class KeepsOnItsContext(ReadsInForward):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.by = FACTOR
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.by


@pytest.mark.regression
@pytest.mark.parametrize("function", [ReadsInForward, KeepsOnItsContext])
def test_a_tensor_that_the_program_reads_too_is_read_anew(
    function: type[torch.autograd.Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function read the tensor of the first call: only one that was read nowhere else was refused."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return function.apply(x * FACTOR).sum()

    compiled = dynamotor.compile(program, backend="aot_eager")
    for value in (7.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", torch.tensor(value))
        found = []
        for run in (program, compiled):
            x = torch.ones(3, requires_grad=True)
            loss = run(x)
            loss.backward()
            found.append((loss.item(), x.grad.tolist()))
        assert found[1] == found[0]


class Side(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


class Factors(NamedTuple):
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Settings:
    side: Side
    factors: Factors


class Configured(torch.autograd.Function):
    """Its arguments say how it computes, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: Factors, settings: Settings) -> torch.Tensor:
        ctx.factors, ctx.settings = factors, settings
        return x * factors.forward + (settings.side is Side.LEFT)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        return g * ctx.factors.backward * ctx.settings.factors.backward, None, None


@torch._dynamo.allow_in_graph
class ConfiguredAndMarked(Configured):
    """The same, marked as one node of a graph."""


class Layer(torch.nn.Module):
    """Calls a custom function with records of its own."""

    def __init__(self, function: Any, factors: Any, settings: Any) -> None:
        super().__init__()
        self.function, self.factors, self.settings = function, factors, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x.sin(), self.factors, self.settings).cos()


@pytest.mark.parametrize("function", [Configured, ConfiguredAndMarked])
def test_named_tuples_and_frozen_dataclasses_are_arguments(function: Any) -> None:
    """The program is of their contents: others make another one."""
    layer = Layer(function, Factors(2.0, 3.0), Settings(Side.LEFT, Factors(1.0, 5.0)))
    compiled = dynamotor.compile(layer, fullgraph=True)
    before = counters["frames"]["captured"]
    changes: list[dict[str, Any]] = [
        {},
        {"factors": Factors(2.0, 3.0)},  # equal
        {"factors": Factors(2.0, 4.0)},
        {"settings": Settings(Side.LEFT, Factors(1.0, 7.0))},
        {"settings": Settings(Side.RIGHT, Factors(1.0, 7.0))},
    ]
    for change in changes:
        vars(layer).update(change)
        found = []
        for run in (layer, compiled):
            x = torch.linspace(0, 1, 5).requires_grad_()
            y = run(x)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])
    assert counters["frames"]["captured"] - before == 4


class Open:
    """A record that may change."""

    forward = backward = 2.0


def test_an_argument_that_may_change_breaks_the_graph() -> None:
    layer = Layer(Configured, Open(), Settings(Side.LEFT, Factors(1.0, 5.0)))
    with pytest.raises(dynamotor.CaptureError, match="DM221"):
        dynamotor.compile(layer, fullgraph=True)(torch.ones(3, requires_grad=True))


@torch._dynamo.allow_in_graph
class TimesQuantised(torch.autograd.Function):
    """A product with a wrapper subclass, as with weights that FSDP2 has gathered in float8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Quantised, factors: Factors) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors = factors
        return x @ (weight.values_.to(x.dtype) * weight.scale) * factors.forward

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return g @ (weight.values_.to(x.dtype) * weight.scale).t() * ctx.factors.backward, None, None


def test_a_wrapper_is_an_argument() -> None:
    """It may hold other tensors at each call."""
    run = lambda x, weight: TimesQuantised.apply(x.sin(), weight, FACTORS)  # noqa: E731
    compiled = dynamotor.compile(run, fullgraph=True)
    for n in range(3):
        weight = Quantised(torch.randint(-9, 9, (4, 5), dtype=torch.int8), torch.rand(4, 1) + n)
        found = []
        for call in (run, compiled):
            x = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
            y = call(x, weight)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(found[1], found[0])


FACTORS = Factors(2.0, 3.0)
