"""Small Python programs over tensors, by name, which the interpreter has to capture without breaking the graph."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import operator
from typing import NamedTuple

import torch
from torch import nn

PROGRAMS = {}
OFFSET = 3.0
TABLE = {"a": 1.0, "b": [2.0, 3.0]}


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


@dataclasses.dataclass
class Point:
    x: object
    y: object = 2.0
    tags: list = dataclasses.field(default_factory=list)

    def scaled(self, k):
        return dataclasses.replace(self, x=self.x * k) if False else Point(self.x * k, self.y)

    @property
    def total(self):
        return self.x + self.y


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: float
    b: float = 1.0


class Pair(NamedTuple):
    left: object
    right: object = 1.0

    def sum(self):
        return self.left + self.right


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(str, enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Base:
    rate = 2.0

    def __init__(self, k):
        self.k = k

    def apply(self, x):
        return x * self.k

    @classmethod
    def make(cls, k):
        return cls(k)

    @staticmethod
    def shift(x):
        return x + 1

    def __call__(self, x):
        return self.apply(x) + self.rate

    def __getattr__(self, name):
        if name.startswith("dyn_"):
            return len(name)
        raise AttributeError(name)


class Derived(Base):
    def __init__(self, k):
        super().__init__(k)
        self.extra = 1.0

    def apply(self, x):
        return super().apply(x) + self.extra

    @classmethod
    def make(cls, k):
        return super().make(k + 1)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Vector:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    def __add__(self, other):
        return Vector([a + b for a, b in zip(self.items, other.items)])

    def __radd__(self, other):
        return self if other == 0 else NotImplemented

    def __eq__(self, other):
        return isinstance(other, Vector) and len(self) == len(other)

    def __hash__(self):
        return 7

    def __contains__(self, item):
        return item == "here"

    def __bool__(self):
        return bool(self.items)

    def __iter__(self):
        yield from self.items


class Counter3:
    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        if self.n > 3:
            raise StopIteration
        return self.n


class Registry(dict):
    def __missing__(self, key):
        return f"no {key}"

    def register(self, key, value):
        self[key] = value
        return value


class Stack(list):
    def push(self, item):
        self.append(item)
        return self


class Descriptor:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner):
        return self if instance is None else getattr(instance, self.name, 5.0)

    def __set__(self, instance, value):
        setattr(instance, self.name, value * 2)


class Described:
    value = Descriptor()

    @functools.cached_property
    def cached(self):
        return self.value + 1


def decorated(scale):
    def decorator(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            return fn(*args, **kwargs) * scale
        return wrapper
    return decorator


@decorated(2.0)
def helper(x, *, bias=1.0):
    """Adds a bias."""
    return x + bias


def gen(n):
    for i in range(n):
        got = yield i
        if got:
            yield got * 10


@contextlib.contextmanager
def managed(log, fail=False):
    log.append("in")
    try:
        yield 5.0
    except ValueError:
        log.append("caught")
    finally:
        log.append("out")


class Suppress:
    def __enter__(self):
        return self

    def __exit__(self, kind, value, tb):
        return kind is not None and issubclass(kind, KeyError)


HELD = Base(4.0)
HELD_LIST = [1.0, 2.0]


# Functions and arguments ------------------------------------------------------------------------------------------------
@program
def arguments(x):
    def f(a, b=2, /, c=3, *rest, d, e=5, **more):
        return a + b + c + sum(rest) + d + e + sum(more.values())
    return f(x, d=1) + f(x, 1, 2, 3, 4, d=5, e=6, z=7) + f(*[x, 1], **{"d": 2, "y": 3})


@program
def closures(x):
    total = x

    def add(k):
        nonlocal total
        total = total + k
        return total
    add(1)
    fs = [lambda t, i=i: t + i for i in range(3)]
    late = [lambda t: t + j for j in range(3)]
    return add(2), [f(x) for f in fs], [f(x) for f in late]


@program
def decorators_and_partials(x):
    half = functools.partial(torch.mul, other=0.5)
    g = functools.partial(helper, bias=3.0)
    return helper(x), g(x), half(x), helper.__name__, helper.__doc__, helper.__wrapped__(x)


@program
def recursion(x):
    def fact(n):
        return 1 if n < 2 else n * fact(n - 1)
    return x * fact(5)


@program
def wrong_calls_raise(x):
    def f(a):
        return a
    out = []
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"a": 2}), ((), {"q": 1})):
        try:
            f(*args, **kwargs)
        except TypeError:
            out.append("type")
    return x, out


# Objects ----------------------------------------------------------------------------------------------------------------
@program
def classes(x):
    b, d = Base(2.0), Derived.make(3.0)
    return b(x), d(x), d.dyn_hello, Base.shift(x), isinstance(d, Base), type(d) is Derived, issubclass(Derived, Base), d.k, d.rate


@program
def dataclass_instances(x):
    p = Point(x)
    q = p.scaled(3.0)
    p.tags.append("t")
    return p, q.total, Frozen(1.0) == Frozen(1.0), dataclasses.asdict(Frozen(2.0)) == {"a": 2.0, "b": 1.0}, repr(Frozen(1.0))


@program
def dataclass_replace(x):
    return dataclasses.replace(Point(x, 1.0), y=5.0)


@program
def namedtuples(x):
    p = Pair(x)
    left, right = p
    return p, p.sum(), p._replace(right=4.0), left + right, p[0] is p.left, Pair._fields, len(p), p._asdict()["right"]


@program
def enums(x):
    return x * Color.RED.value, Color.BLUE is Color(2), Color["RED"].name, Mode.FAST == "fast", [c.name for c in Color], Mode("slow").value


@program
def slots(x):
    s = Slotted(x)
    s.b = s.a + 1
    del s.a
    return hasattr(s, "a"), s.b


@program
def operators_of_objects(x):
    v = Vector([x, x + 1]) + Vector([x, x])
    w = sum([v, v])
    return v[1], len(v), bool(v), "here" in v, [t * 2 for t in v], v == Vector([1, 2]), v != Vector([1]), w.items[0], {v: 1}[Vector([0, 0])]


@program
def iterators_of_objects(x):
    return [x + i for i in Counter3()], sum(Counter3())


@program
def dict_and_list_subclasses(x):
    r, s = Registry(a=1), Stack()
    r.register("k", x)
    s.push(x).push(2)
    return r["zzz"], r["k"], r, s, len(s), r.get("no", 3), isinstance(r, dict), dict(r)["a"], s[-1], list(s)


@program
def descriptors(x):
    d = Described()
    before = d.value
    d.value = 4.0
    return x + before, d.value, d.cached, d.cached


@program
def getattr_and_friends(x):
    b = Base(1.0)
    b.z = x
    had = hasattr(b, "z"), hasattr(b, "q"), getattr(b, "q", 7)
    del b.z
    return had, hasattr(b, "z"), b.__dict__, vars(b)["k"], b.__class__.__name__, callable(b), HELD(x)


@program
def simple_namespace_like(x):
    class_ = type(HELD)
    return class_(2.0)(x)


# Containers -------------------------------------------------------------------------------------------------------------
@program
def lists(x):
    a = [3, 1, 2]
    a.append(5)
    a.extend([7, 8])
    a.insert(0, 9)
    a.remove(1)
    b = a.pop(), a.pop(0), a.index(5), a.count(2), sorted(a), a[::-1], a[1:3], 5 in a
    a.sort(reverse=True)
    a[0] = x
    a[1:2] = [10, 11]
    del a[-1]
    c = a * 2
    a += [1]
    a.reverse()
    return a, b, c, [1, 2] < [1, 3], [x] + [x], a.copy(), max(1, 2, 3), min([4, 2]), [*a, *b][-1]


@program
def dicts(x):
    d = {"a": 1, "b": x}
    d["c"] = 3
    d.update({"d": 4}, e=5)
    d.setdefault("f", []).append(6)
    keys, values = list(d), list(d.values())[2:]
    popped = d.pop("a"), d.pop("zz", None), d.popitem()
    del d["c"]
    merged = d | {"q": 1}
    merged |= {"r": 2}
    return d, keys, values, popped, merged, {k: v for k, v in d.items() if k != "b"}, "b" in d, d.get("nope", 3), {**d, "z": 0}, len(d), (
        d.keys() & {"b", "x"}) == {"b"}, dict(zip("ab", (1, 2))), dict.fromkeys("ab", 0), next(iter(d)), list(reversed(d))


@program
def special_dicts(x):
    od = collections.OrderedDict(a=1)
    od["b"] = x
    od.move_to_end("a")
    dd = collections.defaultdict(list)
    dd["k"].append(x)
    return od, list(od), dd["k"], len(dd), dd["new"], isinstance(od, dict)


@program
def sets(x):
    s = {1, 2, 3}
    s.add(4)
    s.discard(1)
    s |= {9}
    return x, {1, 5}, {3} | {4}, sorted(s & {2, 3}), sorted(s - {2}), sorted(s | {7}), sorted(s ^ {3, 8}), 4 in s, len(s), {2} <= s, sorted(s), frozenset([1, 2]) == {1, 2}, sorted(s.union([5])), list(s)


@program
def tuples(x):
    t = (1, x, 3)
    a, *b = t
    *c, d = t
    (e, (f, g)) = (1, (2, 3))
    return t + (4,), a, b, c, d, e + f + g, t[::2], t * 2, (1, 2) == (1, 2), hash((1, 2)) == hash((1, 2)), (1, 3).index(3), (1, 2) < (1, 3)


@program
def strings(x):
    name = "width"
    n = 3
    return (x, f"{name!r:>10} {n:03d} {x.shape}", ["a", "b"], "-".join(["x", "y"]), name.upper(), "%s=%d" % (name, n),
            f"{1} {2}", name[1:3], "id" in name, name.startswith("wi"), str([1, "a", {2: 3}]), repr((1,)), b"ab" + b"c", "a" * 3)


@program
def numbers(x):
    return (x * math.sqrt(16) + math.pi, 7 // 2, -7 % 3, 2 ** 10, divmod(7, 3), round(2.567, 1), int(3.9), float("1.5"), abs(-2), bool(0),
            1 < 2 < 3, not 1, 5 & 3 | 8, ~5, 1 << 4, int("ff", 16), min(3, 1), pow(2, 3, 5), (1 + 2j).imag, float("inf") > 1, 3 .bit_length())


# Control flow -------------------------------------------------------------------------------------------------------------
@program
def loops(x):
    out = []
    for i, (a, b) in enumerate(zip(range(5), "abcde"), start=1):
        if i == 2:
            continue
        if i == 4:
            break
        out.append((i, a, b))
    else:
        out.append("else")
    n = 0
    while True:
        n += 1
        if n > 3:
            break
    for _ in []:
        pass
    else:
        out.append("empty")
    return x + n, out


@program
def comprehensions(x):
    return ([i * j for i in range(3) for j in range(2) if i != j], {i: x + i for i in range(2)}, {i % 2 for i in range(4)},
            sum(i for i in range(4)), [[k for k in range(n)] for n in range(3)], any(i > 2 for i in range(5)), all(i for i in (1, 0)))


@program
def walrus_and_conditionals(x):
    if (n := x.dim()) > 1 and n < 9:
        y = x * n
    else:
        y = x
    z = 1 if n else 2
    return y, z, n or 5, None or 4, n and 3, (lambda: n)()


@program
def exceptions(x):
    log = []

    def risky(k):
        if k == 0:
            raise ValueError("zero")
        if k == 1:
            raise KeyError("one")
        return k
    for k in range(3):
        try:
            log.append(risky(k))
        except ValueError as e:
            log.append(("value", str(e), e.args))
        except (KeyError, IndexError) as e:
            log.append(type(e).__name__)
        else:
            log.append("else")
        finally:
            log.append("finally")
    try:
        try:
            {}["missing"]
        except KeyError as e:
            raise RuntimeError("wrapped") from e
    except RuntimeError as e:
        log.append((str(e), type(e.__cause__).__name__))
    try:
        assert x.dim() == 77, f"dim is {x.dim()}"
    except AssertionError as e:
        log.append(str(e))
    try:
        [][3]
    except LookupError:
        log.append("lookup")
    try:
        int("x")
    except ValueError:
        log.append("int")
    try:
        x.nope
    except AttributeError:
        log.append("attr")
    return x + 1, log


class CustomError(Exception):
    def __init__(self, code, *rest):
        super().__init__(f"code {code}", *rest)
        self.code = code


@program
def custom_exceptions(x):
    try:
        raise CustomError(3, "more")
    except CustomError as e:
        return x, e.code, str(e), e.args, isinstance(e, Exception)


def returns_in_finally(k):
    for i in range(3):
        try:
            if i == k:
                return "try", i
        finally:
            if k == 1:
                return "finally", i
    return "end", k


@program
def finally_returns(x):
    return x, [returns_in_finally(k) for k in (0, 1, 2, 7)]


@program
def context_managers(x):
    log = []
    with managed(log) as v, Suppress():
        y = x + v
        raise KeyError("gone")
    with managed(log):
        raise ValueError("inside")
    with contextlib.nullcontext(3) as three, contextlib.suppress(IndexError):
        [][1]
    with contextlib.ExitStack() as stack:
        stack.enter_context(managed(log))
        log.append("body")
    return y, log, three


@program
def generators(x):
    g = gen(3)
    first = next(g), g.send(4), next(g), list(g), next(g, "done")

    def delegating():
        got = yield from gen(2)
        yield got
        yield from [x, x + 1]

    def closing(log):
        try:
            yield 1
        finally:
            log.append("closed")
    log = []
    c = closing(log)
    next(c)
    c.close()
    return first, list(delegating()), log, [*gen(2)], dict((k, k) for k in gen(2)), tuple(gen(3))


@program
def matching(x):
    out = []
    for v in (1, "s", [1, 2, 3], {"k": 5, "z": 1}, Point(1, 2), (7, 8), None):
        match v:
            case 1 | 2:
                out.append("small")
            case str():
                out.append("str")
            case [a, b, *rest] if len(rest):
                out.append((a, b, rest))
            case {"k": k, **others}:
                out.append((k, others))
            case Point(x=px, y=py):
                out.append((px, py))
            case (p, q):
                out.append(p + q)
            case _:
                out.append("other")
    return x, out


# Library --------------------------------------------------------------------------------------------------------------------
@program
def itertools_and_functools(x):
    return (x, list(itertools.chain([1], (2, 3))), list(itertools.islice(itertools.count(5), 3)), list(itertools.product("ab", [1, 2])),
            list(itertools.accumulate([1, 2, 3])), list(itertools.zip_longest([1, 2], [3], fillvalue=0)), list(itertools.repeat(1, 2)),
            functools.reduce(operator.add, [1, 2, 3], 10), list(itertools.combinations("abc", 2)), list(itertools.pairwise([1, 2, 3])),
            list(map(lambda a, b: a + b, [1, 2], [3, 4])), list(filter(None, [0, 1, 2])), [(k, list(g)) for k, g in itertools.groupby("aab")],
            list(itertools.chain.from_iterable([[1], [2]])), list(itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1])),
            list(itertools.starmap(pow, [(2, 3)])), list(itertools.permutations([1, 2, 3], 2)))


@program
def sorting(x):
    items = [("b", 2), ("a", 2), ("c", 1)]
    return (x, sorted(items, key=lambda t: t[1]), sorted(items, key=operator.itemgetter(0), reverse=True), max(items, key=lambda t: t[1]),
            min([3, 1, 2], default=0), max([], default=9), list(reversed(items)), sorted("hello"))


@program
def copies(x):
    import copy
    a = [x, [1, 2], {"k": 3}]
    b, c = copy.copy(a), copy.deepcopy(a[1:])
    c[0].append(3)
    p = copy.copy(Point(x, [1]))
    return b[0] is a[0], b[1] is a[1], c, a, p.y


@program
def global_reads(x):
    return x * OFFSET + TABLE["a"] + TABLE["b"][1] + len(TABLE) + HELD.k + sum(HELD_LIST)


@program
def aliases_in_the_result(x):
    y = x + 1
    shared = [y]
    return shared, shared, {"s": shared, "y": y}, y


@program
def cyclic_result(x):
    a = [x]
    a.append(a)
    d = {"a": a}
    d["self"] = d
    return len(a), d["self"] is d, a[1] is a


@program
def modules_made_of_modules(x):
    return MODEL(x), [type(m).__name__ for m in MODEL], len(MODEL), MODEL[0].weight.shape, [n for n, _ in MODEL.named_parameters()]


MODEL = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3))).double()


@program
def imports_inside(x):
    import math as m
    from collections import OrderedDict as Od
    return x * m.floor(2.5), Od(a=1)["a"]


@program
def star_expressions(x):
    a, b = [1, 2], {"k": 3}

    def f(*args, **kwargs):
        return args, kwargs
    return f(*a, *a, **b, z=1), [*a, *b], {*a}, (*a, x)


@program
def lambda_defaults_and_kwonly(x):
    f = lambda a, *, k=2, **kw: (a * k, kw)  # noqa: E731
    return f(x), f(x, k=3, q=4)


@program
def chained_comparisons_and_is(x):
    y = x
    return y is x, y is not x, None is None, x is None, 1 == 1.0, "a" != "b", [] == [], () != None, [x] == [x]


@program
def unpack_errors(x):
    log = []
    for v in ([1], [1, 2, 3]):
        try:
            a, b = v
        except ValueError:
            log.append(len(v))
    return x, log


@program
def type_queries(x):
    return (isinstance(x, torch.Tensor), isinstance(3, (int, str)), isinstance(3, int | str), type(x) is torch.Tensor, type([]) is list,
            isinstance(True, int), issubclass(bool, int), isinstance(HELD, Base), type(HELD).__name__, callable(len), x + 1)


@program
def del_locals(x):
    y = x + 1
    del y
    try:
        return y
    except UnboundLocalError:
        return x


@program
def nested_functions_escape(x):
    k = 2.0

    def inner(t, scale=3.0):
        return t * k + scale
    return inner(x)


@program
def augmented_targets(x):
    b = Base([1, 2])
    b.k += [3]
    b.k[0] += 5
    d = {"n": 1}
    d["n"] += 2
    return x, b.k, d


@program
def string_building_loop(x):
    s = ""
    for i in range(4):
        s += str(i) + ("," if i < 3 else "")
    return x, s


@program
def try_in_loop_with_continue(x):
    out = []
    for i in range(4):
        try:
            if i == 1:
                continue
            if i == 3:
                break
            out.append(10 // (i - 2))
        except ZeroDivisionError:
            out.append("div")
        finally:
            out.append(i)
    return x, out


@program
def inspect_signature(x):
    import inspect
    return x, len(inspect.signature(helper).parameters), list(inspect.signature(Base.apply).parameters)


@program
def warnings_and_logging(x):
    import logging
    logging.getLogger("dynamotor.tests").debug("not shown %s", 3)
    return x + 1
