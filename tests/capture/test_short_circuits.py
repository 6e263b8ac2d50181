"""Tests of `a and b` in which `a` makes no difference (`capture/short_circuits.py`), and comparisons of sizes that are
handed on without being looked at."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


@pytest.fixture(autouse=True)
def _symbolic() -> Iterator[None]:
    dynamotor.reset()
    with dynamotor.config.patch(symbolic_sizes=True):
        yield


class Limit:
    """As transformers' `MaxLengthCriteria`."""

    def __init__(self, most: int, known: int | None = None) -> None:
        self.most, self.known, self.warned = most, known, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        done = length >= self.most
        if self.known is not None and not done and length > self.known:
            self.warned += 1
        return torch.full((x.shape[0],), done, dtype=torch.bool) | (x.sum(1) > 1e6)


def graphs(fn: Callable[..., Any], lengths: tuple[int, ...], **options: Any) -> int:
    """The graphs of calls with tensors of these lengths, each equal to eager's."""
    counters.clear()
    compiled = dynamotor.compile(fn, **options)
    for n in lengths:
        x = torch.randn(2, n)
        torch.testing.assert_close(compiled(x), fn(x), equal_nan=True)
    found: int = counters["capture"]["graphs"]
    return found


def test_a_length_beside_its_limit_takes_no_program_of_its_own() -> None:
    assert graphs(Limit(9, 40).__call__, (5, 6, 7, 8, 9, 10, 3)) == 2
    assert graphs(Limit(9).__call__, (5, 6, 7, 8, 9, 10, 3)) == 2


def test_the_second_test_has_its_effect_where_both_hold() -> None:
    ours, eagers = Limit(60, 20), Limit(60, 20)
    compiled = dynamotor.compile(ours.__call__, backend="eager")
    for n in (5, 6, 20, 21, 22, 59, 60, 61, 6):
        x = torch.randn(2, n)
        assert torch.equal(compiled(x), eagers(x)) and ours.warned == eagers.warned, n
    assert eagers.warned == 3


def test_a_second_test_with_effects_is_made_only_where_the_first_asks_for_it() -> None:
    class Counted(Limit):
        asked = 0

        @property
        def limit(self) -> int:
            self.asked += 1
            return 40

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            done = x.shape[1] >= self.most
            if not done and self.limit < 0:
                return -x
            return torch.full((x.shape[0],), done, dtype=torch.bool)

    ours, eagers = Counted(9), Counted(9)
    compiled = dynamotor.compile(ours.__call__, backend="eager")
    for n in (5, 6, 9, 10, 7, 9):
        x = torch.randn(2, n)
        assert torch.equal(compiled(x), eagers(x)) and ours.asked == eagers.asked, n


