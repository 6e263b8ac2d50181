"""A graph break inside `no_grad`: what comes after the block takes part in autograd again.

Found by random programs: the rest of the function was captured without gradients, and ran so to its end.
"""

import copy

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def rest(x, w, seen):
    with torch.no_grad():
        a = x * 2
        seen.append(float(a.sum()))
        b = a * w
    return (x * w).sin() + b, x.clone()[1:]


def written(x, w, seen):
    with torch.no_grad():
        seen.append(float(x.sum()))
        x -= x * 0.5
    return (x * w,)


def turned_on(x, w, seen):
    with torch.no_grad():
        seen.append(float(x.sum()))
        with torch.enable_grad():
            y = x * w
        z = x * y
    return y, z


@pytest.mark.parametrize("fn", [rest, written, turned_on])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_gradients_are_eagers(fn, backend):
    inputs = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    twins, seen, compiled = copy.deepcopy(inputs), [], dynamotor.compile(fn, backend=backend)
    for _ in range(2):
        want, got = fn(*inputs, seen), compiled(*twins, seen)
        assert [t.requires_grad for t in got] == [t.requires_grad for t in want]
        for outs in (want, got):
            sum(t.sum() for t in outs).backward()
        for a, b in zip([*want, *(t.grad for t in inputs)], [*got, *(t.grad for t in twins)], strict=True):
            torch.testing.assert_close(b, a)
        assert torch.is_grad_enabled()


def test_a_view_behind_no_grad_and_a_break_asks_for_a_gradient() -> None:
    """96002:15492: the rest begins without gradients, and the view was made so."""

    def function(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y.requires_grad_()
        return y[:]

    for run in (function, dynamotor.compile(function, backend="aot_eager")):
        assert run(torch.ones(4, 4).t()).requires_grad
