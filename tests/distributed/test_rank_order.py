"""Rows stay in the order of ranks where all that is computed between a gather and a scatter treats rows alike."""

from __future__ import annotations

import pytest
from rank_orders import PROGRAMS, compared
from ranks import Pair


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_are_copied_into_another_order_where_it_matters(pair: Pair, name: str) -> None:
    for result in pair.run(compared, name, 3):
        assert result["worst"] <= 1e-12 and bool(result["copies"]) is not PROGRAMS[name][1], result


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_one_sequence_are_in_order(pair: Pair, name: str) -> None:
    for result in pair.run(compared, name, 1):
        assert result["worst"] <= 1e-12 and (not result["copies"] or "own" in name), result
