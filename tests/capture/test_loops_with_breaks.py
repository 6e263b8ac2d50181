"""A loop whose rounds break the graph goes round by round: each next item is taken natively, results and what the
loop does to its objects are eager's, and the number of programs does not grow with the rounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

N = 24


def over_list(x: torch.Tensor, items: list[Any]) -> Any:
    for item in items:
        print(end="")
        x = x * item + 1
    return x


def over_tuple(x: torch.Tensor, items: list[Any]) -> Any:
    seen = ()
    for item in tuple(items):
        x = x * item
        print(end="")
        seen += (item,)
    return x, seen


def over_enumerate(x: torch.Tensor, items: list[Any]) -> Any:
    for i, item in enumerate(items, 3):
        print(end="")
        x = x + i * item
    return x, i


def over_zip(x: torch.Tensor, items: list[Any]) -> Any:
    for a, b in zip(items[:-1], items[1:]):
        x = x + a - b
        print(end="")
        x = x * 0.5
    return x


def over_reversed(x: torch.Tensor, items: list[Any]) -> Any:
    for item in reversed(items):
        print(end="")
        x = x + item
    return x


def over_dict(x: torch.Tensor, items: list[Any]) -> Any:
    for key, item in dict(enumerate(items)).items():
        print(end="")
        x = x + item * key
    return x


def over_map(x: torch.Tensor, items: list[Any]) -> Any:
    for item in map(lambda v: v * 2, items):  # noqa: C417
        print(end="")
        x = x + item
    return x


def over_filter(x: torch.Tensor, items: list[Any]) -> Any:
    for item in filter(lambda v: v != 3, items):
        print(end="")
        x = x + item
    return x


def over_range(x: torch.Tensor, items: list[Any]) -> Any:
    for i in range(len(items)):
        print(end="")
        x = x + items[i]
    return x


def that_grows(x: torch.Tensor, items: list[Any]) -> Any:
    for item in items:
        print(end="")
        if len(items) < N + 5:
            items.append(item + 1)
        x = x + item
    return x, items


def with_else(x: torch.Tensor, items: list[Any]) -> Any:
    for item in items:
        print(end="")
        if item == 5:
            continue
        if item > N + 100:
            break
        x = x + item
    else:
        x = x * 2
    return x


def left_early(x: torch.Tensor, items: list[Any]) -> Any:
    walk = iter(items)
    for item in walk:
        print(end="")
        x = x + item
        if item == 20:
            break
    return x, next(walk), list(walk)


def nested(x: torch.Tensor, items: list[Any]) -> Any:
    for row in [items[:4], items[4:8], items[8:12]]:
        for item in row:
            print(end="")
            x = x + item
        x = x * 0.9
    return x


def that_raises(x: torch.Tensor, items: list[Any]) -> Any:
    try:
        for item in items:
            print(end="")
            x = x + 6 / (item - 18)
    except ZeroDivisionError:
        x = x * 3
    return x


def called(x: torch.Tensor, items: list[Any]) -> Any:
    def part(x: torch.Tensor, n: int) -> torch.Tensor:
        for item in items[:n]:
            x = x + item
            print(end="")
        return x

    return part(part(x, 10), 12) * 2


LOOPS = [
    over_list, over_tuple, over_enumerate, over_zip, over_reversed, over_dict, over_map, over_filter, over_range,
    that_grows, with_else, left_early, nested, that_raises, called,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_rounds(loop: Callable[..., Any], backend: str) -> None:
    compiled = dynamotor.compile(loop, backend=backend)
    x = torch.linspace(0, 1, 3, dtype=torch.float64)
    for numbers in (range(N), range(2, N + 6), range(N)):
        wants, gots = [float(n) for n in numbers], [float(n) for n in numbers]
        want, got = loop(x, wants), compiled(x, gots)
        torch.testing.assert_close(got, want)
        assert gots == wants


@pytest.mark.parametrize("loop", [over_list, over_zip, over_enumerate], ids=lambda loop: loop.__name__)
def test_rounds_over_tensors_share_programs(loop: Callable[..., Any]) -> None:
    def tensors(n: int) -> list[torch.Tensor]:
        return list(torch.linspace(0.5, 1.5, n, dtype=torch.float64))

    compiled = dynamotor.compile(loop, backend="eager")
    x = torch.linspace(0, 1, 3, dtype=torch.float64)
    before, full = counters["capture"]["graphs"], counters["frames"]["cache_limit"]
    torch.testing.assert_close(compiled(x, tensors(N)), loop(x, tensors(N)))
    torch.testing.assert_close(compiled(x, tensors(N + 3)), loop(x, tensors(N + 3)))
    assert counters["frames"]["cache_limit"] == full
    assert counters["capture"]["graphs"] - before <= 6


def branching(x: torch.Tensor, items: list[Any]) -> Any:
    for i, item in enumerate(items):
        if x.sum() > 1e6:
            x = x - i
        x = x + item
    return x


def found(x: torch.Tensor, items: list[Any]) -> Any:
    for i, item in enumerate(items):
        x = x + (i if 3.0 in x else item)
    return x


@pytest.mark.parametrize("loop", [branching, found], ids=lambda loop: loop.__name__)
def test_a_break_of_another_instruction_leaves_the_loops_iterator_readable(loop: Callable[..., Any]) -> None:
    """An iterator below the instruction's operands is none of them."""
    before = counters["breaks"]["DM212"]
    x, items = torch.linspace(0, 1, 3, dtype=torch.float64), [float(n) for n in range(4)]
    torch.testing.assert_close(dynamotor.compile(loop, backend="eager")(x, items), loop(x, items))
    assert counters["breaks"]["DM212"] == before
