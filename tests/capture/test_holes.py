"""Places where a guard is easily forgotten: identity, keys, equality, sets, caches, nested compiled
functions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import warnings
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from test_programs import Recorder, same

import dynamotor
from dynamotor.base.errors import EagerWarning


class Thing:
    def __init__(self, k=1.0):
        self.k = k


@dataclasses.dataclass(frozen=True)
class Key:
    n: int


def check(fn, *calls):
    """Each call gives eager's result, whatever entries the calls before have left."""
    compiled = dynamotor.compile(fn, backend=Recorder())
    for args in calls:
        want, got = fn(*args), compiled(*args)
        assert same(want, got), (args, want, got)
    return compiled


X = torch.arange(3.0)


def test_identity_of_two_arguments():
    a, b = Thing(), Thing()
    check(lambda x, p, q: x + 1 if p is q else x - 1, (X, a, b), (X, a, a), (X, b, a))
    check(lambda x, y: x is y, (X, X.clone()), (X, X))
    check(lambda x, p, q: p in [q], (X, a, b), (X, b, b))
    check(lambda x, p, q: p == q, (X, a, b), (X, b, b))


def test_identity_below_a_held_object():
    holder, other = Thing(), Thing()
    holder.a, holder.b = other, Thing()

    def f(x):
        return x + 1 if holder.a is holder.b else x - 1

    compiled = dynamotor.compile(f, backend=Recorder())
    assert same(compiled(X), f(X))
    holder.b = other
    assert same(compiled(X), f(X))


def test_objects_as_keys():
    a, b = Thing(), Thing()
    table = {a: 1.0, b: 2.0}
    check(lambda x, t: x + table[t], (X, a), (X, b))
    check(lambda x, t: x + table.get(t, 5.0), (X, a), (X, Thing()), (X, b))
    check(lambda x, p, q: {p: 1.0, q: 2.0}[p] + x, (X, a, b), (X, a, a))
    check(lambda x, p, q: len({p, q}), (X, a, b), (X, a, a))
    check(lambda x, p, q: p in {q}, (X, a, b), (X, a, a))
    members = {a}
    check(lambda x, t: t in members, (X, a), (X, b))


def test_tensors_as_keys():
    y = X.clone()
    table = {X: 1.0, y: 2.0}
    check(lambda t: t + table[t], (X,), (y,))
    check(lambda s, t: {s: 1.0, t: 2.0}[s] + s, (X, y), (X, X))


def test_keys_with_their_own_hash():
    table = {Key(-1): 1.0, Key(5): 2.0}
    check(lambda x, k: x + table.get(k, 9.0), (X, Key(-1)), (X, Key(-2)), (X, Key(5)))
    check(lambda x, n: x + {Key(-1): 1.0, Key(-2): 2.0}[Key(n)], (X, -1), (X, -2))
    check(lambda x, k: k in {Key(-2)}, (X, Key(-1)), (X, Key(-2)))


def test_functions_as_arguments_and_keys():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    names = {one: 1.0, two: 2.0}
    check(lambda x, f: f(x) * names[f], (X, one), (X, two), (X, one))
    check(
        lambda x, f: f(x),
        (X, lambda x: x * 2),
        (X, lambda x: x * 3),
        (X, functools.partial(torch.add, other=1)),
    )


def test_types_and_values_of_constants():
    check(lambda x, k: x * k, (X, 1), (X, 1.0), (X, True), (X, 0.0), (X, -0.0))
    check(lambda x, k: (x * k).isnan(), (X, 1.0), (X, float("nan")), (X, float("nan")))
    check(lambda x, k: (k, type(k).__name__), (X, 1), (X, True), (X, 1.0), (X, "1"), (X, None))


def test_order_of_sets_is_eagers():
    def f(x):
        s = {40, 3, 17, 9}
        t = s | {5}
        t.discard(3)
        return list(s), list(t), list(s & t), x + 1

    check(f, (X,), (X,))


def test_outside_sets():
    s = {3, 1, 2}
    check(lambda x: [*s, x], (X,))
    compiled = dynamotor.compile(lambda x: x + len(s) + (7 in s), backend=Recorder())
    assert compiled(X).equal(X + 3)
    s.add(7)
    assert compiled(X).equal(X + 5)


def test_cached_functions_keep_their_cache():
    state = [1.0]

    @functools.lru_cache
    def cached():
        return state[0]

    fn = lambda x: x + cached()  # noqa: E731
    compiled = dynamotor.compile(fn, backend=Recorder())
    assert compiled(X).equal(X + 1)
    state[0] = 5.0
    assert compiled(X).equal(X + 1)
    cached.cache_clear()
    assert compiled(X).equal(X + 5)


def test_compiled_functions_inside_compiled_functions():
    inner = dynamotor.compile(lambda x: x * 2, backend=Recorder())
    module = dynamotor.compile(torch.nn.Linear(3, 3), backend=Recorder())
    backend = Recorder()
    compiled = dynamotor.compile(lambda x: module(inner(x)) + 1, backend=backend, fullgraph=True)
    assert torch.allclose(compiled(X), module(X * 2) + 1)
    assert len(backend.graphs) == 1


def test_disabled_functions_run_as_they_are():
    seen = []

    @dynamotor.disable
    def note(x):
        seen.append(float(x.sum()))
        return x + 1

    compiled = dynamotor.compile(lambda x: note(x * 2) * 3, backend=Recorder())
    assert compiled(X).equal((X * 2 + 1) * 3) and seen == [6.0]


