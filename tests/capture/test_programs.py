"""Python programs give eager's results in one graph, at the first and at later calls, and change what eager
changes.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from kept_graphs import Recorder
from programs import PROGRAMS

import dynamotor


def same(a, b, seen=None):
    """Whether two results are equal, tensors exactly, types included."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        attributes = [getattr(d, "__dict__", None) for d in (a, b)]
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and same(*attributes)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if (
        dataclasses.is_dataclass(a)
        or type(a).__eq__ is object.__eq__
        and hasattr(a, "__dict__")
        and not callable(a)
    ):
        return same(vars(a), vars(b))
    return a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_one_graph(name):
    fn = PROGRAMS[name]
    backend = Recorder()
    compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 3, dtype=torch.float64)
        want, got = fn(x), compiled(x)
        assert same(want, got), (want, got)
    assert compiled.misses == 1


def test_results_keep_their_aliases():
    y, d = PROGRAMS["aliases_in_the_result"], None
    a, b, d, t = dynamotor.compile(y, backend=Recorder(), fullgraph=True)(torch.ones(2))
    assert a is b and d["s"] is a and d["y"] is t and a[0] is t


class Box:
    """Something from outside that programs change."""

    def __init__(self):
        self.n, self.items, self.table, self.names = 0, [1, 2], {"a": 1, "b": 2}, {1, 2}


def change_attributes(x, box):
    box.n = box.n + 1
    box.new = x * 2
    del box.names
    return x + box.n


def change_list(x, box):
    box.items.append(x)
    box.items[0] = "first"
    box.items.extend([4, 5])
    box.items.pop(1)
    return len(box.items)


def change_dict(x, box):
    box.table["c"] = x
    del box.table["a"]
    box.table["b"] += 5
    box.table["a"] = 7
    return list(box.table)


def change_set(x, box):
    box.names.add(9)
    box.names.discard(1)
    return x, 9 in box.names


def change_through_alias(x, box):
    inner = box.items
    box.again = inner
    inner.append(box)
    inner.append(inner)
    return box.again is inner


def change_in_place(x, box):
    x.add_(1)
    box.items.append(x)
    return x


def exchange(x, box):
    box.items, box.table = box.table, box.items
    box.table.append(3)
    return box.items["a"]


@pytest.mark.parametrize(
    "fn", [change_attributes, change_list, change_dict, change_set, change_in_place, exchange]
)
def test_changes_of_outside_objects_are_replayed(fn):
    compiled = dynamotor.compile(fn, backend=Recorder(), fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        ours, theirs, y = Box(), Box(), x.clone()
        assert same(compiled(x, ours), fn(y, theirs))
        assert same(ours, theirs) and same(x, y)


def test_cycles_through_outside_objects():
    box = Box()
    assert dynamotor.compile(change_through_alias, backend=Recorder(), fullgraph=True)(torch.ones(1), box)
    assert box.again is box.items and box.items[-2] is box and box.items[-1] is box.items


COUNT = 0


def count_calls(x):
    global COUNT
    COUNT = COUNT + 1
    return x + COUNT


def test_globals_and_cells_are_written():
    global COUNT
    COUNT = 0
    cell = 0

    def bump(x):
        nonlocal cell
        cell += 2
        return x + cell

    counted, bumped = (
        dynamotor.compile(count_calls, backend=Recorder()),
        dynamotor.compile(bump, backend=Recorder()),
    )
    for i in range(1, 4):
        assert counted(torch.zeros(1)).item() == i == COUNT
        assert bumped(torch.zeros(1)).item() == 2 * i == cell


def test_two_arguments_that_are_one_list():
    def f(x, a, b):
        a.append(x)
        return len(b)

    compiled = dynamotor.compile(f, backend=Recorder())
    one = [1]
    assert compiled(torch.ones(1), [1], [1]) == 1
    assert compiled(torch.ones(1), one, one) == 2
    assert compiled(torch.ones(1), [1], [1]) == 1


def test_exceptions_reach_the_caller():
    def f(x, k):
        if k > 1:
            raise ValueError(f"k is {k}")
        return x + k

    compiled = dynamotor.compile(f, backend=Recorder())
    assert compiled(torch.ones(1), 1).item() == 2
    with pytest.raises(ValueError, match="k is 3"):
        compiled(torch.ones(1), 3)
    assert compiled(torch.ones(1), 0).item() == 1


def test_returned_functions_and_generators_work():
    def f(x):
        y = x + 1

        def inner(t, k=2.0):
            return t * k + y

        return inner

    compiled = dynamotor.compile(f, backend=Recorder(), fullgraph=True)
    x = torch.randn(2)
    assert torch.equal(compiled(x)(x), f(x)(x))
    assert compiled(x).__name__ == "inner" and compiled(x)(x, k=1.0).equal(f(x)(x, k=1.0))


def test_deepcopied_arguments_do_not_recompile():
    def f(x, settings):
        return x * settings["k"] + settings["inner"][1]

    compiled = dynamotor.compile(f, backend=Recorder(), fullgraph=True)
    settings = {"k": 2.0, "inner": [1.0, 3.0]}
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(compiled(x, copy.deepcopy(settings)), f(x, settings))
    assert compiled.misses == 1
    assert torch.equal(compiled(x, {"k": 2.0, "inner": [1.0, 4.0]}), x * 2 + 4.0) and compiled.misses == 2
