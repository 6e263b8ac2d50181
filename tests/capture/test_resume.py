"""Every instruction of many functions: run natively up to it, cut the frame there, go on; the result is the
function's.
"""

import contextlib
import difflib
import fractions
import functools
import inspect
import posixpath
import random
import sys
import textwrap
import types
import urllib.parse

import pytest

from dynamotor.capture.bytecode import decode
from dynamotor.capture.resume import (
    NULL,
    UNBOUND,
    Boundary,
    break_function,
    resume_function,
    successors,
    waiting_generator,
    why_not_resumable,
)

LOG = []


def say(*words):
    LOG.append(words)
    return len(words)


class Raises:
    def __bool__(self):
        raise ValueError("no truth")

    def __enter__(self):
        say("enter")
        return self

    def __exit__(self, kind, value, trace):
        say("exit", kind, str(value), type(sys.exception()))
        return kind is ValueError


def straight(a, b=2):
    c = a + b
    d = [c, a, *range(b)]
    return {"c": c, "d": d}, f"{a!r:>4}{b}", d[1:], a if a > b else b


def loops(n):
    total = 0
    for i in range(n):
        if i % 2:
            continue
        for j in [1, 2, 3]:
            if j == 3:
                break
            total += i * j
        else:
            total += 100
    while n > 0:
        n -= 1
        if n == 2:
            break
    return total, n


def comprehensions(xs):
    k = 3
    return [x + k for x in xs if x], {x: k for x in xs}, {x for x in xs}, sum(x for x in xs)  # noqa: C416, C420


def unbound(flag):
    if flag:
        maybe = 1
    for i in range(2):
        if i == 1 and not flag:
            maybe = 7
    del i
    try:
        i  # noqa: B018, F821
    except UnboundLocalError:
        return maybe, "unbound"


def handlers(n):
    out = []
    for i in range(n):
        try:
            say("try", i)
            if i == 1:
                raise ValueError(i)
            if i == 2:
                raise KeyError(i)
            out.append(i)
        except ValueError as error:
            out.append(("value", str(error), type(sys.exception())))
            try:
                raise TypeError from error
            except TypeError:
                out.append(sys.exception().__cause__ is error)
            out.append(sys.exception() is error)
        except KeyError:
            out.append(("key", type(sys.exception())))
        else:
            out.append("else")
        finally:
            out.append(("finally", sys.exception()))
    return out


def reraises(x):
    try:
        try:
            say("in")
            return 1 // x
        finally:
            say("cleanup", type(sys.exception()))
    except ZeroDivisionError:
        say("handled")
        raise


def bare_raise():
    try:
        raise ValueError("first")
    except ValueError:
        try:
            say("second")
            raise
        except ValueError as again:
            return str(again), type(sys.exception())


def withs():
    with Raises() as first, contextlib.suppress(KeyError):
        say("body")
        raise ValueError("into the with")
    with Raises():
        say(first is not None)
    return "after"


def closures(a):
    b = a + 1

    def inner(c):
        nonlocal b
        b += c
        return a, b

    first = inner(1)
    a = 10
    return first, inner(2), b, sorted(locals())


def make_free():
    captured = [1, 2]
    other = 5

    def no_locals():
        return captured[0] + other, [x for x in captured if x < other]

    def some_locals(x):
        nonlocal other
        y = x + other
        other = y
        return captured, y, other

    return no_locals, some_locals


class Base:
    def greet(self):
        return "base"


class Derived(Base):
    def greet(self):
        name = super().greet()
        return name + str(self.size), __class__.__name__

    @property
    def size(self):
        return 3


def calls(d):
    return (
        say(1, *[2, 3], **{}),
        d.greet(),
        dict(a=1, b=say(2)),  # noqa: C408
        max(1, 2, key=lambda v: -v),
        "x".join(["a", "b"]),
    )


def unpacking(t):
    a, (b, *c), d = t
    t2 = [*c, a]
    t2[0], t2[-1] = t2[-1], t2[0]
    x = y = a
    return a, b, c, d, t2, x, y, (a < b < 10), not a, -a, a and b, a or b


def many_arguments(*args, k=1, **kwargs):
    del k
    return args, kwargs, [locals().get(n) for n in ("args", "kwargs")]


def matching(value):
    match value:
        case {"k": [x, *rest]}:
            return x, rest
        case Base():
            return "base"
        case _:
            return None


def nones(a, b=None):
    if a is None and b is not None:
        return 1
    while b is None:
        b = 3
    return a, b


CASES = [
    (straight, (1,)),
    (straight, (5,)),
    (loops, (3,)),
    (comprehensions, ([0, 1, 2],)),
    (unbound, (True,)),
    (unbound, (False,)),
    (handlers, (3,)),
    (reraises, (0,)),
    (reraises, (2,)),
    (bare_raise, ()),
    (withs, ()),
    (closures, (1,)),
    (Derived.greet, (Derived(),)),
    (calls, (Derived(),)),
    (unpacking, ((1, (2, 3, 4), 5),)),
    (many_arguments, (1, 2)),
    (matching, ({"k": [1, 2, 3]},)),
    (matching, (Base(),)),
    (matching, (3,)),
    (nones, (None,)),
    (nones, (None, 4)),
]


