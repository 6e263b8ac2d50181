"""Lists, tuples, dicts, sets, comprehensions, slices, views and generators."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import collections, copy, functools, itertools, operator, torch, types
from collections import namedtuple, OrderedDict, defaultdict, deque, Counter, ChainMap
P = namedtuple("P", "a b", defaults=[5])
L = [1, 2, 3]; DD = {"a": 1, "b": 2}; TT = (1, 2); SS = {1, 2}
OD = OrderedDict(a=1, b=2); DF = defaultdict(list, a=[1]); DQ = deque([1, 2, 3]); CT = Counter("aab")
class MyList(list):
    def total(self): return sum(self)
    def __getitem__(self, k): return ("mine", list.__getitem__(self, k))
class MyDict(dict):
    def __missing__(self, k): return k * 2
class Slotted: __slots__ = ("v",)
slotted = Slotted(); slotted.v = [1]; outside = type("Own", (set,), {})([1, 2])
class SubSet(set): pass
class SubText(str): pass
class SubList(list): pass
class SubDict(dict): pass
class MyTuple(tuple):
    @property
    def first(self): return self[0]
class Seq:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i >= self.n: raise IndexError(i)
        return i * 10
def gen(n):
    for i in range(n):
        yield i
def echo():
    got = []
    try:
        while True:
            got.append((yield len(got)))
    finally:
        S2.append("closed")
S2 = []
def outer(n):
    r = yield from gen(n)
    yield "end", r
def returns():
    yield 1
    return "value"
def delegating():
    v = yield from returns()
    yield v
def accumulate():
    total = 0
    while True:
        v = yield total
        if v is None: return
        total += v
def throws():
    try:
        yield 1
    except ValueError as e:
        yield f"caught {e}"
    yield "after"
"""

