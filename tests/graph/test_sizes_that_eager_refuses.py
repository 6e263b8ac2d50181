"""A general program takes no sizes that eager refuses: its kernels would read beyond a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

LONG = {"dtype": torch.int64}
CASES: list[
    tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[int, ...]]
] = [
    # a function; its arguments' shapes at two calls that make a general program; the refused call; which
    # arguments are positions
    (lambda x, i: x.gather(0, i), ((5, 6), (4, 6)), ((7, 9), (3, 8)), ((7, 6), (4, 8)), (1,)),
    (
        lambda x, i, y: x.scatter(1, i, y),
        ((5, 6), (4, 6), (4, 7)),
        ((7, 9), (3, 8), (5, 8)),
        ((4, 6), (5, 6), (9, 9)),
        (1,),
    ),
    (
        lambda x, i, y: x.index_add(0, i, y),
        ((5, 6), (4,), (4, 6)),
        ((7, 9), (3,), (3, 9)),
        ((5, 6), (4,), (4, 7)),
        (1,),
    ),
    (lambda x, y: x.slice_scatter(y, 0, 1), ((5, 6), (4, 6)), ((7, 9), (6, 9)), ((5, 6), (6, 6)), ()),
    (lambda x, y: x.select_scatter(y, 0, 1), ((5, 6), (6,)), ((7, 9), (9,)), ((5, 6), (7,)), ()),
    (
        lambda x, i, y: x.index_put((i,), y),
        ((5, 6), (4,), (4, 6)),
        ((7, 9), (3,), (3, 9)),
        ((5, 6), (4,), (3, 6)),
        (1,),
    ),
    (
        lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:], w),
        ((5, 6), (6,)),
        ((7, 9), (9,)),
        ((5, 6), (5,)),
        (),
    ),
    (
        lambda x, w: torch.nn.functional.conv1d(x, w),
        ((2, 3, 9), (4, 3, 5)),
        ((3, 3, 7), (4, 3, 4)),
        ((3, 3, 4), (4, 3, 5)),
        (),
    ),
]


@pytest.mark.parametrize(("fn", "first", "second", "refused", "positions"), CASES)
def test_a_general_program_refuses_what_eager_refuses(
    fn: Callable[..., Any], first: Any, second: Any, refused: Any, positions: Any
) -> None:
    def arguments(shapes: Any) -> list[torch.Tensor]:
        return [torch.zeros(s, **LONG) if n in positions else torch.randn(s) for n, s in enumerate(shapes)]

    compiled = dynamotor.compile(fn)
    for shapes in (first, second, first):
        args = arguments(shapes)
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert [e.general for e in compiled.entries] == [False, True]
    with pytest.raises(RuntimeError):
        fn(*arguments(refused))
    with pytest.raises(RuntimeError):
        compiled(*arguments(refused))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: x.index_select(-1, i),
        lambda x, i: x[:, i],
        lambda x, i: torch.nn.functional.embedding(i, x),
    ],
)
def test_nothing_is_picked_where_nothing_is(pick: Any, dynamic: bool) -> None:
    compiled, i = dynamotor.compile(lambda x: pick(x, i) + 1, dynamic=dynamic), torch.tensor([0])
    for n in (4, 5):
        assert torch.equal(compiled(torch.ones(n, n)), pick(torch.ones(n, n), i) + 1)
    with pytest.raises((RuntimeError, IndexError)) as want:
        pick(torch.ones(0, 0), i)
    with pytest.raises(type(want.value)):
        compiled(torch.ones(0, 0))
