"""Memory that a collective reads or writes belongs to it until it is waited for."""

from __future__ import annotations

import pytest
from collective_programs import PROGRAMS, compared, of_parameters, raised_between
from ranks import Pair


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_writes_memory_of_a_message_on_its_way(pair: Pair, name: str) -> None:
    assert max(pair.run(compared, name)) <= 1e-12


def test_memory_of_a_message_is_not_lent_when_the_program_raises(pair: Pair) -> None:
    assert max(pair.run(raised_between)) <= 1e-12


def test_what_ranks_send_is_no_constant(pair: Pair) -> None:
    assert max(pair.run(of_parameters)) <= 1e-12
