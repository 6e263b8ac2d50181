"""Positions out of range that a kernel never looked at: the values at them were the same everywhere, or not
read it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression

pytestmark = pytest.mark.usefixtures("sizes")

Read = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
READS: dict[str, Read] = {
    "an embedding of constants": lambda v, i: F.embedding(i, torch.ones(3, 4)) + 1,
    "an embedding of one row": lambda v, i: F.embedding(i, v[0].expand(3, 4)),
    "index_select": lambda v, i: v[0].expand(3, 4).index_select(0, i),
    "gather": lambda v, i: v[0, 0].expand(3).gather(0, i),
    "an index": lambda v, i: torch.ones_like(v)[i] + 1,
    "a part of a sum": lambda v, i: (v[i] + 1)[1:] * 2,
    "a column": lambda v, i: (v[i, i] + 1).unbind()[1],
    "a loss": lambda v, i: F.nll_loss(torch.ones(2, 3), i),
    "classes": lambda v, i: F.one_hot(i, 3) * 2,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("position", [5, -7])
def test_eagers_error(name: str, position: int) -> None:
    read, args = READS[name], (torch.randn(3, 4), torch.tensor([position, 0]))
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        read(*args)
    with pytest.raises(type(wanted.value)) as found:
        dynamotor.compile(read)(*args)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("name", READS)
def test_positions_in_range(name: str) -> None:
    args = torch.randn(3, 4), torch.tensor([2, 1])
    assert torch.equal(dynamotor.compile(READS[name])(*args), READS[name](*args))


ONE = torch.tensor([2])
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "index_fill_": lambda x: x.index_fill_(0, ONE, 2),
    "index_copy_": lambda x: x.index_copy_(0, ONE, torch.ones(1)),
    "index_add_": lambda x: x.index_add_(0, ONE, torch.ones(1)),
    "index_reduce_": lambda x: x.index_reduce_(0, ONE, torch.ones(1), "amax"),
    "scatter_": lambda x: x.scatter_(0, ONE, 1.0),
    "scatter_add_": lambda x: x.scatter_add_(0, ONE, torch.ones(1)),
    "scatter_reduce_": lambda x: x.scatter_reduce_(0, ONE, torch.ones(1), "amax"),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_a_tensor_without_elements(name: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        WRITES[name](x)
        return x + 1

    with pytest.raises(Exception) as wanted:  # noqa: PT011
        program(torch.ones(0))
    compiled = dynamotor.compile(program)
    assert torch.equal(compiled(torch.ones(3)), program(torch.ones(3)))
    with pytest.raises(type(wanted.value)):
        compiled(torch.ones(0))
