"""Programs on disk of sizes that differ between calls: an entry serves sizes that were unknown when it was made,
and none for which its assumptions do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_aot_sizes import symbolic_graph

import dynamotor
from dynamotor.autograd.aot import aot_compile
from dynamotor.autograd.program_cache import Keeper
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.capture import siblings
from dynamotor.graph.sizes import Size


@pytest.fixture(autouse=True)
def _an_empty_cache(tmp_path: Path) -> Iterator[None]:
    before = config.snapshot()
    config.update(verify=False, check=False, cache_dir=str(tmp_path))
    counters["cache"].clear()
    yield
    config.update(verify=before.verify, check=before.check, cache_dir=before.cache_dir)


def found() -> tuple[int, int]:
    """Programs that were there and that were not, since this was asked last."""
    counts = counters["cache"]["program.hit"], counters["cache"]["program.miss"]
    counters["cache"].clear()
    return counts


def rows_of(least: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > least:
            return x.softmax(0).cumsum(1) * x.shape[0]
        return x.exp().sum(1)

    return fn


def check(fast: Callable[..., Any], fn: Callable[..., Any], *shape: int) -> None:
    theirs = torch.randn(shape, requires_grad=True)
    ours = theirs.detach().clone().requires_grad_()
    a, b = fast(ours), fn(theirs)
    torch.testing.assert_close(a, b)
    for leaf, out in ((ours, a), (theirs, b)):
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        leaf.data = grad
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_entry_serves_sizes_that_nobody_had() -> None:
    fn = rows_of(4)
    check(dynamotor.compile(fn, dynamic=True), fn, 8, 5)
    assert found() == (0, 2)
    fast = dynamotor.compile(fn, dynamic=True)
    for shape in ((6, 3), (19, 7), (5, 64)):
        check(fast, fn, *shape)
    assert found() == (2, 0)
    check(fast, fn, 3, 5)  # beyond a guard
    assert found() == (0, 2)
    check(fast, fn, 33, 2)
    assert found() == (0, 0)


def test_another_constant_in_a_guard_is_another_program() -> None:
    check(dynamotor.compile(rows_of(4), dynamic=True), rows_of(4), 8, 5)
    found()
    check(dynamotor.compile(rows_of(5), dynamic=True), rows_of(5), 8, 5)
    assert found() == (0, 2)


def test_an_entry_that_was_changed_is_compiled_again(tmp_path: Path) -> None:
    fn = rows_of(4)
    check(dynamotor.compile(fn, dynamic=True), fn, 8, 5)
    for entry in [path for path in (tmp_path / "program").rglob("*") if path.is_file()]:
        data = entry.read_bytes()
        for wrong in (
            data.replace(b"s0", b"s1"),
            data.replace(b'"guards":{"list":[', b'"guards":{"list":[7,'),
            data[:-3],
        ):
            assert wrong != data
            entry.write_bytes(wrong)
            found()
            siblings.forget()
            check(dynamotor.compile(fn, dynamic=True), fn, 6, 9)
            assert found() == (1, 0)


class Asking:
    """A backend that asks of a size what only it asks; its programs on disk are the numbers of those it made."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.made: list[torch.fx.GraphModule] = []
        self.keeper = Keeper(lambda: ("none",), self.made.index, lambda number, name: self.made[number])

    def __call__(self, gm: torch.fx.GraphModule, info: Any) -> Callable[..., Any]:
        size = next(n.meta["val"] for n in gm.graph.nodes if type(n.meta.get("val")) is Size)
        assert info.kind != self.kind or size > 3 or size <= 3
        self.made += [torch.fx.GraphModule({}, torch.fx.Graph())] if not self.made else []  # 0 is no program
        self.made.append(gm)
        return gm

    def compile(self, b: int) -> tuple[Callable[..., Any], Any]:
        gm, env = symbolic_graph(lambda x: x.exp().sum(0), [("b", 8)], {"b": b})
        x = torch.randn(b, 8, dtype=torch.float64, requires_grad=True)
        return aot_compile(gm, [x, b], self, keeper=self.keeper), env


def test_what_compilation_assumed_is_assumed_by_who_finds_it() -> None:
    asking = Asking("forward")
    for b, hit, guard in (
        (4, 0, "b >= 4"),
        (9, 1, "b >= 4"),
        (2, 1, "b <= 3"),
        (3, 2, "b <= 3"),
        (70, 1, "b >= 4"),
    ):
        _, env = asking.compile(b)
        assert found()[0] == hit and list(map(repr, env.guards)) == [guard]
    assert len(asking.made) == 3


def test_a_backward_that_assumes_more_is_found_only_where_that_holds() -> None:
    asking = Asking("backward")
    for b, made in ((4, 2), (9, 0), (2, 1), (3, 0)):
        before = max(len(asking.made), 1)
        run, env = asking.compile(b)
        for n in (b, 2, 30):
            counters["fallback"].clear()
            x = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
            run(x, n)[0].sum().backward()
            torch.testing.assert_close(x.grad, x.exp())
            assert counters["fallback"]["backward.sizes"] == ((n > 3) is not (b > 3))
        assert len(asking.made) - before == made and env.guards == []


def _pooled(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1] % 3 + 1
    return torch.nn.functional.adaptive_avg_pool2d(x, (n, n + 1))


def test_a_backward_is_not_found_where_other_things_hold_of_its_forward() -> None:
    fast = dynamotor.compile(_pooled)
    for size in (6, 5), (4, 3), (5, 8):  # windows of one size, but at the last
        check(fast, _pooled, 2, *size)