TABLE = r"""
[1, 2] + [3], [1] * 3, [1, 2, 3][1:], [3, 1].index(1), [1, 1].count(1), [[1], 2][0][0]
[i * 2 for i in range(3)], [i for i in range(5) if i % 2], [(i, j) for i in range(2) for j in range(i + 1)]
{i: i * i for i in range(3)}, {i % 2 for i in range(5)}, [[j for j in range(i)] for i in range(3)]
list(i for i in range(3)), tuple(i for i in "ab"), sum(i for i in range(4)), dict((i, i) for i in range(2))
[y for y in (x, x + 1)], [t.sum() for t in x], [r * i for i, r in enumerate(x)]
[*L, *TT, 4], (*L,), {*L, 9} == {1, 2, 3, 9}, {**DD, "c": 3}, [*range(2), *"ab"]
L[0], L[-1], L[::-1], L[5:], L[:-1], L[1:100], len(L), 2 in L, L == [1, 2, 3], L < [2], L.copy() is not L
DD["a"], DD.get("z"), DD.get("z", 3), "a" in DD, len(DD), list(DD), list(DD.items()), list(DD.values()), DD == {"b": 2, "a": 1}
DD.keys(), DD.values(), DD.items()
DD.keys() ^ {"a", "z"} #2
DD.keys() & {"a"}, DD.keys() | {"c"}, DD.keys() - {"a"}, DD.items() & {("a", 1)}
DD | {"c": 3}, {"a": 0} | DD, dict(DD, z=1), dict([("a", 1)]), dict(a=1, b=2), dict.fromkeys("ab", 0), {**{}}
list(reversed(DD)), list(reversed(list(DD.items()))), sorted(DD), max(DD, key=DD.get), min(DD.values()), sum(DD.values())
TT[0], TT + (3,), TT * 2, TT.index(2), TT.count(1), len(TT), 1 in TT, TT < (1, 3), hash(TT) == hash((1, 2)), ()
SS | {3}, SS & {1}, SS - {1}, SS ^ {1, 3}, SS <= {1, 2, 3}, SS.issubset({1, 2}), SS.isdisjoint({5}), len(SS), 1 in SS
SS.union([3]), SS.intersection([1]), SS.difference([1]), SS.symmetric_difference([1, 3]), SS.copy() == SS, frozenset(SS) == SS
frozenset([1]) | {2}, {frozenset([1]): 2}[frozenset([1])], set("ab") == {"a", "b"}, set(), {1, 1.0, True}
P(1), P(1, 2), P(b=1, a=0), P(1).a, P(1)._asdict(), P(1)._replace(a=3), P._fields, P(1) == (1, 5), P._make([1, 2])
P(x, 2).a, P(x, x + 1)[1], [*P(1)], P(1) + (3,)
OD["a"], list(OD), OrderedDict(a=1) == {"a": 1}, OrderedDict([("b", 1)]), list(OD.items()), OrderedDict(a=1, b=2) == OrderedDict(b=2, a=1)
DF["a"], "z" in DF, DF.get("z"), defaultdict(int)["q"], defaultdict(lambda: 5)["a"], dict(DF), DF.default_factory
deque([1, 2]), DQ == deque([1, 2, 3]), DQ == L, list(reversed(DQ)), 2 in DQ, list(DQ), len(DQ), DQ[-1], DQ[0], [*DQ], sum(DQ), bool(DQ), max(DQ)
CT["a"], CT["z"], Counter("aab"), Counter([1, 1, 2]).most_common(1), sorted(CT.elements()), CT + Counter("a"), sum(CT.values())
ChainMap({"a": 1}, {"a": 2, "b": 3})["b"], dict(ChainMap({"a": 1}, {"b": 2}))
MyList([1, 2]), MyList([1, 2]).total(), MyList([1])[0], len(MyList([1])), MyList([1]) + [2], [i for i in MyList([4])]
MyDict(a=1)["a"], MyDict()["q"], MyDict(a=1), "q" in MyDict(), MyDict(a=1).get("z"), len(MyDict(a=1))
MyTuple((1, 2)), MyTuple((1, 2)).first, MyTuple((1, 2))[1], len(MyTuple("ab"))
list(Seq(3)), len(Seq(2)), 10 in Seq(2), list(reversed(Seq(2))), [*Seq(2)], Seq(2)[1], sum(Seq(3)), max(Seq(3))
list(gen(3)), next(gen(2)), sum(gen(4)), [*gen(2)], dict(zip(gen(2), "ab")), 2 in gen(3), tuple(gen(2)), max(gen(3))
list(outer(2)), list(delegating()), list(zip(gen(2), gen(3))), list(enumerate(gen(2))), list(map(str, gen(2)))
gen(3)
(i * 2 for i in L) #2
(v for v in [x, x * 2]) #2
[g for g in [gen(2), gen(1)]][0]
collections.deque(maxlen=2), deque([1, 2, 3], 2), deque([1], maxlen=0), deque("ab"), deque([1, 2, 3], 2).maxlen, DQ.maxlen, deque(x.unbind(0), 2).maxlen
L[10]
DD["nope"]
TT[9]
P()
P(1, 2, 3)
P(1).c
[1].remove(3)
{}.popitem()
set().pop()
{1}.remove(2)
{[]: 1}
{{}}
[1, 2].index(9)
(1, 2).foo
DF.nope
deque().popleft()
DQ[5]
deque([1]).pop(0)
DQ[0:1] #2
DQ + deque([1]) #2
deque([1], 2) * 2 #2
[3, 1, 3].index(3, -1), [3, 1, 3].index(3, 1, 9), (1, 2, 1).index(1, 1), DQ.index(3, 1), deque([1, 2, 1]).index(1, 1, 3), [1].index(1, True)
[3, 1].index(3, 1)
(1, 2).index(2, 0, -1)
DQ.index(9)
[1].index(1, None)
DQ.copy(), deque([1], 3).copy(), deque([1, 1]).count(1), DQ.count(9)
deque([1]).remove(2)
deque([1], 1).insert(0, 2)
OrderedDict.fromkeys("ba", 2), OrderedDict.fromkeys("ab"), defaultdict.fromkeys("ab", 3), defaultdict.fromkeys("a").default_factory, defaultdict.fromkeys("a")["z"]

 d = deque([1, 2, 3], 5)
 d.insert(-1, x)
 d.extendleft("ab")
 d.remove(2)
 return d, DQ.copy() is DQ
[] < {}
next(gen(0))
dict([1])
dict([(1, 2, 3)])


    a, b = [1, 2, 3]

    a, *b, c = [1]

    a, b = 3

    L2 = [3, 1, 2]
    L2.append(4); L2.extend([5]); L2.insert(0, 9); L2.remove(1); p = L2.pop(); q = L2.pop(0)
    L2.sort(); L2.reverse()
    M = L2.copy(); L2.clear()
    return L2, M, p, q

    a = [1, 2, 3, 4, 5]
    a[1:3] = ["x"]; a[0] = 0; a[-1:] = [7, 8]; a[::2] = [0] * len(a[::2])
    del a[0]
    return a

    a = [3, 1, 2]; a.sort(key=lambda v: -v); b = sorted(a, reverse=False); a += (1,); a *= 2
    return a, b

    d = {}
    d["a"] = 1; d.update(b=2); d.update({"c": 3}); d.update([("d", 4)]); d.setdefault("e", []).append(5); d.setdefault("a", 9)
    e = d.pop("a"); f = d.pop("zz", None); g = d.popitem(); del d["b"]; d |= {"z": 1}
    return d, e, f, g

    d = {"a": 1, "b": 2}
    for k in list(d):
        if d[k] == 1: del d[k]
    return d

    d = {"a": 1}
    for k in d: d["b"] = 2

    d = {"a": {"b": [1]}}
    d["a"]["b"].append(x); d["a"]["c"] = d["a"]["b"][0]
    return d

    d = {1: "int", 1.0: "float", True: "bool", "1": "str", (1,): "tuple", None: "none", x.shape: "shape"}
    return d, d[1], d[(3, 4)]

    s = {1}
    s.add(2); s.update([3, 4]); s.discard(9); s.remove(1); s |= {7}; s &= {2, 3, 7}; s -= {7}; s ^= {2}
    return s

    d = defaultdict(list)
    for k, v in [("a", 1), ("b", 2), ("a", 3)]: d[k].append(v)
    n = defaultdict(int)
    for c in "hello": n[c] += 1
    return d, n, x

OrderedDict().foo, deque() - 1, next(OrderedDict()), defaultdict(int).foo, deque() * 2.5, [1][deque()], {OrderedDict()}, list(functools.partial(len)), vars(3), reversed(ChainMap({}))
SubSet([1]) < SubSet([1, 2]), SubSet([1]) | SubSet([2]), SubSet([1]) in {frozenset([1])}, (s := SubSet([1])) | s, s == s, s in s, "abc" % dict(a=1), SubSet.copy(s)
"abc" % SubDict(a=1), "%s" % SubList([1]) #2
copy.copy(SubText("a")), copy.deepcopy(SubText("a")), copy.copy(SubList([1])), (s := frozenset([1])).copy() is s, copy.copy(s) is s
list(reversed(deque([1, 2]))), list(reversed(SubText("ab"))), vars(functools.partial(len)), dict.copy(SubDict(a=1))

    a = SubList([1, 2]); a.extend(a); a += a; q = deque([1]); q.extend(q)
    return a, q

    it = enumerate([4, 5])
    try: sum(it)
    except TypeError: pass
    return next(it)

    s = SubSet([1])
    try: s.remove(s)
    except KeyError as e: return s, type(e.args[0]).__name__

DF.copy(), DF.copy().default_factory, OD.copy()
copy.deepcopy(DF), copy.copy(DF), copy.deepcopy(slotted).v, copy.copy(slotted).v #2
SS | DD.keys(), type(SubSet([1]) | DD.keys()).__name__, DD.keys() & SS

    s = set(SS); s.discard(outside); s.discard(SubSet([1]))
    return s, outside in s #2

    a = [1]; a.append(a); d = {}; d[0] = d
    return len(a), a[1] is a, len(a * 2), {*d}, d[0] is d, 1 in a, [*a][0]

    k = {1: 0, 5: 0}.keys(); s = t = {1}; s |= k; u = v = {1, 2}; u ^= k; u -= {1}
    return s, t, u, v, s is t

    s = t = SubSet([1, 2]); s |= {3}; s &= {2, 3}; s -= {2}; s ^= {3, 4}
    return s, s is t

    a = b = SubList([1]); a += [2]; a *= 2
    return a, a is b, type(a + [1]).__name__

    a = b = SubDict(u=1); a |= {"v": 2}; a |= [("w", 3)]
    return a, a is b

    a = b = OrderedDict(u=1); a |= {"v": 2}; c = d = defaultdict(list, u=1); c |= {"v": 2}
    return a, a is b, c, c is d

    a = b = {"u": 1}; a |= [("v", 2)]; a |= zip("w", (3,))
    return a, a is b

    a = [1]; a |= {2}
    return a

    p = functools.partial(dict, u=1); d = p.keywords; d["v"] = 2
    return p, p(), d is p.keywords

    q = deque([1, 2, 3, 4]); q.rotate(); q.reverse(); r = list(q); q.rotate(-3); deque().rotate(2)
    return r, list(q)

    q = deque([x, 2], maxlen=2)
    q.append(3); q.appendleft(x + 1); q.extend([5, 6]); q[0] = 4; del q[1]; q += [x]
    return q, len(q) #2

    q = deque([x, 2], maxlen=2)
    q.append(3); q.appendleft(x + 1); q.extend([5, 6]); q[0] = 4
    return q, len(q)

    DQ.append(len(S)); DQ.popleft(); S.append(list(DQ)); DQ.clear(); DQ.extend([1, 2, 3])
    return DQ[-1], x

    q = deque([1, 2])
    for i in q:
        q.append(q.popleft())
    return q, x #2

    c = Counter()
    c["a"] += 1; c.update("ab"); c.subtract(["a"])
    return c

    q = deque([1, 2])
    q.append(3); q.appendleft(0); a = q.popleft(); b = q.pop(); q.extend([5]); q.rotate(1)
    return q, a, b #2

    o = OrderedDict(a=1, b=2, c=3)
    o.move_to_end("a"); o["d"] = 4; f = o.popitem(last=False)
    return o, f, list(o)

    g = accumulate()
    return next(g), g.send(3), g.send(4), x

    g = echo()
    a = [next(g), g.send("q"), g.send(x)]
    g.close()
    return a, list(S2)

    g = throws()
    return next(g), g.throw(ValueError("v")), next(g)

    g = throws(); next(g)
    g.throw(KeyError("k"))

    g = gen(2); list(g)
    return list(g), next(g, "done")

    g = returns(); next(g)
    try: next(g)
    except StopIteration as e: return e.value

    def inner():
        yield from [1, 2]
        return (yield 3)
    g = inner()
    return [next(g), next(g), next(g)], next(g, 4)

    def fib():
        a, b = 0, 1
        while True:
            yield a
            a, b = b, a + b
    out = []
    for v in fib():
        if v > 20: break
        out.append(v)
    return out, x

    def tree(t):
        if isinstance(t, list):
            for s in t: yield from tree(s)
        else:
            yield t
    return list(tree([1, [2, [3, 4]], 5])), x

    def g():
        try: yield 1
        finally: S.append("fin")
    for v in g(): pass
    return S

    def g():
        yield x * 2
        yield x * 3
    a, b = g()
    return a + b

    it = iter(L); a = next(it); rest = list(it)
    return a, rest, next(it, None)

    it = iter([1, 2, 3, 4])
    return list(zip(it, it))

    n = iter(range(10).__iter__, None)
    calls = iter(lambda: S.append(1) or len(S), 5)
    return list(calls)

    i = 10
    a = [i for i in range(3)]
    return i, a

    fs = [lambda: i for i in range(3)]
    return [f() for f in fs]

    fs = [lambda i=i: i for i in range(3)]
    return [f() for f in fs]

    matrix = [[1, 2], [3, 4]]
    return list(zip(*matrix)), [list(r) for r in zip(*matrix)], [c for r in matrix for c in r]

    a = [1, 2]; b = a; b.append(3); c = a[:]; c.append(4)
    return a, b, c, a is b

    a = []; a.append(a)
    return len(a), a[0] is a

    S[1]["x"] = x; S[1].pop("a"); S[1].update(z=[1]); S += [x.sum()]
    return S[1]["x"] is x

    S.sort(key=str); S.reverse()
    return S

    m = MyList(); m.append(1); m.extend([2, 3]); m[0] = 7
    return m, m.total()

    m = MyDict(); m["a"] = 1; m.update(b=2); m["c"] += "x"
    return m

    a = [0] * 3; b = [[]] * 2; b[0].append(1)
    return a, b

    a = {"k": [x]}
    b = dict(a); b["k"].append(1); a["j"] = 2
    return len(a["k"]), list(a), list(b)

    first, *middle, last = x
    return first, len(middle), last

    (a, b), c = (1, 2), 3
    for (d, e), f in [((1, 2), 3)]: pass
    return a, b, c, d, e, f

    acc = []
    for a, b in zip(x, x * 2): acc.append(a * b)
    return torch.stack(acc)

    out = {}
    for i, row in enumerate(x): out[f"r{i}"] = row.sum()
    return out

    t = (1, [x]); e = (); p = P(1, x); f = frozenset([1]); one = (x,)
    return [() * 2 is e, t * 1 is t, t + () is t, e + t is t, t[:] is t, t[0:2] is t, t[:1] is t, one[::-1] is one, t[2:] is e, p[:] is p, p[:] is p[:], frozenset(f) is f, MyTuple(t)[:] is t, e + p is p]

    t = (1, 2); e = ()
    return [t * True is t, e + t is t, t[:] is t, t[::1] is t, t[::-1] is t, tuple([]) is e, (*e,) is e, t * 0 is e, [] + [] is [], torch.Size([]) is e]

    said = []; d = DD.keys(); it = iter([x, 1]); t = SubText("ab"); one = (1, 1)
    for f in (lambda: d + it, lambda: it * d, lambda: d.__iadd__(it), lambda: d % it, lambda: DD.items() - 3, lambda: str.__eq__(t, x, 1), lambda: str.__eq__(Slotted(), t), lambda: list.count(one, 1), lambda: dict.get(SS, 1), lambda: int.__add__("a", 1), lambda: object.__eq__(t, 1), lambda: OrderedDict.move_to_end({}, 1), lambda: SubDict.__len__([])):
        try: said.append(f())
        except (TypeError, AttributeError) as e: said.append(str(e))
    return said, next(it), DD.items() == {"a": 1, "b": 2}.items() #2

    d = OrderedDict(a=1, b=2); i = iter(d.items()); said = [next(i)]; d["q"] = 3
    for _ in range(2):
        try: said.append(list(i))
        except RuntimeError as e: said.append(str(e))
    j = reversed(d); d.move_to_end("q"); said.append(next(j)); d["q"] = d.pop("q")
    try: next(j)
    except RuntimeError as e: said.append(str(e))
    S.append(said); return itertools.chain(i, j)

    d = {"a": 1, "b": 2}; i = iter(d); said = [next(i)]; d["c"] = d.pop("b")
    return said, [*i] #2

    d = {"a": 1, "b": 2}; i = iter(d); said = [next(i), next(i)]; d["b"] = d.pop("b")
    try: next(i)
    except RuntimeError as e: said.append(str(e))
    return said #2

    d = {1, 2, 3}; i = iter(d); said = [next(i), type(i).__name__]; d.pop()
    for j in range(2):
        try: next(i)
        except RuntimeError as e: said.append(str(e))
        d.add(j + 7)
    return said #3

    d = {1, 2, 3}; i = iter(d); next(i)
    return i.__length_hint__(), next(i), i.__reduce__()[1] #4

    d = {1, 2, 3}; i = iter(d); said = [next(i)]; d.remove(1); d.add(9)
    return said, [*i] #2

    i = iter(SS); next(i); j = iter({1, 2}); k = iter({5}); next(k, 0); next(k, 0)
    S.append([type(i).__name__, type(j).__name__, type(k).__name__]); return itertools.chain(i, j, k)

    s = SubSet([1, 5]); said = []
    try:
        for i in s: print("x"); s.pop()
    except RuntimeError as e: said.append(str(e))
    return s, said, SubSet([x]), SubSet([3, 1]) #9

    rows = [[1], [2]]; both = operator.concat(rows, rows); c = Counter("aab"); said = []
    for f in (lambda: isinstance(x, None), lambda: isinstance(1, (str, [])), lambda: issubclass(int, 3), lambda: functools.partial(3, 1), lambda: functools.partial(), lambda: object.__new__(type(iter([]))), lambda: type(iter({}))(), lambda: object.__new__(list)):
        try: said.append(f())
        except TypeError as e: said.append(str(e))
    return both[0] is rows[0] is both[2], c.__ror__({}), {}.__ror__(SubDict(a=1)), type(types.MappingProxyType[c]).__name__, isinstance(c, dict | int), said #30

    p = vars(Slotted); said = []
    for f in (copy.copy, copy.deepcopy):
        try: f(p)
        except TypeError as e: said.append(str(e))
    return said #3
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
