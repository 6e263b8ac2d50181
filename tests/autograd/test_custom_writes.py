"""Ops of users that write into their arguments stay in the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect, counters
from dynamotor.graph.custom_writes import functional_op
from dynamotor.graph.shapes import UnsupportedOp


@pytest.fixture
def ops() -> Iterator[Any]:
    """A library of ops that write: `into`, `bump` (with a result) and `scaled` (options of all kinds)."""
    with torch.library._scoped_library("writes", "DEF") as library:
        library.define("into(Tensor(a!) dst, Tensor src) -> ()")
        library.impl("into", lambda dst, src: (dst.copy_(src), None)[1], "CompositeExplicitAutograd")
        library.impl("into", lambda dst, src: None, "Meta")
        library.define("bump(Tensor(a!) dst, Tensor src) -> Tensor")
        library.impl("bump", lambda dst, src: dst.add_(src) * 2, "CompositeExplicitAutograd")
        library.impl("bump", lambda dst, src: torch.empty_like(dst), "Meta")
        library.define(
            "scaled(Tensor src, Tensor(a!) a, Tensor? more=None, *, Scalar by=2, int[] at=[0], Tensor(b!) b, "
            "str how='add') -> (Tensor, Tensor(a!))"
        )

        def scaled(src, a, more=None, *, by=2, at=(0,), b, how="add"):  # type: ignore[no-untyped-def]
            getattr(a, how + "_")(src * by + (0 if more is None else more))
            b[at[0]] = 7
            return src + a, a

        library.impl("scaled", scaled, "CompositeExplicitAutograd")
        library.impl(
            "scaled",
            lambda src, a, more=None, *, by=2, at=(0,), b, how="add": (torch.empty_like(src), a),
            "Meta",
        )
        yield torch.ops.writes


PROGRAMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "without a result": lambda ops, x: (f := torch.full([3], 7.0), ops.into(f, x), f * f)[2],
    "by name": lambda ops, x: (f := torch.full([3], 7.0), ops.into(src=x, dst=f), f * f)[2],
    "overload": lambda ops, x: (f := torch.full([3], 7.0), ops.into.default(f, x), f * f)[2],
    "into a view": lambda ops, x: (f := torch.ones(2, 3), ops.into(f[0], x), f * f)[2],
    "seen by a view": lambda ops, x: (f := x * 2, v := f.view(3), ops.into(f, x), v * 3)[3],
    "into an input": lambda ops, x: (ops.into(x, x + 1), x * 2)[1],
    "with a result": lambda ops, x: (f := x * 1, z := ops.bump(f, x), f + z)[2],
    "options": lambda ops, x: (a := x * 1, b := x * 2, ops.scaled(x, a, by=3, b=b), a, b),
    "more options": lambda ops, x: (
        a := x * 1,
        b := x * 2,
        ops.scaled(x, a, x + 5, at=[1, 2], b=b, how="sub")[1] + 1,
        a,
        b,
    ),
    "reads two views of one tensor": lambda ops, x: (
        q := torch.stack([x * 2, x + 1]).unbind(0),
        a := x * 1,
        b := x * 2,
        ops.scaled(q[0], a, q[1], b=b)[0] + 1,
        a,
        b,
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_custom_op_that_writes_stays_in_the_graph(ops: Any, program: str) -> None:
    given, expected_given = torch.arange(3.0), torch.arange(3.0)
    expected = PROGRAMS[program](ops, expected_given)
    compiled = dynamotor.compile(lambda x: PROGRAMS[program](ops, x), fullgraph=True)
    before = counters["fallback"]["aot.DM229"]
    torch.testing.assert_close(compiled(given), expected)
    torch.testing.assert_close(given, expected_given)
    assert counters["fallback"]["aot.DM229"] == before


WRITES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "without a result": lambda ops, x, w: (f := torch.empty_like(x), ops.into(f, x), w * f)[2],
    "with a result": lambda ops, x, w: (f := torch.zeros_like(x), w * ops.bump(f, x) + w * f * f)[1],
    "returned": lambda ops, x, w: (
        a := x * 1,
        b := x * 2,
        pair := ops.scaled(x, a, x + 5, b=b),
        w * pair[0] + w * pair[1] * a * b,
    )[3],
}


@pytest.mark.parametrize("program", WRITES)
def test_second_derivatives_see_the_writes_of_an_op_that_is_not_repeated(program: str) -> None:
    """Its Python may read something else later; its results were kept, and its writes were not."""
    with torch.library._scoped_library("writes", "DEF") as library:
        library.define("into(Tensor(a!) dst, Tensor src) -> ()")
        library.define("bump(Tensor(a!) dst, Tensor src) -> Tensor")
        library.define(
            "scaled(Tensor src, Tensor(a!) a, Tensor more, *, Tensor(b!) b) -> (Tensor, Tensor(a!))"
        )
        library.impl("into", lambda dst, src: (dst.copy_(src), None)[1], "CPU")
        library.impl("bump", lambda dst, src: dst.add_(src) * 2, "CPU")
        library.impl("scaled", lambda src, a, more, *, b: (b.sub_(src) + a.add_(more), a), "CPU")
        fake = functools.partial(torch.library.register_fake, lib=library)
        fake("writes::into", lambda dst, src: None)
        fake("writes::bump", lambda dst, src: torch.empty_like(dst))
        fake("writes::scaled", lambda src, a, more, *, b: (torch.empty_like(src), a))
        ops, found = torch.ops.writes, []
        for compile_ in (dynamotor.compile, lambda f, **options: f):
            function = compile_(lambda x, w: WRITES[program](ops, x, w).sin().sum(), fullgraph=True)
            x, w = torch.arange(1.0, 4.0), torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
            value = function(x, w)
            (first,) = torch.autograd.grad(value, w, create_graph=True)
            found.append((value, first, *torch.autograd.grad(first.sum(), w)))
    torch.testing.assert_close(*found)


def test_a_custom_op_that_writes_what_another_argument_shows_is_left_to_eager(ops: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        f = x * 2
        ops.bump(f[:2], f[2:4])
        return f * 3

    x = torch.arange(5.0)
    torch.testing.assert_close(dynamotor.compile(function)(x), function(x))


def test_a_collective_that_goes_on_writing_is_left_to_eager() -> None:
    with pytest.raises(UnsupportedOp, match="DM236"):
        functional_op(torch.ops.c10d._allgather_base_.default, (1,))  # it gives a Work, too


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_an_op_that_writes_a_list_writes_it(backend: str) -> None:
    def fill(library: Any, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = a * 2
        library.fill([made, a], 3.0)
        return made + 1, a * 1

    with torch.library._scoped_library("writes_lists", "DEF") as library:
        library.define("fill(Tensor(a!)[] all, float by) -> ()")
        library.impl("fill", lambda all, by: [t.add_(by) for t in all] and None, "CompositeExplicitAutograd")
        library.impl("fill", lambda all, by: None, "Meta")
        ours, theirs = torch.ones(3), torch.ones(3)
        found = dynamotor.compile(lambda a: fill(torch.ops.writes_lists, a), backend=backend)(ours)
        wanted = fill(torch.ops.writes_lists, theirs)
    torch.testing.assert_close((*found, ours), (*wanted, theirs))
    assert ours._version == theirs._version


def _programs_of(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The programs of a call, whose arguments and results are eager's."""
    ours, theirs = ([t.clone() if torch.is_tensor(t) else t for t in args] for _ in range(2))
    with torch.no_grad(), collect("code") as events:
        torch.testing.assert_close(dynamotor.compile(fn)(*ours), fn(*theirs))
    torch.testing.assert_close(ours, theirs)
    return [e.data["program"] for e in events if e.kind == "code"]