def outcome(call):
    """Result or exception, and the messages."""
    LOG.clear()
    try:
        result = call()
    except Exception as error:
        result = (type(error), str(error))
    return result, list(LOG), sys.exception()


def start(function, args):
    """The frame after its prologue: (boundary, flat values)."""
    code = function.__code__
    info = decode(code)
    bound = inspect.signature(function).bind(*args)
    bound.apply_defaults()
    values = dict(bound.arguments)
    cells = set(code.co_cellvars)
    free = dict(zip(code.co_freevars, function.__closure__ or ()))
    slots = []
    for name in info.localsplus:
        value = values.get(name, UNBOUND)
        if name in cells:
            value = types.CellType() if value is UNBOUND else types.CellType(value)
        slots.append(free.get(name, value))
    first = next(i for i in info.instrs if i.op not in ("MAKE_CELL", "COPY_FREE_VARS"))
    at = Boundary.of(code, first.offset, slots, [])
    return at, at.flat(slots, [])


class Stopped:
    def __init__(self, at, flat):
        self.at, self.flat = at, flat


def contained(call):
    """A generator has exception state of its own: the exception that an escaping one leaves set in a handler's frame
    ends here.
    """
    yield call()


@functools.cache
def stepping(function, at):
    """What runs the one instruction and stops; written once for a place."""
    resumes = [lambda *flat, b=b: Stopped(b, flat) for b in successors(at)]
    return break_function(at, resumes, function.__globals__, handled=False)


def step(function, at, flat):
    """One instruction: the next (boundary, flat), or ("done", result). Exceptions go to handlers as the
    interpreter does it.
    """
    try:
        broken = stepping(function, at)
        result = next(contained(lambda: broken(*flat)))
    except Exception as error:
        handler = decode(at.code).handler(at.instr.offset)
        if handler is None:
            raise
        slots, stack = at.unflat(flat)
        stack = stack[: handler.depth] + ([at.offset] if handler.lasti else []) + [error.with_traceback(None)]
        after = Boundary.of(at.code, handler.target, slots, stack)
        return after, after.flat(slots, stack)
    return (result.at, result.flat) if isinstance(result, Stopped) else ("done", result)


def run_steps(function, args, n):
    """Run n instructions one by one; (state or "done", flat or result)."""
    at, flat = start(function, args)
    for _ in range(n):
        at, flat = step(function, at, flat)
        if at == "done":
            break
    return at, flat


def check_every_offset(function, args):
    expected = outcome(lambda: function(*args))
    raising = isinstance(expected[0], tuple) and expected[0] and isinstance(expected[0][0], type)
    n = 0
    while True:
        reached = {}

        def resumed(n=n, reached=reached):
            at, flat = run_steps(function, args, n)
            reached["end"] = at == "done"
            return flat if at == "done" else resume_function(at, function.__globals__)(*flat)

        assert outcome(resumed) == expected, f"resumed after {n} instructions"

        def broken(n=n):
            at, flat = run_steps(function, args, n)
            if at == "done":
                return flat
            resumes = [resume_function(b, function.__globals__) for b in successors(at)]
            return break_function(at, resumes, function.__globals__)(*flat)

        assert outcome(broken) == expected, f"broken after {n} instructions"
        n += 1
        if reached.get("end") or (raising and "end" not in reached):
            return n


@pytest.mark.parametrize("function, args", CASES, ids=lambda v: getattr(v, "__qualname__", "") or "args")
def test_every_instruction(function, args):
    assert check_every_offset(function, args) > 3


def test_free_variables_without_locals():
    no_locals, _ = make_free()
    assert check_every_offset(no_locals, ()) > 3


def test_free_variables_are_shared_with_the_outer_function():
    function = make_free()[1]
    at, flat = start(function, (1,))
    assert resume_function(at, globals())(*flat) == ([1, 2], 6, 6)
    assert function(1) == ([1, 2], 7, 7), "the cell that the resumed frame wrote is the function's own"


def test_a_break_replaced_by_an_inner_call():
    """The frame of `calls_say` broken at its call of say, with the inlined frame's continuation in place of
    the call.
    """

    def calls_say(x):
        try:
            return 10 + say(x)
        except ValueError:
            return "caught"

    code = calls_say.__code__
    call = next(i for i in decode(code).instrs if i.op == "CALL")
    at = Boundary(code, call.offset, 1)  # the operands of the call are gone
    (after,) = successors(at, inner=True)
    broken = break_function(at, [resume_function(after, globals())], globals(), inner=True)
    assert broken(1, 10, lambda: 5) == 15

    def fails():
        raise ValueError

    assert broken(1, 10, fails) == "caught"


def raises():
    raise ValueError("of the called frame")


def test_an_exception_of_a_called_frame_meets_the_handler():
    def calls():
        try:
            raises()
        except ValueError as error:
            return str(error)

    assert check_every_offset(calls, ()) > 3


