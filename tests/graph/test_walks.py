"""Walks over graphs: reached nodes, and the order in which each stands behind its operands."""

from __future__ import annotations

from dynamotor.graph.nodes import in_order, reached

NEEDS = {"sum": ["left", "right"], "left": ["x"], "right": ["x", "y"], "x": [], "y": [], "alone": ["y"]}


def test_what_is_reached() -> None:
    assert reached(["sum"], NEEDS.__getitem__) == {"sum", "left", "right", "x", "y"}
    assert reached([], NEEDS.__getitem__) == set()
    assert reached([1], lambda n: [n * 2 % 7]) == {1, 2, 4}  # circles end


def test_each_stands_behind_what_it_needs() -> None:
    found = in_order(["alone", "sum", "left"], NEEDS.__getitem__)
    assert sorted(found) == sorted(NEEDS)
    assert all(found.index(need) < found.index(item) for item in found for need in NEEDS[item])


def test_a_chain_may_be_longer_than_pythons_stack() -> None:
    chain = in_order([100_000], lambda n: [n - 1] if n else [])
    assert chain == list(range(100_001))