@pytest.fixture
def cache_ops() -> Iterator[Any]:
    """`rows` writes a row of each cache of a list, and of one that may be absent."""
    with torch.library._scoped_library("caches", "DEF") as library:
        library.define("rows(Tensor(a!)[] all, Tensor(b!)? last, Tensor row, int at) -> Tensor")

        def rows(all, last, row, at):  # type: ignore[no-untyped-def]
            for cache in (*all, *([] if last is None else [last])):
                cache[at] = row
            return row + at

        library.impl("rows", rows, "CompositeExplicitAutograd")
        library.impl("rows", lambda all, last, row, at: torch.empty_like(row), "Meta")
        yield torch.ops.caches.rows


CACHES: dict[str, Callable[..., Any]] = {
    "inputs": lambda op, a, b, row: op([a, b], None, row, 3) * 2,
    "with an option": lambda op, a, b, row: (op([a], b, row, 3), b.sum())[1],
    "through views": lambda op, a, b, row: op([a[:64], b.t()[:, :8].t()], a[64:], row, 5),
    "twice": lambda op, a, b, row: op([a], None, op([a, b], None, row, 1), 2),
    "what it made": lambda op, a, b, row: (op([a], None, row, 1), op([b], None, a[1], 2))[1],
}


@pytest.mark.parametrize("program", CACHES)
def test_a_custom_op_writes_into_the_cache_itself(cache_ops: Any, program: str) -> None:
    fn = functools.partial(CACHES[program], cache_ops)
    caches = torch.randn(128, 16), torch.randn(128, 16)
    programs = _programs_of(lambda a, b, row: fn(a, b, row), *caches, torch.randn(16))
    copies = [b for p in programs for b in p.buffers.values() if b.kind != "input" and b.spec.numel > 500]
    assert programs and not copies


def test_a_custom_op_leaves_a_cache_whose_old_value_is_read(cache_ops: Any) -> None:
    def fn(a: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old = a * 2
        made = cache_ops([a], None, row, 3)
        return old + a, made

    assert _programs_of(fn, torch.randn(128, 16), torch.randn(16))
