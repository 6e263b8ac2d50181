"""functools, itertools, copy, collections, contextvars and other modules of the standard library."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import bisect, collections, contextvars, copy, datetime, functools, heapq, io, itertools, logging, math, numbers, operator, os, pathlib, random, statistics, string, struct, sys, threading, time, types, typing, warnings, weakref, inspect
import numpy as np, torch
from functools import lru_cache, partial, partialmethod, reduce, singledispatch, total_ordering, wraps, cache
calls = []
@lru_cache(maxsize=None)
def cached(n): calls.append(n); return n * 2
@cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
@singledispatch
def sd(v): return "default"
@sd.register
def _(v: int): return "int"
@sd.register(list)
def _(v): return "list"
@total_ordering
class TO:
    def __init__(self, v): self.v = v
    def __eq__(self, o): return self.v == o.v
    def __lt__(self, o): return self.v < o.v
class PM:
    def f(self, a, b=2): return self, a, b
    g = partialmethod(f, 5, b=7)
    @functools.lru_cache
    def h(self, n): return n + 1
class Cp:
    def __init__(self): self.a = [1, [2]]
    def __copy__(self): c = Cp(); c.a = "copied"; return c
class Deep:
    def __init__(self): self.a = [1, [2]]; self.me = self
cv = contextvars.ContextVar("cv", default=3)
log = logging.getLogger("behaviour"); log.addHandler(logging.NullHandler()); log.propagate = False
lock, rlock = threading.Lock(), threading.RLock()
local = threading.local(); local.v = 4
pm = PM(); ref = weakref.ref(pm)
"""