def test_the_way_of_a_class_that_answers_for_attributes_is_taken_only_where_asked() -> None:
    class Answering(Limit):
        asked = 0

        def __getattr__(self, name: str) -> int:
            self.__dict__["asked"] += 1
            return 40

        def __init__(self, most: int) -> None:
            self.most = most
            self.__dict__["asked"] = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            done = x.shape[1] >= self.most
            if not done and self.other < 0:
                return -x
            return torch.full((x.shape[0],), done, dtype=torch.bool)

    ours, eagers = Answering(9), Answering(9)
    compiled = dynamotor.compile(ours.__call__, backend="eager")
    for n in (5, 6, 9, 10, 7, 9):
        x = torch.randn(2, n)
        assert torch.equal(compiled(x), eagers(x)) and ours.asked == eagers.asked, n


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize(
    "fill",
    [
        lambda x, late: torch.full((3,), late),
        lambda x, late: torch.full((x.shape[1],), late, dtype=torch.float32),
        lambda x, late: torch.full((3,), late, dtype=torch.int32),
        lambda x, late: torch.full(size=(3,), fill_value=late, dtype=torch.bool),
        lambda x, late: torch.full_like(x, late),
        lambda x, late: torch.full_like(input=x, fill_value=late),
        lambda x, late: torch.full((3,), late, dtype=None),
        lambda x, late: torch.full_like(x.t(), late, dtype=torch.bool),
        lambda x, late: x.new_full((2, 2), late),
        lambda x, late: torch.full((3,), not late, dtype=torch.bool),
        lambda x, late: torch.full((3,), late, dtype=torch.complex64),
    ],
)
def test_a_tensor_full_of_a_comparison(fill: Any, backend: str) -> None:
    for compare in (operator.ge, operator.eq, operator.ne, operator.lt, operator.le):

        def fn(x: torch.Tensor, compare: Any = compare) -> Any:
            return fill(x, compare(2 * x.shape[1], 14)), x * 2

        dynamotor.reset()
        assert graphs(fn, (5, 6, 7, 8, 7, 9), backend=backend) == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda x, late: x * late,
        lambda x, late: x + 1 if late else x - 1,
        lambda x, late: x + (late + 1),
        lambda x, late: (x + 1, late),
        lambda x, late: (x + 1, not late),
        lambda x, late: (x + 1, {"a": late}, [late, late is True], str(late)),
        lambda x, late: (x + {True: 1, False: 2}[late], late == (x.shape[0] == 2)),
        lambda x, late: (x * (late & True), late | False, late ^ True, -late, ~late),
        lambda x, late: (
            x + 1,
            isinstance(late, bool),
            type(late) is bool,
            callable(late),
            late and 3,
            late or 4,
        ),
        lambda x, late: torch.where(torch.tensor(late), x, -x),
        lambda x, late: torch.nn.functional.dropout(x, 1.0, training=late),
        lambda x, late: x.sum(0, keepdim=late),
        lambda x, late: [x, x + 1][late],
    ],
)
def test_a_comparison_that_is_looked_at_in_other_ways(use: Any) -> None:
    fn = lambda x: use(x, x.shape[1] >= 7)  # noqa: E731
    compiled = dynamotor.compile(fn, backend="eager")
    for n in (5, 6, 7, 8, 3):
        x = torch.randn(2, n)
        ours, wanted = compiled(x), fn(x)
        if isinstance(wanted, tuple):
            assert ours[1:] == wanted[1:] and [type(v) for v in ours] == [type(v) for v in wanted]
            ours, wanted = ours[0], wanted[0]
        assert torch.equal(ours, wanted)


def test_a_comparison_that_an_object_keeps() -> None:
    class Kept:
        late: Any = None

    def fn(x: torch.Tensor, kept: Kept) -> torch.Tensor:
        kept.late = x.shape[1] > 6
        return x * 2

    compiled = dynamotor.compile(fn, backend="eager")
    counters.clear()
    for n in (5, 6, 7, 8, 3):
        kept = Kept()
        compiled(torch.randn(2, n), kept)
        assert kept.late is (n > 6)
    assert counters["capture"]["graphs"] == 2


def test_a_comparison_of_counters_of_a_program() -> None:
    class After:
        def __init__(self, count: int) -> None:
            self.count = count

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.count -= 1
            return torch.full((x.shape[0],), self.count <= 0, dtype=torch.bool)

    ours, eagers = After(5), After(5)
    counters.clear()
    compiled = dynamotor.compile(ours.__call__, backend="eager")
    for _ in range(9):
        x = torch.randn(2, 3)
        assert torch.equal(compiled(x), eagers(x)) and ours.count == eagers.count
    assert counters["capture"]["graphs"] == 2


def test_a_comparison_behind_a_graph_break() -> None:
    def fn(x: torch.Tensor) -> Any:
        late = x.shape[1] >= 7
        if x.sum() > 0:
            x = x + 1
        return torch.full((2,), late), x

    compiled = dynamotor.compile(fn)
    for n in (5, 6, 7, 8, 3, 7):
        for sign in (1, -1):
            x = sign * torch.rand(2, n)
            torch.testing.assert_close(compiled(x), fn(x))
