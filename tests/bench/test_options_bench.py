"""`bench options`: which float options need more than two programs."""

import pytest

from bench import options

# Their number decides a shape.
OF_SHAPES = {"arange", "interpolate", "upsample"}


def late(only: str) -> set[str]:
    rows = [row for case in options.cases(only) if (row := options.measure(case)) is not None]
    assert rows and not [row for row in rows if row["wrong"]]
    return {row["name"] for row in rows if row["late"]}


@pytest.mark.slow
def test_rows():
    (case,) = [case for case in options.cases("nn.functional.hardshrink") if case.option == "lambd"]
    row = options.measure(case)
    assert row is not None and row["programs"] == 2 and not row["late"] and not row["wrong"]
    (case,) = [case for case in options.cases("arange") if case.option == "step"]
    row = options.measure(case)
    assert row is not None and row["late"] == 4 and not row["wrong"]


@pytest.mark.slow
def test_two_programs_serve_all_values_of_an_option():
    found = late("")
    assert {name for name in found if not any(known in name for known in OF_SHAPES)} == set()
