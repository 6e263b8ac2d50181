"""Errors of the program itself say what CPython says, and carry what CPython's carry."""

import pytest
import torch

import dynamotor

BOX = type("Box", (), {"locked": property(lambda self: 1)})()


def unbound_local(x):
    if x is None:
        y = 1
    return y


def deleted(x):
    del x
    return x  # noqa: F821


def unbound_free(x):
    def inner():
        return y  # noqa: F821
    inner()
    y = 1  # noqa: F841


def unbound_cell(x):
    y = 1
    def inner():
        return y  # noqa: F821
    del y
    return inner, y  # noqa: F821


RISKS = [
    unbound_local, deleted, unbound_free, unbound_cell, lambda x: 3(), lambda x: len(3), lambda x: (3)[0], lambda x: iter(3),
    lambda x: BOX[0], lambda x: BOX.__setitem__(1, 2), lambda x: setattr(BOX, "locked", 2), lambda x: delattr(BOX, "locked"),
    lambda x: BOX(), lambda x: -BOX, lambda x: 1 in BOX, lambda x: min([]), lambda x: max(()), lambda x: [*BOX], lambda x: abs(BOX),
    lambda x: BOX.nothing, lambda x: next(BOX), lambda x: len(BOX), lambda x: list(reversed(BOX)), lambda x: round(BOX),
    lambda x: range(BOX),
]


@pytest.mark.parametrize("n", range(len(RISKS)))
@pytest.mark.filterwarnings("ignore")
def test_messages_are_cpythons(n):
    def caught(x):
        try:
            RISKS[n](x)
        except Exception as error:
            return type(error), str(error), x + 1
    x = torch.ones(2)
    want, got = caught(x), dynamotor.compile(caught)(x)
    assert got[:2] == want[:2]
