"""Inputs whose elements share memory: a write through a view of one shows in others; a graph refuses,
eager runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

pytestmark = pytest.mark.usefixtures("sizes")

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "a row": lambda x: (x[0].add_(1), x * 2),
    "a copy": lambda x: (x[0].copy_(torch.arange(3).to(x.dtype)), x + 1),
    "an element": lambda x: (x[0, 0].fill_(7), x.sum()),
    "a slice": lambda x: (x[:1].mul_(2), x - 1),
}  # fmt: skip
INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.arange(3).expand(2, 3),
    "expanded floats": lambda: torch.arange(3.0).expand(2, 3),
    "windows": lambda: torch.arange(6).as_strided((3, 3), (1, 1)),
}


@pytest.mark.parametrize("what", INPUTS)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_a_write_through_a_view(name: str, what: str, backend: str) -> None:
    x, y, write = INPUTS[what](), INPUTS[what](), WRITES[name]
    try:
        wanted = write(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as found:
            dynamotor.compile(write, backend=backend)(y)
        assert str(found.value) == str(error)
    else:
        torch.testing.assert_close(dynamotor.compile(write, backend=backend)(y), wanted, rtol=0, atol=0)
    assert torch.equal(x, y)


SCATTERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select": lambda x: torch.select_scatter(x, x.select(1, 0) * 2, 1, 0),
    "slice": lambda x: torch.slice_scatter(x, x[:1] * 2, 0, 0, 1),
    "diagonal": lambda x: torch.diagonal_scatter(x, x.diagonal() * 2),
}
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    **INPUTS, "every other": lambda: torch.randn(3, 8)[:, ::2], "padded rows": lambda: torch.randn(8, 3)[::2].t(),
    "a column": lambda: torch.randn(3, 4)[:, :1],
}  # fmt: skip


@pytest.mark.parametrize("what", LAYOUTS)
@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_keeps_holes_and_shared_elements(name: str, what: str) -> None:
    x = LAYOUTS[what]()
    wanted = SCATTERS[name](x)
    found = dynamotor.compile(SCATTERS[name])(x)
    assert torch.equal(found, wanted)
    assert found.stride() == wanted.stride()
