"""Errors of the program itself say what CPython says, and carry what CPython's carry."""

import sys
import traceback

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
    unbound_local,
    deleted,
    unbound_free,
    unbound_cell,
    lambda x: 3(),
    lambda x: len(3),
    lambda x: (3)[0],
    lambda x: iter(3),
    lambda x: BOX[0],
    lambda x: BOX.__setitem__(1, 2),
    lambda x: setattr(BOX, "locked", 2),
    lambda x: delattr(BOX, "locked"),
    lambda x: BOX(),
    lambda x: -BOX,
    lambda x: 1 in BOX,
    lambda x: min([]),
    lambda x: max(()),
    lambda x: [*BOX],
    lambda x: abs(BOX),
    lambda x: BOX.nothing,
    lambda x: next(BOX),
    lambda x: len(BOX),
    lambda x: list(reversed(BOX)),
    lambda x: round(BOX),
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


def takes(a, b, c, d=1, *, k=2):
    return a


def only(*, k, m):
    return k


def none():
    return 1


CALLS = [
    lambda: takes(),
    lambda: takes(1),
    lambda: takes(1, 2),
    lambda: takes(1, 2, 3, 4, 5),
    lambda: takes(1, 2, 3, 4, 5, k=3),
    lambda: takes(1, a=2),
    lambda: takes(1, 2, 3, z=1),
    lambda: only(),
    lambda: only(k=1),
    lambda: only(1),
    lambda: none(1),
    lambda: none(1, 2),
    lambda: takes(**{"d": 1}),
    lambda: only(1, 2, k=3),
]


@pytest.mark.parametrize("n", range(len(CALLS)))
def test_messages_of_wrong_calls_are_cpythons(n):
    def caught(x):
        try:
            CALLS[n]()
        except TypeError as error:
            return str(error), x + 1

    x = torch.ones(2)
    assert dynamotor.compile(caught)(x)[0] == caught(x)[0]


def shown(error):
    return [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]


def deep(n):
    if n == 0:
        return {}["missing"]
    try:
        return deep(n - 1)
    finally:
        pass


def kept(x):
    try:
        deep(2)
    except KeyError as error:
        return error


def reraised(x):
    try:
        try:
            deep(1)
        except KeyError:
            raise
    except KeyError as error:
        try:
            raise error
        except KeyError as again:
            return again


def chained(x):
    try:
        try:
            deep(0)
        except KeyError as error:
            raise ValueError from error
    except ValueError as error:
        return error


def handled_across_a_break(x):
    try:
        deep(1)
    except KeyError:
        print(end="")
        raise


def made_bare(x):
    return KeyError(1)


@pytest.mark.parametrize("fn", [kept, reraised, chained, handled_across_a_break, made_bare])
def test_tracebacks_show_the_programs_lines(fn):
    def run(fn):
        try:
            return fn(torch.ones(2))
        except KeyError as error:
            return error

    want, got = run(fn), run(dynamotor.compile(fn))
    while want is not None:
        assert shown(got)[-len(shown(want)) :] == shown(want) and type(got) is type(want)
        want, got = want.__context__, got.__context__
    assert got is None


def test_a_traceback_is_there():
    def asks(x):
        try:
            deep(0)
        except KeyError as error:
            bare = error.with_traceback(None)
            return sys.exc_info()[1] is error, bare.__traceback__ is None, x + 1

    def has(x):
        try:
            deep(0)
        except KeyError as error:
            return error.__traceback__ is not None, sys.exc_info()[2] is error.__traceback__

    x = torch.ones(2)
    assert dynamotor.compile(asks, fullgraph=True)(x)[:2] == (True, True)
    assert dynamotor.compile(has, fullgraph=True)(x) == (True, True)
