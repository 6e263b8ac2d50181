"""Errors of data (a position out of range) that the program catches behind a write of its inputs: the graph, which would
not run again, breaks in front of the op. Handlers that raise again do not break it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression


class Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> bool:
        return True


class Timed(Quiet):
    def __exit__(self, *error: object) -> bool:
        return False


@contextlib.contextmanager
def missing() -> Iterator[None]:
    try:
        yield
    except IndexError:
        return


def rows(w: torch.Tensor, at: torch.Tensor) -> Iterator[torch.Tensor]:
    try:
        yield w[at]
    except IndexError:
        yield w


def clause(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return w[at]
    except (KeyError, IndexError):
        return w


def outer_clause(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        with Timed():
            return torch.nn.functional.embedding(at, w)
    except:  # noqa: E722
        return w


def final(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return w[at]
    finally:
        return w  # noqa: B012, SIM107


def managers(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    for manager in (Quiet(), missing(), contextlib.suppress(IndexError), contextlib.ExitStack()):
        with manager as entered:
            if entered is not None:
                entered.enter_context(Quiet())
            w = w * 2
            w = w[at]
    return w


def suppressed(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with Quiet():
        return w[at]
    return w


def generator(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return next(rows(w, at))


@torch.library.custom_op("caught_errors::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x + 1


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def custom(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return positive(5 - at)
    except ValueError:
        return w


def quotient(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return at // (at - 7)[1] % (at - 2)[1]
    except RuntimeError:
        return w


def deviations(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return torch.normal(w, (5 - at).float()[1].expand(5, 2)) * 0
    except RuntimeError:
        return w


def bag(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return torch.nn.functional.embedding_bag(at, w, torch.tensor([0]))
    except RuntimeError:
        return w


def ordered(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return torch.searchsorted(w[:, 0].contiguous(), w, sorter=at[1].expand(5).contiguous()) + w
    except RuntimeError:
        return w


def packed(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return torch.nn.utils.rnn.pack_padded_sequence(w, torch.tensor([2, 1]) + at).data
    except RuntimeError:
        return w


def filled(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return torch.zeros(5, 2, dtype=torch.int8).masked_fill(w > 0, at[1] * 20) + w
    except RuntimeError:
        return w


def factors(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    square = (5 - at).float()[:, None].log() * torch.ones(2)  # NaN for a position above 5
    try:
        return (
            torch.linalg.eigvalsh(square) + torch.linalg.svdvals(square) + torch.linalg.eigvals(square).abs()
        )
    except RuntimeError:
        return w


def raised_again(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with Timed(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            return w[at]
        finally:
            w = w + 1


def first(
    x: torch.Tensor, read: Callable[..., Any], w: torch.Tensor, at: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    return x.add_(1), read(w, at)


def last(
    x: torch.Tensor, read: Callable[..., Any], w: torch.Tensor, at: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    return read(w, at), x.add_(1)


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize(
    "read",
    [
        *(clause, outer_clause, final, managers, generator, custom, quotient, deviations, bag, factors),
        *(ordered, packed, filled),
    ],
)
@pytest.mark.parametrize("program", [first, last])
def test_the_programs_own_handler_sees_the_error(program: Any, read: Any, backend: str) -> None:
    compiled = dynamotor.compile(program, backend=backend)
    for at in (1, 7, 2):
        given = [(torch.ones(3), read, torch.randn(5, 2), torch.tensor([0, at])) for _ in range(2)]
        given[1][2].copy_(given[0][2])
        ours, theirs = compiled(*given[0]), program(*given[1])
        assert all(map(torch.equal, ours, theirs)) and torch.equal(given[0][0], given[1][0])


@pytest.mark.regression
def test_a_manager_that_returns_true_is_a_handler() -> None:
    """Also behind a write that is too large to be undone."""
    compiled = dynamotor.compile(first, backend="eager")
    for at in (1, 7, 2):
        given = [(torch.ones(20_000), suppressed, torch.ones(5, 2), torch.tensor([0, at])) for _ in range(2)]
        ours, theirs = compiled(*given[0]), first(*given[1])
        assert all(map(torch.equal, ours, theirs))


def test_what_raises_again_does_not_break_the_graph() -> None:
    compiled = dynamotor.compile(first, backend="eager", fullgraph=True)
    compiled(torch.ones(3), raised_again, torch.randn(5, 2), torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        compiled(torch.ones(3), raised_again, torch.randn(5, 2), torch.tensor([0, 7]))


def other_clauses(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        try:
            return w[at]
        except NotImplementedError:
            return w
    except (KeyError, ArithmeticError):
        return w + 1


def test_clauses_for_classes_that_no_kernel_raises_do_not_break_the_graph() -> None:
    """As around the writes of the caches of transformers."""
    compiled = dynamotor.compile(first, backend="eager", fullgraph=True)
    compiled(torch.ones(3), other_clauses, torch.randn(5, 2), torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        compiled(torch.ones(3), other_clauses, torch.randn(5, 2), torch.tensor([0, 7]))


def hiding_clause(w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    try:
        return w[at]
    except OSError:
        return w


def test_a_global_may_hide_the_builtin_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OSError", IndexError)
    compiled = dynamotor.compile(first, backend="eager")
    given = [(torch.ones(3), hiding_clause, torch.ones(5, 2), torch.tensor([0, 7])) for _ in range(2)]
    assert all(map(torch.equal, compiled(*given[0]), first(*given[1])))


def test_nothing_breaks_away_from_the_cpu() -> None:
    """A GPU's errors come later, and end the process."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return clause(torch.ones(5, 2, device="meta"), torch.ones(2, dtype=torch.int64, device="meta"))

    assert dynamotor.compile(program, backend="eager", fullgraph=True)(torch.ones(3)).shape == (2, 2)


def test_nothing_breaks_where_no_input_is_written() -> None:
    compiled = dynamotor.compile(clause, backend="eager")
    counters.clear()
    for at in (1, 7):
        assert compiled(torch.randn(5, 2), torch.tensor([0, at])).shape == (2 if at == 1 else 5, 2)
    assert not counters["breaks"]


def test_the_random_state_is_that_of_the_error() -> None:
    """Also where no whole numbers are involved: factors of NaN."""

    def program(x: torch.Tensor) -> torch.Tensor:
        x.add_(torch.rand(3))
        values = torch.linalg.svdvals(x.log()[:, None] * torch.ones(3))
        return values + torch.rand(3)

    states = []
    for run in (program, dynamotor.compile(program, backend="eager")):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError):
            run(torch.full((3,), -2.0))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
