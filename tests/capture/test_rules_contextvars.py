"""Context variables across graph breaks: what follows the break is captured, tokens and values are eager's."""

import contextvars
import functools

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect

VAR = contextvars.ContextVar("VAR", default=None)
OTHER = contextvars.ContextVar("OTHER")


@dynamotor.disable
def opaque(x):
    return x + 1


def rest(x):
    return torch.relu(x) * 2


def around(function):
    """The pattern of decorators that collect outputs."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        token = VAR.set({"n": len(args)})
        try:
            out = function(*args, **kwargs)
        finally:
            VAR.reset(token)
        return out

    return wrapper


@around
def decorated(x, *, scale=2):
    x = opaque(x)
    VAR.get()["n"] += 1
    return rest(x) * VAR.get()["n"] * scale


@pytest.fixture(autouse=True)
def _unset():
    token = VAR.set(None)
    yield
    VAR.reset(token)


def nested(x):
    outer = VAR.set(2)
    inner = VAR.set(3)
    x = rest(opaque(x)) * VAR.get()
    VAR.reset(inner)
    x = x + VAR.get() + inner.old_value
    VAR.reset(outer)
    return x, VAR.get()


def in_another_order(x):
    first = VAR.set(2)
    second = VAR.set(3)
    VAR.reset(first)
    found = VAR.get()
    x = rest(opaque(x))
    VAR.reset(second)
    found = found, VAR.get(), second.old_value
    VAR.set(None)
    return x, found


def without_a_value(x):
    token = OTHER.set(x)
    x = rest(opaque(OTHER.get()))
    missing = token.old_value is contextvars.Token.MISSING
    OTHER.reset(token)
    return x, missing, OTHER.get(5)


def two_variables(x):
    one, two = VAR.set(1), OTHER.set(2)
    x = rest(opaque(x)) + VAR.get() + OTHER.get()
    OTHER.reset(two)
    VAR.reset(one)
    return x


def handed_out(x):
    token = VAR.set(x)
    return rest(x), token


def raising(x):
    token = VAR.set(4)
    try:
        x = rest(opaque(x))
        raise ValueError(VAR.get())
    except ValueError as error:
        return x * error.args[0]
    finally:
        VAR.reset(token)


@pytest.mark.parametrize(
    "program", [decorated, nested, in_another_order, without_a_value, two_variables, raising]
)
def test_the_rest_behind_a_break_is_captured(program):
    dynamotor.reset()
    x = torch.randn(3)
    compiled = dynamotor.compile(program, backend="eager")
    with collect("capture") as events:
        for i in range(3):
            assert repr(compiled(x + i)) == repr(program(x + i))
            assert VAR.get() is None and OTHER.get(None) is None
    graphs = [e.data["graph"] for e in events if e.data["graph"] is not None]
    assert any(node.target is torch.relu for graph in graphs for node in graph.graph.nodes)
    assert len(events) <= 4, "no capture for each call"


def test_a_token_handed_out_resets_the_variable():
    compiled, x = dynamotor.compile(handed_out, backend="eager", fullgraph=True), torch.randn(3)
    for _ in range(2):
        out, token = compiled(x)
        assert VAR.get() is x and token.var is VAR and token.old_value is None
        VAR.reset(token)
        assert VAR.get() is None


def test_a_token_used_twice_is_refused_as_in_eager():
    def program(x):
        token = VAR.set(1)
        x = opaque(x)
        VAR.reset(token)
        try:
            VAR.reset(token)
        except RuntimeError:
            return x + 1
        return x

    compiled, x = dynamotor.compile(program, backend="eager"), torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(x), program(x)) and VAR.get() is None


def test_the_default_of_a_variable_that_is_reset():
    var, bare = contextvars.ContextVar("default", default=7), contextvars.ContextVar("bare")

    def program(x):
        tokens = var.set(1), bare.set(2)
        x = opaque(x)
        x = x + var.get() + bare.get()
        var.reset(tokens[0])
        bare.reset(tokens[1])
        try:
            bare.get()
        except LookupError:
            return x * var.get()

    compiled, x = dynamotor.compile(program, backend="eager"), torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(x), program(x))
