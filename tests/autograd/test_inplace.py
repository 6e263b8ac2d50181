"""Writes in place: views, versions and histories of written tensors are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def _parts_are_written(x: torch.Tensor, y: torch.Tensor) -> Any:
    whole = x * 2
    first, last = whole.unsafe_chunk(2, 1)
    first.mul_(y[:, :2])
    return whole * 3, last + 1


def _whole_is_written(x: torch.Tensor, y: torch.Tensor) -> Any:
    whole = x * 2
    parts = whole.unsafe_split_with_sizes([1, 3], 1)
    whole.mul_(y)
    return whole, *parts


@pytest.mark.regression
@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("program", [_parts_are_written, _whole_is_written])
def test_unsafe_parts_lie_in_their_source(program: Program, graded: bool) -> None:
    """Autograd knows no views there: each keeps the history that it was given."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    results = []
    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        leaf = x.clone().requires_grad_(graded)
        made = function(leaf, y)
        gradients = [torch.autograd.grad(one.sum(), leaf, retain_graph=True) for one in made if graded]
        results.append((*made, *gradients))
    torch.testing.assert_close(*results)


@pytest.mark.regression
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("backend", ["eager", "native"])
def test_ops_that_write_a_list_give_that_list(kind, backend):
    """It was another one, so that appended items were lost."""

    def fn(items, made):
        written = torch._foreach_add_(items, 1.0)
        more = torch._foreach_mul_(self=made, scalar=2.0)
        more.append(torch.ones(1))
        return written is items, made, more is made

    def args():
        return kind([torch.ones(2), torch.ones(3)]), [torch.ones(2)]

    given, expected = args(), args()
    found = dynamotor.compile(fn, backend=backend, fullgraph=True)(*given)
    torch.testing.assert_close(found, fn(*expected))
    torch.testing.assert_close(given, expected)
    assert found[1] is given[1]


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_ops_that_write_a_list_stay_in_the_graph(backend):
    """One tensor after the other, as eager does; they were left to eager with "made of constants"."""

    def fn(items):
        torch._foreach_add_([items[0], items[1]], [items[1], items[0]])
        return items[0] - items[1]

    given, expected = ([torch.arange(3.0), torch.ones(3)] for _ in range(2))
    found = dynamotor.compile(fn, backend=backend, fullgraph=True)(given)
    torch.testing.assert_close(found, fn(expected))
    torch.testing.assert_close(given, expected)


@pytest.mark.regression
@pytest.mark.parametrize("values", [(3, 3), (4,), (2, 2, 3)])
def test_values_that_do_not_fit_where_they_are_put(values):
    def put(x, at, values):
        return x.index_put((at,), values)

    with pytest.raises((RuntimeError, IndexError), match="shape mismatch"):
        dynamotor.compile(put)(torch.randn(5, 3), torch.tensor([0, 2]), torch.randn(values))


def _write_all(x):
    y = x * 2
    a, b = y.unbind(0)
    a.add_(1)
    return b


def _write_one(x):
    a, _ = (x * 2).chunk(2)
    a[0] = 1
    return a


@pytest.mark.regression
@pytest.mark.parametrize("function", [_write_all, _write_one])
def test_views_that_come_several_at_once_are_not_written(function):
    errors = []
    for call in (function, dynamotor.compile(function)):
        with pytest.raises(RuntimeError) as error:
            call(torch.randn(2, 2, requires_grad=True))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_a_view_whose_base_asks_for_a_gradient_can_ask_for_its_own():
    def f(x, y):
        for t in (x, y):
            t.requires_grad_()
        return y

    x = torch.randn(3, 4)
    y = dynamotor.compile(f, backend=eager_backend)(x, x[0])
    y.square().sum().backward()
    assert y.grad is not None


@pytest.mark.regression
@pytest.mark.parametrize("grad", [False, True])
def test_results_that_were_written_have_their_versions(grad):
    def f(x):
        a, b = x * 2, x.relu()
        a.add_(1).mul_(2)
        c = b.view(-1)
        c[0] = 5
        print(end="")
        return a, b, c, x + a._version + b._version, (a * x).sum()

    x = torch.randn(3, 4, requires_grad=grad)
    want, got = f(x), dynamotor.compile(f)(x)
    assert [t._version for t in got] == [t._version for t in want]
    torch.testing.assert_close(got, want)
    if grad:
        gradients = [torch.autograd.grad(outs[-1] + outs[3].sum(), x)[0] for outs in (got, want)]
        torch.testing.assert_close(*gradients)


@pytest.mark.regression
def test_a_view_that_is_turned_in_place_counts_as_a_write() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).view(x.shape).t_() * 2

    for run in (turned, dynamotor.compile(turned), dynamotor.compile(turned, backend="aot_eager")):
        x = torch.ones(3, 4)
        run(x)
        assert x._version == 1


def _bytes_of_a_cache(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> Any:
    """PyTorch writes no positions of float8."""
    cache.view(torch.uint8)[:, at] = x.to(cache.dtype).view(torch.uint8)
    cache.view(torch.uint8).transpose(0, 1).index_copy_(0, at - 1, x.to(cache.dtype).view(torch.uint8).mT)
    return cache.float().sum(1)


@pytest.mark.regression
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_writes_through_a_view_of_another_dtype(dtype: torch.dtype) -> None:
    ours, eager = torch.zeros(2, 8).to(dtype), torch.zeros(2, 8).to(dtype)
    counters.clear()
    compiled = dynamotor.compile(_bytes_of_a_cache)
    for n in (3, 4, 5):
        x, at = torch.randn(2, n), torch.randperm(7)[:n] + 1
        torch.testing.assert_close(compiled(ours, x, at), _bytes_of_a_cache(eager, x, at))
        assert torch.equal(ours.view(torch.uint8), eager.view(torch.uint8))
    assert "DM237" not in str(counters["fallback"]) and not counters["breaks"]


def _mantissas_are_cut(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(torch.int32).bitwise_and_(-(1 << 16))
    return y * y


def _a_leafs_mantissas_are_cut(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.view(torch.int32).bitwise_and_(-(1 << 16))
    return x * x


@pytest.mark.regression
@pytest.mark.parametrize("program", [_mantissas_are_cut, _a_leafs_mantissas_are_cut])
def test_gradients_behind_a_write_through_a_view_of_another_dtype(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x, results = torch.randn(3, 4), []
    for function in (program, dynamotor.compile(program)):
        leaf = x.clone().requires_grad_()
        made = function(leaf)
        made.sum().backward()
        results.append([made, leaf, leaf.grad])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.regression
def test_a_write_through_a_view_with_larger_elements_runs_as_eagers() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.view(torch.int64)[:, 0] = 0
        return y + 1

    x = torch.randn(3, 4)
    torch.testing.assert_close(dynamotor.compile(program)(x), program(x))
