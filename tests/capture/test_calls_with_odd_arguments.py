"""Defaults and names of called functions are the current ones, and wrong calls raise CPython's errors."""

import collections
import contextvars
import copy
import functools
import logging
import sys

import pytest
import torch

import dynamotor
from dynamotor.capture.breaks import Unsupported
from dynamotor.capture.values.base import run_rule
from dynamotor.capture.values.constant import NONE

pytestmark = pytest.mark.regression


def test_defaults_are_the_functions_own_objects():
    def callee(x, *, k=1):
        return x * k

    def program(x):
        first = callee(x)
        callee.__kwdefaults__["k"] += 4
        return first, callee(x), callee.__kwdefaults__, callee.__defaults__

    x = torch.ones(2)
    compiled = dynamotor.compile(program, backend="eager")
    for n in (1, 5):
        first, second, named, positional = compiled(x)
        assert (first[0], second[0]) == (n, n + 4)
        assert named is callee.__kwdefaults__ and positional is None
    callee.__defaults__ = ()
    assert compiled(x)[3] == ()
    callee.__kwdefaults__ = {"k": 2, "other": 3}
    assert compiled(x)[2] == {"k": 6, "other": 3}


def test_an_empty_dict_of_defaults_is_not_none():
    def callee():
        pass

    def program(x):
        return x + 1, str(callee.__kwdefaults__)

    compiled = dynamotor.compile(program, backend="eager")
    assert compiled(torch.ones(1))[1] == "None"
    callee.__kwdefaults__ = {}
    assert compiled(torch.ones(1))[1] == "{}"


def _message(program, x):
    try:
        program(x)
    except Exception as error:
        return x * 2, type(error), str(error)
    return x, None, None


def _function():
    def named(x, k):
        return x * k

    return named


