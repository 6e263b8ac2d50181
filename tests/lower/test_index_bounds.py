"""Positions out of range that a kernel never looked at: what lies at them was the same everywhere, or nobody
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