@pytest.mark.parametrize(
    "change", ["default", "kwdefault", "code", "dict", "class", "base", "slot", "metaclass"]
)
def test_changes_between_calls(change):
    class Meta(type):
        factor = 2.0

    class Base:
        shift = 1.0

    class C(Base, metaclass=Meta):
        __slots__ = ("v",)

    c = C()
    c.v, c.w = 3.0, 4.0

    def g(x, a=1.0, *, b=2.0):
        return x * a + b

    g.attr = 5.0

    def f(x):
        return g(x) + g.attr + c.shift + c.v + c.w + type(c).factor

    compiled = dynamotor.compile(f, backend=Recorder())
    for _ in range(2):
        assert same(compiled(X), f(X))
    if change == "default":
        g.__defaults__ = (7.0,)
    elif change == "kwdefault":
        g.__kwdefaults__ = {"b": 8.0}
    elif change == "code":
        g.__code__ = (lambda x, a=1.0, *, b=2.0: x - a - b).__code__
    elif change == "dict":
        g.attr = 9.0
    elif change == "class":
        C.shift = 10.0
    elif change == "base":
        Base.shift = 11.0
    elif change == "slot":
        c.v = 12.0
    else:
        Meta.factor = 13.0
    for _ in range(2):
        assert same(compiled(X), f(X))


def caller():
    return sys._getframe(1).f_code.co_name, inspect.currentframe().f_back.f_locals["y"]


def test_the_stack_of_frames_is_the_programs():
    def f(x):
        y = 5
        return x * 2, caller(), y, inspect.currentframe().f_code.co_name, inspect.stack()[0].function

    compiled = dynamotor.compile(f)
    for _ in range(2):
        assert same(compiled(X), f(X))
    assert dynamotor.compile(sys.getrecursionlimit)() == sys.getrecursionlimit()


def test_the_order_of_an_ordered_dict_is_its_own():
    held = OrderedDict(a=1.0, b=2.0, c=3.0)

    def f(x):
        for name, factor in held.items():
            x = x * factor + len(name) + list(held).index("b")
        return x, list(held), list(reversed(held.values()))

    def write(x, d):
        d.move_to_end(next(iter(d)))
        return x, list(d)

    def moved():
        d = OrderedDict(a=1, b=2, c=3)
        d.move_to_end("a")
        return d

    check(f, (X,), (X,))
    held.move_to_end("a")
    check(f, (X,), (X,))
    want, got = moved(), moved()
    assert write(X, want)[1] == dynamotor.compile(write, fullgraph=True)(X, got)[1] == list(want) == list(got)


def test_items_of_sets_are_told_apart_exactly():
    held = set()

    def f(x):
        return x + len(held), sorted(map(str, held))

    compiled = dynamotor.compile(f, backend=Recorder())
    for items in ({True}, {1.0}, {1}, {(1, 2.0)}, {(1, 2)}, {0.0}, {-0.0}, {1j}, {frozenset((1.0,))}):
        held.clear()
        held.update(items)
        dynamotor.counters.clear()
        assert same(compiled(X), f(X)) and same(compiled(X), f(X))
        assert dynamotor.counters["frames"]["captured"] == 1


def test_a_nan_is_a_key_by_identity():
    one, other = float("nan"), float("nan")
    check(lambda x, k: (x, len({one: 5, k: 6})), (X, one), (X, other), (X, one))


def test_booleans_of_numpy_beside_tensors():
    check(
        lambda x, k: (x + k, x * k, (x > k), x.sum(0, keepdim=bool(k))),
        *[(X.to(d), np.bool_(True)) for d in (torch.float32, torch.int64, torch.uint8)],
    )


def test_a_look_at_a_default_dict_puts_nothing_in_it():
    def f(x, d):
        return {k: x * v for k, v in d.items()}, len(d), "b" in d

    full = {"a": 1.0, "b": 2.0}
    check(f, (X, full), (X, defaultdict(float, full)), (X, defaultdict(float, a=1.0)), (X, {"c": 1.0}))


@pytest.mark.parametrize("detach", [torch.Tensor.detach_, torch.detach_, lambda y: y.detach_()])
def test_a_tensor_is_cut_from_its_history_in_place(detach):
    def f(x):
        y = x * 2
        detach(y)
        return y, y * x

    x = X.clone().requires_grad_()
    cut, product = dynamotor.compile(f)(x)
    product.sum().backward()
    assert not cut.requires_grad and torch.equal(x.grad, X * 2)


def warn_below_filters(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="hidden")
        warnings.warn("hidden", stacklevel=1)
        warnings.warn("seen", stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            warnings.warn("raised", stacklevel=1)
        except UserWarning:
            x = x * 3
    return x


def warn(x):
    try:
        warnings.warn("first", stacklevel=1)
    except UserWarning:
        return x + 1
    return x * 2


@pytest.mark.parametrize("program", [warn_below_filters, warn])
def test_a_warning_meets_the_filters_of_its_place(program):
    compiled = dynamotor.compile(program, backend="eager")
    for action in ("always", "error", "ignore", "always"):
        seen = []
        for fn in (program, compiled):
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter(action)
                warnings.filterwarnings("ignore", category=EagerWarning)
                try:
                    seen.append((fn(X).tolist(), [str(w.message) for w in given]))
                except UserWarning as error:
                    seen.append(str(error))
        assert seen[0] == seen[1]