TABLE = r"""
reduce(operator.add, [1, 2, 3]), reduce(lambda a, b: a * b, [1, 2, 3], 10), reduce(lambda a, b: a + b, [x, x, x])
reduce(operator.add, [])
cached(3) #2
cached(3) + cached(4) #3
fib(10), TO(1) > TO(0), TO(1) >= TO(1), max(TO(1), TO(2)).v
sd("z"), sd([]), sd(3)
partial(max, 3)(5), partial(sorted, reverse=True)([1, 3, 2]), partial(int, base=2)("101"), pm.g()[1:], partial(torch.add, x)(1)
pm.h(3) #2
list(itertools.chain([1], "ab", (2,))), list(itertools.chain.from_iterable([[1], [2, 3]])), list(itertools.islice(range(10), 2, 8, 3)), list(itertools.islice("abc", 2))
list(itertools.product([1, 2], "ab")), list(itertools.product([0, 1], repeat=2)), list(itertools.permutations([1, 2, 3], 2)), list(itertools.combinations("abc", 2))
list(itertools.accumulate([1, 2, 3])), list(itertools.accumulate([1, 2, 3], operator.mul, initial=1)), list(itertools.zip_longest([1], [2, 3], fillvalue=0))
list(itertools.combinations_with_replacement("ab", 2)) #2
list(itertools.takewhile(lambda v: v < 3, [1, 2, 3, 1])), list(itertools.dropwhile(lambda v: v < 3, [1, 2, 3, 1])), list(itertools.filterfalse(None, [0, 1])), list(itertools.compress("abc", [1, 0, 1]))
[(k, list(g)) for k, g in itertools.groupby("aabbc")], [(k, len(list(g))) for k, g in itertools.groupby([1, 3, 2], key=lambda v: v % 2)], list(itertools.pairwise([1, 2, 3])), list(itertools.starmap(pow, [(2, 3), (3, 2)]))
list(itertools.repeat(1, 3)), list(itertools.islice(itertools.count(5, 2), 3)), list(itertools.islice(itertools.cycle("ab"), 5)), [next(c) for c in [itertools.count()]], list(zip(itertools.count(), "ab"))
[list(t) for t in itertools.tee([1, 2])], list(itertools.chain(*[[x], [x + 1]])), sum(itertools.chain([1], [2])), dict(itertools.zip_longest("ab", [1]))
copy.copy([1, [2]]), copy.deepcopy([1, [2]]), copy.copy({"a": [1]}), copy.deepcopy({"a": (1, [2])}), copy.copy(Cp()).a, copy.deepcopy(Deep()).a, copy.copy((1, 2))
copy.deepcopy(x) #2
heapq.nlargest(1, [3, 1]), bisect.bisect([1, 2, 3], 2), bisect.bisect_left([1, 2, 3], 2)
list(heapq.merge([1, 3], [2])), heapq.nsmallest(2, [3, 1, 2]), heapq.heappushpop([], 3), heapq.nlargest(2, [3, 1, 2], key=lambda v: -v)
heapq.heappop([]), heapq.heappush((), 1) #2
statistics.mean([1, 2, 3]), statistics.median([3, 1, 2]), struct.pack("<i", 3), struct.unpack("<h", b"\x01\x00"), struct.calcsize("iq")
os.path.join("a", "b"), os.path.basename("a/b.c"), os.path.splitext("a.b"), os.sep, os.path.dirname("a/b"), os.environ.get("NOPE_X", "d"), os.getenv("NOPE_X")
str(pathlib.Path("a") / "b"), pathlib.PurePath("a/b.txt").suffix, pathlib.Path("a/b").name, pathlib.Path("a") == pathlib.Path("a")
sys.maxsize, sys.version_info >= (3, 8), sys.byteorder, sys.float_info.max, sys.platform
sys.getrecursionlimit() #2
isinstance(3, numbers.Number), isinstance(3.5, numbers.Integral), isinstance([], collections.abc.Sequence), isinstance({}, collections.abc.Mapping), isinstance(3, typing.Hashable), isinstance(x, collections.abc.Iterable)
typing.cast(int, "a"), typing.get_origin(list[int]), typing.get_args(dict[str, int]), typing.Optional[int] is not None, int | None
list[int] == list[int] #2
inspect.signature(cached.__wrapped__).parameters["n"].name, inspect.isfunction(cached), inspect.isclass(PM), inspect.ismethod(pm.f), list(inspect.signature(PM.f).parameters)
cv.get(), cv.get(9), local.v, getattr(local, "nope", 5), hasattr(local, "v")
ref() is pm, weakref.ref(pm) is ref
datetime.timedelta(seconds=90).total_seconds(), datetime.date(2020, 1, 2).isoformat(), datetime.datetime(2020, 1, 1).year, datetime.timedelta(1) + datetime.timedelta(2) #2
np.float64(2.5) * 2, x * np.float32(2), np.prod([2, 3]), np.sqrt(4.0), np.pi, x * np.pi, np.int64(3) + 1, int(np.ceil(2.2)), np.prod(x.shape), np.log2(8)
x + np.array([1., 2., 3., 4.]), torch.from_numpy(np.arange(3)), torch.tensor(np.ones(2)), torch.as_tensor(np.zeros(2)), np.arange(3).tolist(), np.array([1, 2]).sum() #9
types.SimpleNamespace(a=1).a, isinstance(cached.__wrapped__, types.FunctionType), type(pm.f) is types.MethodType
types.MappingProxyType({"a": 1})["a"] #2
string.ascii_letters[:2], math.tau, math.e, math.inf, operator.itemgetter("a")({"a": 1}), collections.namedtuple("Q", "a b").__name__ #2
functools.cmp_to_key(lambda a, b: b - a)(3).obj #2
sorted([1, 3, 2], key=functools.cmp_to_key(lambda a, b: b - a)) #2
io.StringIO("a\nb").read() #2

    h = [3, 1, 2]
    heapq.heapify(h); heapq.heappush(h, 0); a = heapq.heappop(h)
    return h, a, heapq.heapreplace(h, x.shape[0] + 9), h, heapq.heappushpop(h, -1)

    a = [1, 3]; bisect.insort(a, 2)
    return a #2

    t = cv.set(7); a = cv.get(); cv.reset(t)
    return a, cv.get()

    ctx = contextvars.copy_context()
    return ctx.run(lambda: 3) #2

    cached.cache_clear()
    return cached(9) #2

    with lock: y = x * 2
    return y #2

    with rlock: S.append(1)
    return S #3

    local.v += 1
    return local.v #2

    o = Deep(); c = copy.copy(o); d = copy.deepcopy(o); d.a[1].append(3)
    return o.a, c.a is o.a, d.a, d.me is d

    log.info("hidden %s", 3); log.warning("shown")
    return x + 1

    warnings.warn("careful")
    return x + 1

    print("to nowhere", end="")
    return x + 1 #2

    a = list(itertools.product(range(2), repeat=2)); total = 0
    for i, j in a: total = total + x[i, j]
    return total

    it = itertools.count(1); a = next(it); b = next(it)
    return a, b

    c = itertools.cycle([1, 2])
    return [next(c) for _ in range(5)]

    random.seed(3)
    return random.random(), random.choice([1, 2, 3]) #3

    rng = random.Random(5)
    return rng.random(), rng.randint(1, 6) #3

    t = time.perf_counter()
    return x + 1, time.perf_counter() >= t #3

    buf = io.StringIO(); buf.write("a"); print("b", file=buf)
    return buf.getvalue() #5

    return threading.current_thread().name, threading.get_ident() == threading.get_ident() #3

    @wraps(cached.__wrapped__)
    def f(*a): return a
    return f.__name__, f(1)

    @lru_cache
    def inner(n): S.append(n); return n
    return inner(1), inner(1), S #4

    f = partial(lambda a, *r, k=0: (a, r, k), 1, k=5)
    return f(2), f(2, k=3), f.func(9)

    d = weakref.WeakKeyDictionary(); d[pm] = 3
    return d[pm], len(d) #3

    compose = reduce(lambda f, g: lambda v: g(f(v)), [lambda v: v + 1, lambda v: v * 2])
    return compose(3), compose(x)

    sys.stdout.write("")
    return x #3
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
