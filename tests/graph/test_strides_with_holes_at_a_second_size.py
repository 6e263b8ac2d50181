"""`empty_strided` keeps strides that leave holes between elements when sizes are symbolic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

pytestmark = pytest.mark.usefixtures("sizes")

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zero_": lambda x: torch.empty_strided(x.shape, (2 * x.shape[1], 2)).zero_(),
    "copy_": lambda x: torch.empty_strided(x.shape, (x.shape[1] + 4, 1)).copy_(x),
    "fill_ of columns": lambda x: torch.empty_strided((2, x.shape[0]), (1, 3)).fill_(3),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, (1, x.shape[0] + 1)).copy_(x),
}


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides_are_eagers(name: str, backend: str) -> None:
    program = PROGRAMS[name]
    compiled = dynamotor.compile(program, backend=backend)
    for rows in (5, 7, 8):
        x = torch.randn(rows, rows + 1)
        wanted, found = program(x), compiled(x)
        assert found.stride() == wanted.stride()
        assert torch.equal(found, wanted)
