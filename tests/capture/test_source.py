"""Sources: fetched again they give the current object, without running user code; they print as Python."""

import types

import pytest
import torch
from every_backend import BACKENDS, same
from torch import nn

from dynamotor.capture.source import (
    Arg,
    Attr,
    Const,
    DictItem,
    InstanceDict,
    Missing,
    SeqItem,
    SlotOf,
    TypeAttr,
)


class Loud:
    """Refuses every hook that user code could run in."""

    klass = "class attribute"

    def __init__(self):
        object.__setattr__(self, "x", 1)

    def __getattribute__(self, name):
        if name in ("x", "klass", "y"):
            raise AssertionError(f"user code ran for {name}")
        return object.__getattribute__(self, name)

    def method(self):
        return 1


class LoudDict(dict):
    def __getitem__(self, key):
        raise AssertionError("user code ran")


class LoudList(list):
    def __getitem__(self, key):
        raise AssertionError("user code ran")


def make_function(captured):
    def function(a, b=2, *, c=3):
        return captured

    return function


x = Arg(0, "x")
function = make_function("cell")
CASES = [
    (x, "x", 5, 5),
    (DictItem(InstanceDict(x), "x"), "x.x", Loud(), 1),
    (TypeAttr(x, "klass"), "x.klass", Loud, "class attribute"),
    (DictItem(x, "k"), "x['k']", LoudDict(k=7), 7),
    (SeqItem(x, 1), "x[1]", LoudList([1, 2]), 2),
    (SeqItem(x, -1), "x[-1]", (1, 2), 2),
    (
        SlotOf(SeqItem(SlotOf(x, "__closure__"), 0), "cell_contents"),
        "x.__closure__[0].cell_contents",
        function,
        "cell",
    ),
    (SlotOf(x, "cell_contents"), "x.cell_contents", types.CellType(4), 4),
    (SlotOf(x, "__defaults__"), "x.__defaults__", function, (2,)),
    (DictItem(SlotOf(x, "__kwdefaults__"), "c"), "x.__kwdefaults__['c']", function, 3),
    (SlotOf(x, "__globals__"), "x.__globals__", function, globals()),
    (DictItem(SlotOf(x, "__globals__"), "x"), "x.__globals__['x']", function, x),
    (SlotOf(x, "__self__"), "x.__self__", [].__class__ and types.MethodType(function, 3), 3),
    (SlotOf(x, "__func__"), "x.__func__", types.MethodType(function, 3), function),
    (Attr(x, "real"), "x.real", 5, 5),
]


@pytest.mark.parametrize("source, text, value, expected", CASES, ids=lambda v: type(v).__name__)
def test_fetch_and_text(source, text, value, expected):
    assert source.fetch((value,)) == expected
    assert str(source) == text


@pytest.mark.parametrize(
    "source, value",
    [
        (x, None),
        (DictItem(InstanceDict(x), "y"), Loud()),
        (TypeAttr(x, "nothing"), int),
        (DictItem(x, 1), {}),
        (SeqItem(x, 3), [1]),
        (SeqItem(SlotOf(x, "__closure__"), 5), function),
        (SlotOf(x, "cell_contents"), types.CellType()),
        (SlotOf(x, "__code__"), len),
        (SlotOf(x, "__self__"), 3),
        (Attr(x, "nope"), 3),
        (InstanceDict(x), 3),
        (SlotOf(x, "__globals__"), len),
    ],
)
def test_what_is_gone_raises_missing(source, value):
    with pytest.raises(Missing):
        source.fetch(() if source is x else (value,))


def test_sources_compare_by_structure_and_constants_by_identity():
    assert DictItem(InstanceDict(Arg(0, "a")), "k") == DictItem(InstanceDict(Arg(0, "b")), "k"), (
        "names are for people"
    )
    assert len({DictItem(x, 1), DictItem(x, 1), DictItem(x, True), DictItem(x, 1.0)}) == 3
    one, other = [], []
    assert Const(one, "a") == Const(one, "b") != Const(other, "a")
    assert Attr(x, "k") != DictItem(x, "k")


def test_sources_are_immutable_and_know_their_root():
    source = SeqItem(InstanceDict(x), 0)
    with pytest.raises(AttributeError):
        source.key = 1
    assert source.root is x and not source.is_held
    assert Attr(Const(3, "three"), "real").is_held


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.a_submodule_with_a_long_name = Deep(depth - 1) if depth else nn.Linear(3, 3)
        self.another_submodule_with_a_long_name = nn.Linear(3, 3)

    def forward(self, x):
        return self.another_submodule_with_a_long_name(self.a_submodule_with_a_long_name(x))


@pytest.mark.regression
@pytest.mark.parametrize("backend", BACKENDS)
def test_long_paths_to_parameters(backend):
    """SwinForImageClassification: graph inputs whose names agree once they are shortened."""
    same(Deep(4), torch.randn(2, 3), backend=backend)
