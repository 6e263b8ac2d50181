"""Functions made in the trace that are reached through their own closures: one object each, as in eager, where a
call of a recursive closure that was handed out gave a list."""

import types

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def recursive(x):
    def f():
        return f

    return x + 1, f


def mutual(x):
    def f(n):
        return g(n - 1) if n else "f"

    def g(n):
        return f(n - 1) if n else "g"

    items, table = [f], {"g": g}
    items.append(items)
    table["self"] = table
    f.g, g.f = g, f
    return x + 1, f, g, items, table


def nested(x):
    items = []

    def held(a=items):
        return a

    items.append(held)

    def outer():
        def inner():
            return outer, inner

        return inner

    return x + 1, items, outer, outer()


def proxy(x):
    m = types.MappingProxyType({"a": x + 1, "list": [1]})
    return m, [2], {"k": 3}, [m]


def test_a_function_that_returns_itself() -> None:
    _, f = dynamotor.compile(recursive, backend="eager")(torch.zeros(1))
    assert f() is f and f.__closure__[0].cell_contents is f


def test_two_that_call_each_other() -> None:
    _, f, g, items, table = dynamotor.compile(mutual, backend="eager")(torch.zeros(1))
    assert (f(3), f(4), g(3)) == ("g", "f", "f")
    assert f.g is g and g.f is f and items[0] is f and items[1] is items
    assert table["g"] is g and table["self"] is table


def test_defaults_and_inner_functions() -> None:
    _, items, outer, inner = dynamotor.compile(nested, backend="eager")(torch.zeros(1))
    assert items[0]() is items and len(items) == 1
    assert inner() == (outer, inner)


def test_a_proxy_of_a_dict_beside_other_containers() -> None:
    m, items, table, holders = dynamotor.compile(proxy, backend="eager")(torch.zeros(1))
    assert m["list"] == [1] and items == [2] and table == {"k": 3} and holders[0] is m


def error(x):
    e = ValueError("a")
    items = [e]
    e.args = (items, e)
    return x + 1, e, items


def test_an_exception_among_its_own_arguments() -> None:
    _, e, items = dynamotor.compile(error, backend="eager", fullgraph=True)(torch.zeros(1))
    assert e.args == (items, e) and items == [e] and type(e) is ValueError


def test_what_a_stop_iteration_carries() -> None:
    _, e = dynamotor.compile(lambda x: (x + 1, StopIteration(3)), backend="eager")(torch.zeros(1))
    assert e.value == 3 and e.args == (3,)
