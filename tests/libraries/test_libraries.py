"""Programs of other people's libraries (bench/library_cases.py): right, and in no more graphs than under
torch.compile unless the case says why. `make test-libraries` runs them.
"""

from __future__ import annotations

from functools import partial

import pytest

from bench import libraries, torchvision_stub
from bench.beside import in_child
from bench.library_cases import CASES

torchvision_stub.prepare()


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_right_in_few_graphs(name: str) -> None:
    row = in_child(name, partial(libraries.one, name), timeout=300)
    assert row.right, row
    assert not libraries.more_graphs(vars(row)) or CASES[name].reason, row