exchanged, renamed = _function(), _function()
exchanged.__code__ = (lambda x, k, z: x).__code__
renamed.__qualname__ = "some.other"
CALLS = [
    lambda x: exchanged(x),
    lambda x: exchanged(x, 1, 2, 3),
    lambda x: exchanged(x, foo=2),
    lambda x: exchanged(x, x=2),
    lambda x: renamed(x),
    lambda x: copy.deepcopy(),
    lambda x: logging.getLogger("a", "b"),
    lambda x: torch.Size(x.shape[0], 2),
    lambda x: contextvars.ContextVar.get(),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_wrong_calls_say_what_eager_says(call):
    x = torch.ones(2)
    want, got = _message(call, x), dynamotor.compile(_message, backend="eager")(call, x)
    assert want[1:] == got[1:] and want[1] is not None


def test_a_rule_has_the_parameters_of_its_function():
    def rule(trace, x, times=NONE):
        return [x] * times

    assert run_rule(None, len, rule, ("a",), {"times": 2}) == ["a", "a"]
    with pytest.raises(Unsupported, match=r"len\(\) is called with other arguments"):
        run_rule(None, len, rule, ("a", 2, 3), {})
    with pytest.raises(TypeError, match="multiply"):  # raised by the rule itself
        run_rule(None, len, rule, ("a",), {"times": "b"})


def test_members_of_classes_from_c_are_compared():
    library = torch.backends.cuda.preferred_linalg_library()

    def program(x):
        return x * 2 if library == torch._C._LinalgBackend.Default else x * 3

    with dynamotor.config.patch(verify=True):
        x = torch.ones(1)
        assert dynamotor.compile(program, backend="eager")(x) == program(x)


def _positional_only(a, b, /, c=1):
    return a


REFUSED = [
    lambda x: max(),
    lambda x: len(x, 3),
    lambda x: bool(1, 2),
    lambda x: map(len),
    lambda x: abs(x, 1),
    lambda x: super(1, 2, 3),
    lambda x: [].append(),
    lambda x: {}.pop(),
    lambda x: [].index(3),
    lambda x: ().index(3),
    lambda x: [*3],
    lambda x: {**3},
    lambda x: [] + (),
    lambda x: [] + x,
    lambda x: object() < 3,
    lambda x: x < "a",
    lambda x: divmod(x, "a"),
    lambda x: _positional_only(x, b=2),
    lambda x: _positional_only(*3),
    lambda x: _positional_only(**3),
    lambda x: _positional_only(x, 2, **{"c": 1}, **{"c": 2}),
    lambda x: [a for a, b in [1]],
]


def test_what_functions_and_operators_refuse_they_refuse_in_their_own_words():
    x = torch.ones(2)
    for call in REFUSED:
        want, got = _message(call, x), dynamotor.compile(_message, backend="eager")(call, x)
        assert want[1:] == got[1:] and want[1] is not None


def test_keywords_of_a_partial_are_its_own_dict():
    part = functools.partial(torch.add, alpha=1)

    def program(x):
        part.keywords["alpha"] += 1
        return part(x, x), part.keywords

    compiled, x = dynamotor.compile(program, backend="eager"), torch.ones(1)
    for n in (3, 4):
        result, keywords = compiled(x)
        assert result == n and keywords is part.keywords


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax(2),
        lambda x: torch.nn.functional.softmin(x, -3),
        lambda x: x.sum().cummax(1),
        lambda x: torch.select_scatter(x, x[0], 2, 0),
        lambda x: torch.select_scatter(x, x[0], 1, 0),
        lambda x: torch.slice_scatter(x, x[:, :1], 1, 1),
        lambda x: torch.diagonal_scatter(x, x[0], 0),
    ],
)
@pytest.mark.parametrize("shape", [(3, 4), (300, 400)])
def test_no_dimension_or_part_of_such_a_size(call, shape):
    x = torch.ones(shape)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        call(x)
    with pytest.raises(eager.type) as compiled:
        dynamotor.compile(call)(x)
    assert str(compiled.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_the_row_that_pads_may_change_between_calls():
    def program(weight, row):
        return torch.nn.functional.embedding(torch.tensor([0, 2, 3, 2]), weight, padding_idx=row)

    compiled = dynamotor.compile(program)
    for row in (1, 2, 3, 0, 2):
        weight = torch.randn(6, 5, requires_grad=True)
        (want,) = torch.autograd.grad(program(weight, row).square().sum(), weight)
        (got,) = torch.autograd.grad(compiled(weight, row).square().sum(), weight)
        torch.testing.assert_close(got, want)


def _signatures():
    def none():
        return ()

    def plain(a, b=2, c=3):
        return a, b, c

    def only(a, b=2, /, c=3):
        return a, b, c

    def named(a, *, k, m=5):
        return a, k, m

    def star(a, *rest, k=1, **words):
        return a, rest, k, words

    def words(a=1, /, **a_too):
        return a, a_too

    def generator(a, b=2):
        yield a, b

    return none, plain, only, named, star, words, generator


@pytest.mark.parametrize("function", _signatures(), ids=lambda f: f.__name__)
def test_arguments_are_bound_and_refused_as_cpython_does(function):
    def program(x, function, args, kwargs):
        try:
            found = function(*args, **kwargs)
            return x + 1, found if type(found) is tuple else next(found)
        except TypeError as error:
            return x + 1, str(error)

    compiled, x = dynamotor.compile(program, backend="eager", fullgraph=True), torch.ones(1)
    for n in range(5):
        for names in ((), ("a",), ("b", "c"), ("k",), ("m", "k"), ("a", "k"), ("z", "k")):
            given = tuple(range(n)), dict.fromkeys(names, 7)
            with dynamotor.config.patch(cache_size_limit=100):
                assert compiled(x, function, *given)[1] == program(x, function, *given)[1]


@pytest.mark.parametrize(
    "options",
    [
        {"size": (7, 4)},
        {"size": True},
        {"size": 7.5},
        {"size": 4, "align_corners": True, "mode": "nearest"},
        {"size": 4, "recompute_scale_factor": True},
        {"scale_factor": (2.0, 2.0)},
    ],
)
def test_what_interpolate_refuses_it_refuses_at_every_size(options):
    """With sizes that are symbols the call is that of the op, which looks at less."""
    options = {"mode": "linear", **options}
    function = dynamotor.compile(lambda x: torch.nn.functional.interpolate(x, **options), backend="eager")
    for length in (6, 8, 9):
        x = torch.randn(1, 2, length)
        with pytest.raises((ValueError, TypeError)) as wanted:
            torch.nn.functional.interpolate(x, **options)
        with pytest.raises(type(wanted.value)) as found:
            function(x)
        assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize(
    "fn", [bool, frozenset, iter, map, range, reversed, set, type, zip, list, functools.reduce]
)
def test_names_that_a_builtin_does_not_take_are_refused(fn):
    def program(x):
        try:
            return fn([1, 2], nosuch=1)
        except TypeError as error:
            return x + 1, str(error)

    ours, theirs = dynamotor.compile(program, backend="eager")(torch.ones(1)), program(torch.ones(1))
    assert type(ours) is tuple and ours[1] == theirs[1]


def test_names_that_a_builtin_takes_stay_in_the_graph():
    def program(x):
        pairs = zip([1, 2], [3, 4], strict=True)
        numbers = max([1, 2], key=lambda n: -n), int("11", base=2), str(object=1)
        return (
            x
            + sum(a * b for a, b in pairs)
            + numbers[0]
            + numbers[1]
            + len(dict([(1, 2)], b=2))
            + len(numbers[2])
        )

    compiled = dynamotor.compile(program, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1)), program(torch.ones(1)))


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 2), (2, 1), (2, 2, 1), (1, 1, 2), (0, 1), (1, 0), (3, 3, 3, 2), (1,)]
)
@pytest.mark.parametrize("kind", ["zip(", *["map(max, "] * (sys.version_info >= (3, 14))])
def test_strict_iterators_refuse_other_lengths_in_cpythons_words(kind, lengths):
    lists = ", ".join(f"iter({list(range(n))})" for n in lengths)
    if kind != "zip(" and len(lengths) == 1:
        lists = lists.replace("iter", "enumerate")  # `max` of one number is refused
    scope: dict = {}
    exec(
        f"""def program(x):
    found = {kind}{lists}, strict=True)
    try:
        return x + 1, next(found), torch._dynamo.graph_break(), list(found)
    except (ValueError, StopIteration) as error:
        return x + 1, type(error), str(error)
""",
        scope | {"torch": torch},
        scope,
    )
    program = scope["program"]
    ours, theirs = dynamotor.compile(program, backend="eager")(torch.ones(1)), program(torch.ones(1))
    assert ours[1:] == theirs[1:]


@pytest.mark.parametrize("method", ["copy", "keys", "__getitem__", "__contains__"])
@pytest.mark.parametrize("make", [dict, collections.OrderedDict, lambda: collections.defaultdict(int)])
def test_methods_of_dicts_refuse_further_arguments(make, method):
    def program(x):
        held = make()
        try:
            return getattr(held, method)(1, 2)
        except TypeError:
            return x + len(held)

    assert torch.equal(dynamotor.compile(program, backend="eager")(torch.ones(1)), program(torch.ones(1)))


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_symmetric_difference_is_of_two_sets(kind):
    def program(x):
        try:
            return kind([1]).symmetric_difference()
        except TypeError as error:
            return str(error)

    assert dynamotor.compile(program, backend="eager")(torch.ones(1)) == program(torch.ones(1))