def test_many_cells_and_no_locals():
    """Where no local can be put in front of the cells, the frame is not cut."""
    names = [f"c{i}" for i in range(20)]
    source = f"def outer({', '.join(names)}):\n def f():\n  return lambda: ({', '.join(names)},)\n return f\n"
    namespace = {}
    exec(source, namespace)
    inner = namespace["outer"](*range(20))
    if why_not_resumable(inner.__code__) is None:
        at, flat = start(inner, ())
        assert resume_function(at, globals())(*flat)() == tuple(range(20))


def test_tracebacks_show_the_users_line():
    def fails(x):
        y = x
        return y // 0

    at, flat = start(fails, (1,))
    while at.instr.op != "BINARY_OP":
        at, flat = step(fails, at, flat)
    for function in (resume_function(at, globals()), break_function(at, [lambda *flat: None], globals())):
        with pytest.raises(ZeroDivisionError) as caught:
            function(*flat)
        assert caught.traceback[-1].lineno + 1 == fails.__code__.co_firstlineno + 2


def test_generators_are_refused():
    def generator():
        yield 1

    assert why_not_resumable(generator.__code__)
    with pytest.raises(ValueError, match="generator"):
        resume_function(Boundary(generator.__code__, decode(generator.__code__).instrs[0].offset, 0), {})


def test_sentinels_round_trip():
    code = nones.__code__
    at = Boundary.of(code, decode(code).instrs[0].offset, [UNBOUND, 3], [NULL, "x"])
    assert at.flat([UNBOUND, 3], [NULL, "x"]) == (3, "x")
    assert at.unflat((3, "x")) == ([UNBOUND, 3], [NULL, "x"])


LIBRARY = [
    (posixpath.relpath, lambda: ("/a/b/c", "/a/d")),
    (fractions.Fraction.limit_denominator, lambda: (fractions.Fraction(355, 113000), 100)),
    (difflib.SequenceMatcher.find_longest_match, lambda: (difflib.SequenceMatcher(None, "abxcd", "abcd"),)),
    (
        textwrap.TextWrapper._wrap_chunks,
        lambda: (textwrap.TextWrapper(width=10), ["aa", " ", "bbb", " ", "c" * 14, " ", "d"]),
    ),
    (urllib.parse.urljoin, lambda: ("http://a/b/c/d", "../e")),
    (inspect.cleandoc, lambda: ("\n   a\n     b\n   c\n",)),
]


@pytest.mark.parametrize("function, arguments", LIBRARY, ids=lambda v: getattr(v, "__name__", ""))
def test_library_functions_cut_at_random(function, arguments):
    function = getattr(function, "__wrapped__", function)
    expected = function(*arguments())
    for _ in range(12):
        at, flat = run_steps(function, arguments(), random.randrange(150))
        got = flat if at == "done" else resume_function(at, function.__globals__)(*flat)
        assert got == expected


def waits(a, *rest, k=3):
    inner = [a]

    def grow():
        inner.append(k)
        return inner

    try:
        for i in range(2):
            with contextlib.suppress(KeyError):
                got = yield len(grow()), i
                say(got, k, rest)
        return inner
    except ValueError as error:
        say("error", str(error))
        yield "after"
    finally:
        say("finally", type(sys.exception()))


@pytest.mark.parametrize(
    "steps", ["nnn", "sss", "c", "vn", "knc", "t", "nvc", ""], ids=lambda steps: steps or "none"
)
def test_a_generator_that_waits_is_made_again(steps):
    code, names = waits.__code__, decode(waits.__code__).localsplus
    at = next(i for i in decode(code).instrs if i.op == "YIELD_VALUE").offset
    cells = {"inner": types.CellType([5, 3]), "k": types.CellType(3)}
    inner = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    grow = types.FunctionType(inner, globals(), "grow", None, tuple(cells[n] for n in inner.co_freevars))
    known = {"a": 5, "rest": (1,), "grow": grow, "i": 0, "got": UNBOUND, "error": UNBOUND, **cells}
    rounds, block = iter(range(2)), contextlib.suppress(KeyError)
    next(rounds)
    slots, stack = [known[name] for name in names], [rounds, block.__exit__]
    boundary = Boundary.of(code, at, slots, stack)
    ours, theirs = waiting_generator(boundary, globals())(*boundary.flat(slots, stack)), waits(5, 1)
    next(theirs)
    for generator in (ours, theirs):
        assert inspect.getgeneratorstate(generator) == inspect.GEN_SUSPENDED
    assert ours.gi_frame.f_lineno == theirs.gi_frame.f_lineno
    assert _stepped(ours, steps) == _stepped(theirs, steps)


def _stepped(generator, steps):
    """Results of steps, each by its letter: next, send, close, or throw a value, key or type error."""
    errors, results = {"v": ValueError, "k": KeyError, "t": TypeError}, []
    LOG.clear()
    for step in steps:
        try:
            if step in errors:
                results.append(generator.throw(errors[step]("no")))
            else:
                results.append(
                    {"n": generator.__next__, "c": generator.close, "s": lambda: generator.send(7)}[step]()
                )
        except Exception as error:
            results.append((type(error), str(error), getattr(error, "value", None)))
    return results, list(LOG)
