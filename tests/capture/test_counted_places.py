"""As many values as data decides, put where a mask or an index says, and counts that get a plain shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def put(x: Any, m: Any) -> Any:
    y = x.clone()
    y[m] = x[m] * 2
    return y


def add(x: Any, m: Any) -> Any:
    y = x * 1
    y[m] += 1.5
    y[m] *= y[m]
    return y


def put_at_indices(x: Any, m: Any) -> Any:
    at = torch.where(m)[0]
    y = torch.zeros_like(x)
    y[at] = x[at].exp()
    return y + y.sum()


def put_in_columns(x: Any, m: Any) -> Any:
    y = x.mT.clone()
    y[:, m] = x.mT.contiguous()[:, m] - 1
    return y


def put_by_elements(x: Any, m: Any) -> Any:
    y = x.clone()
    y[x > 0] = -y[y > 0]
    return y * 3


def put_one_for_all(x: Any, m: Any) -> Any:
    """A value of one row is broadcast; of another number of rows than the mask has it is refused."""
    y = x.clone()
    y[m] = x[x[:, 0] > 1]
    return y


def put_under_views(x: Any, m: Any) -> Any:
    """Views that are there before the write see it, and it sees writes through them."""
    y = x.clone()
    row, rest = y[0], y[1:]
    n = x[m] * 2
    rest.add_(1)
    y[m] = n
    row.mul_(3)
    return torch.cat([y, row[None] + 1, rest * 2])


def put_and_give_views(x: Any, m: Any) -> Any:
    y = (x * 1).relu()
    row = y.mT[1]
    y[m] = x[m]
    return row


def put_into_input(x: Any, m: Any) -> Any:
    with torch.no_grad():
        z = x.detach()
        z[m] = z[m] * 2
    return z + 1


def bins(x: Any, m: Any) -> Any:
    return torch.bincount(m.long() * 3 + m.long().roll(1), minlength=6).reshape(2, 3) * x.sum()


def too_many_bins(x: Any, m: Any) -> Any:
    return torch.bincount(m.long() * 5, minlength=4).view(2, 2) * x.sum()


PROGRAMS = [put, add, put_at_indices, put_in_columns, put_by_elements, put_into_input, bins]
VIEWS = [put_under_views, put_and_give_views]
MASKS = ([1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1])


def answers(fn: Callable[..., Any], needs_grad: bool) -> list[Any]:
    """What calls with each mask give and write, the gradients or the error."""
    found: list[Any] = []
    for n, row in enumerate(MASKS):
        torch.manual_seed(n)
        x = torch.randn(5, 3).requires_grad_(needs_grad)
        try:
            out = fn(x, torch.tensor(row, dtype=torch.bool))
            found += [out.detach(), x.detach()]
            if out.requires_grad:
                found.append(torch.autograd.grad(out.square().sum(), x)[0])
        except (RuntimeError, IndexError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("fn", [*PROGRAMS, *VIEWS, put_one_for_all, too_many_bins])
def test_values_that_data_counts(fn: Callable[..., Any], needs_grad: bool, backend: str) -> None:
    dynamotor.reset()
    wanted, found = answers(fn, needs_grad), answers(dynamotor.compile(fn, backend=backend), needs_grad)
    assert len(found) == len(wanted)
    for mine, its in zip(found, wanted, strict=True):
        assert mine == its if isinstance(its, str) else not torch.testing.assert_close(mine, its)
    if fn in PROGRAMS:  # put and add with gradients: few calls around what data counts, all of them eager's
        assert counters["capture"]["graphs"] == 1 and not counters["breaks"]
