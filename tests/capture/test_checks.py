"""Tests of data that only raise do not break the graph: a call where one fails runs in eager from its start, with
eager's error, effects and random numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.base.events import counters

GOOD, BAD, BIG = torch.ones(4), torch.tensor([1.0, -1.0, 2.0, 0.5]), torch.full((4,), 9.0)


@pytest.fixture(autouse=True)
def _anew() -> Any:
    dynamotor.reset()
    with dynamotor.config.patch(fallback_random=True):
        yield


def raises(x: Any) -> Any:
    if (x < 0).any():
        raise ValueError(f"negative: {x.sum()}")
    return x * 2


def asserts(x: Any) -> Any:
    assert (x > 0).all(), "positive numbers only"
    assert x.sum() > 0
    assert x.max() < 8
    return x.sqrt()


def reads_numbers(x: Any) -> Any:
    if x.max().item() > 8.5 or float(x.min()) < -1e-300:
        raise OverflowError(x.max().item())
    return x + 1


def asks_bool(x: Any) -> Any:
    positive = bool((x > 0).all())
    if not positive:
        raise ValueError("x")
    return x + 1


def draws(x: Any) -> Any:
    noise = torch.rand(4)
    if (x < 0).any():
        return torch.rand(4) - noise
    assert x[0] < 5
    return x * noise + torch.rand(4)


def asks_torch(x: Any) -> Any:
    torch._assert((x > 0).all(), "torch says no")
    torch._assert_async((x < 8).all(), "too big")
    return x + 1


def asks_a_helper(x: Any) -> Any:
    def check(condition: Any, raises: bool = True) -> bool:
        if not condition:
            if raises:
                raise ValueError("helper")
            return False
        return True

    return x + check((x > 0).all())


def catches(x: Any) -> Any:
    try:
        if (x < 0).any():
            raise ValueError("caught")
    except ValueError:
        return x - 1
    return x + 1


def recomputed(x: Any) -> Any:
    w = x.clone().requires_grad_(False)
    return checkpoint(raises, w, use_reentrant=False)


def distributes(x: Any) -> Any:
    normal = distributions.Normal(x, x)
    return normal.rsample() + normal.log_prob(x * 0.5)


def indexes(x: Any) -> Any:
    at = x.long()
    if (at >= 4).any():
        raise IndexError("my own words")
    return torch.arange(4)[at]


def _outcome(fn: Callable[..., Any], x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    try:
        result = fn(x.clone())
    except Exception as error:
        result = repr(error).partition("\\n")[0]  # pytest shows addresses behind an assertion
    return result, torch.rand(2)


def _same(got: Any, want: Any) -> None:
    assert type(got[0]) is type(want[0])
    assert got[0] == want[0] if isinstance(got[0], str) else torch.allclose(got[0], want[0], equal_nan=True)
    assert torch.equal(got[1], want[1])


PROGRAMS = [
    raises,
    asserts,
    reads_numbers,
    asks_bool,
    asks_torch,
    asks_a_helper,
    catches,
    recomputed,
    distributes,
    indexes,
]


@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("first", [GOOD, BAD])
def test_a_test_of_data_stays_in_the_one_graph(fn: Callable[..., Any], first: torch.Tensor) -> None:
    compiled = dynamotor.compile(fn)
    for x in (first, GOOD, BAD, BIG, GOOD * 2, torch.full((4,), float("nan"))):
        _same(_outcome(compiled, x), _outcome(fn, x))
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"]


def counts(x: Any) -> Any:
    n = (x > 0).sum().item()
    if n == 0:
        raise ValueError("nothing is left")
    if n > 3:
        raise KeyError(n)
    torch._check_value(n != 2)
    return x[x > 0] * n + torch.rand(())


def test_numbers_that_data_decides_are_tested_in_the_graph() -> None:
    compiled = dynamotor.compile(counts)
    for x in (GOOD, BAD, -GOOD, BIG, torch.tensor([1.0, -1, -1, -1]), GOOD):
        _same(_outcome(compiled, x), _outcome(counts, x))
    assert counters["capture"]["graphs"] == 1 and not counters["breaks"]


def test_a_count_is_not_tested_in_a_graph_that_writes() -> None:
    def run(x: Any) -> Any:
        n = (x > 0).sum().item()
        if n == 0:
            raise KeyError("mine")
        return x.mul_(n)

    compiled = dynamotor.compile(run)
    assert torch.equal(compiled(GOOD.clone()), GOOD * 4)
    with pytest.raises(KeyError, match="mine"):
        compiled(-GOOD)


def test_what_raises_only_behind_a_test_that_passes_is_no_error_of_the_capture() -> None:
    def run(x: Any, n: int) -> Any:
        try:
            if x.min() > 0:
                raise KeyError("caught")
            assert n > 2
        except KeyError:
            return x + 1
        return x

    compiled = dynamotor.compile(run)
    assert torch.equal(compiled(GOOD, 1), GOOD + 1) and torch.equal(compiled(BAD, 3), BAD)
    with pytest.raises(AssertionError):
        compiled(BAD, 1)
    assert not counters["frames"]["raised"] or counters["breaks"]


def test_random_numbers_are_drawn_again_from_where_they_were() -> None:
    compiled = dynamotor.compile(draws)
    for x in (GOOD, BAD, BIG, GOOD):
        _same(_outcome(compiled, x), _outcome(draws, x))


def test_effects_before_a_test_that_fails_happen_once() -> None:
    class Log:
        n = 0

    def run(log: Any, x: Any) -> Any:
        log.n += 1
        y = x * 2
        assert (y > 0).all()
        log.n += 10
        return y

    compiled, log = dynamotor.compile(run), Log()
    for x, n in ((GOOD, 11), (BAD, 12), (GOOD, 23)):
        if x is BAD:
            with pytest.raises(AssertionError):
                compiled(log, x)
        else:
            compiled(log, x)
        assert log.n == n


@pytest.mark.parametrize("copies", [1, 1 << 16])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_graph_that_writes_large_inputs_breaks_at_the_test(place: str, copies: int) -> None:
    """Small ones get back their contents."""

    def run(x: Any) -> Any:
        if place == "before":
            x.add_(1)
        if (x < 1).any():
            raise ValueError(x.sum().item())
        if place == "after":
            x.mul_(3)
        return x + 1

    compiled = dynamotor.compile(run)
    for x in (GOOD, BAD, BIG):
        mine, eager = x.repeat(copies), x.repeat(copies)
        try:
            want: Any = run(eager)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                compiled(mine)
        else:
            assert torch.equal(compiled(mine), want)
        assert torch.equal(mine, eager)
    assert counters["breaks"]["DM210"] == (copies > 1)


def test_gradients_flow_and_the_rest_of_a_broken_frame_has_tests_too() -> None:
    def run(x: Any) -> Any:
        y = x.exp()
        assert y.isfinite().all()
        print(end="")
        z = y.sin() * x
        if (z.detach() > 100).any():
            raise ValueError("z")
        return z

    compiled = dynamotor.compile(run)
    for x in (GOOD, BAD, GOOD * 2):
        mine, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(mine).sum().backward()
        run(eager).sum().backward()
        assert torch.allclose(mine.grad, eager.grad)
    with pytest.raises(AssertionError):
        compiled(torch.full((4,), float("inf")))


def test_a_test_that_keeps_memory_small_is_not_put_off() -> None:
    def run(x: Any, n: Any) -> Any:
        if (n > 100).any():
            raise ValueError("too many")
        return x.repeat_interleave(n)

    compiled = dynamotor.compile(run)
    assert torch.equal(compiled(GOOD, torch.tensor([1, 2, 3, 4])), torch.ones(10))
    with pytest.raises(ValueError, match="too many"):
        compiled(GOOD, torch.tensor([1, 2, 3, 1 << 50]))
    assert counters["frames"]["graph raised"] == counters["frames"]["check failed"] == 0


def test_numbers_of_the_trace_itself_are_looked_at() -> None:
    def run(x: Any) -> Any:
        sigma = torch.tensor([1.5, 2.0])
        positive = bool((sigma > 0).all())
        return x + 1 if positive and (sigma.max() > 1) else x

    assert torch.equal(dynamotor.compile(run, fullgraph=True)(GOOD), GOOD + 1)


def test_a_bool_of_a_tensor_and_comparisons_of_its_numbers_are_handed_out() -> None:
    def run(x: Any) -> Any:
        return x * 2, bool((x > 0).all()), x.max().item() > 1.1, operator.eq(0.1, x[3].item()), bool(x[1])

    compiled = dynamotor.compile(run, fullgraph=True)
    for x in (GOOD, BAD, torch.tensor([0.0, 0.0, 0.1, 0.1]), torch.tensor([1.1, float("nan"), 0, 0])):
        got, want = compiled(x), run(x)
        assert (
            torch.equal(
                got[0],
                want[0],
            )
            or x[1].isnan()
        )
        assert got[1:] == want[1:] and list(map(type, got)) == list(map(type, want))
