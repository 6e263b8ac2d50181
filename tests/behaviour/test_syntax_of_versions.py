"""Syntax and opcodes that versions of Python added: match statements (3.10), exception groups (3.11), type parameters and
inlined comprehensions (3.12), locals and classes of 3.13, t-strings and deferred annotations (3.14)."""

from __future__ import annotations

import sys

import pytest

from .harness import Theme

PRELUDE_3_11 = r"""
import array, collections, contextlib, torch
class MyInt(int): pass
class MyStr(str): pass
class Items(collections.abc.Sequence):
    def __init__(self, *a): self.a = a
    def __getitem__(self, i): return self.a[i]
    def __len__(self): return len(self.a)
class Point:
    __match_args__ = ("x", "y")
    def __init__(self, x, y): self.x, self.y = x, y
class Once:
    __match_args__ = ("v",)
    def __init__(self, v): self._v = v
    @property
    def v(self):
        if self._v is None: raise AttributeError("gone")
        return self._v
class Silent:
    __match_args__ = ("a", "b")
    @property
    def b(self): SEEN.append("b"); return 1
SEEN = []
class ListArgs: __match_args__ = ["a"]
class NumberArgs: __match_args__ = (1,)
class NoArgs: pass
class Twice:
    __match_args__ = ("a", "a")
    a = 1
class Keys: A = "k"; B = "k"; three = 3
class AnyTensor(type):
    def __instancecheck__(cls, o): return isinstance(o, torch.Tensor)
class Like(metaclass=AnyTensor): pass
"""

TABLE_3_11 = r"""
    out = []
    for v in (MyInt(3), 3, True, MyStr("a"), 2.5, bytearray(b"q"), [1], frozenset((1,))):
        match v:
            case bool(b): out.append(("bool", b))
            case MyInt(n): out.append(("my", n))
            case int(n, real=r): out.append(("int", n, r))
            case MyStr(t): out.append(t)
            case float(imag=0.0) as f: out.append(f)
            case bytearray(q): out.append(len(q))
            case list([y]): out.append(y)
            case frozenset(z): out.append(z)
    return x + len(out), out #2

    out = []
    for v in (collections.deque([1, 2]), x.shape, (1, 2), Items(4, 5), range(2), "ab", b"ab", {1, 2}, {"a": 1, "b": 2}):
        match v:
            case [a, b]: out.append((a, b))
            case {"a": k, **rest}: out.append((k, rest))
            case _: out.append("no")
    return x * 2, out

    out = []
    for v in [(1, 2), [1, 2, 3, 4], {"a": 1, "z": 2}, "str", 5, Point(1, 2), None, (), {"k": [1, {"q": x}]}]:
        match v:
            case (a, b): out.append(a + b)
            case [f, *rest]: out.append((f, rest))
            case {"a": v, **kw}: out.append((v, kw))
            case str() as t: out.append(t)
            case int(n) if n > 4: out.append(n)
            case Point(p, y=q): out.append((p, q))
            case None: out.append("none")
            case {"k": [_, {"q": torch.Tensor() as w}]}: out.append(w * 2)
            case _: out.append("else")
    return x * len(out), out

    out = []
    for o in (Once(x), Once(None), Once(3)):
        match o:
            case Once(torch.Tensor() as t): out.append(t + 1)
            case Once(int(n)): out.append(n)
            case Once(): out.append("bare")
    return out

    match Silent():
        case Silent(1, 1): pass
        case _: return x + 1, list(SEEN)

    match x:
        case Like(ndim=d, shape=(3 | 4, n)): return x + d + n

    match Keys.three:
        case Keys.three: return x * 3

    match Point(1, 2):
        case Point(1, 2, 3): pass
    return x + 1

    match NoArgs():
        case NoArgs(1): pass
    return x + 1

    match ListArgs():
        case ListArgs(1): pass
    return x + 1

    match NumberArgs():
        case NumberArgs(1): pass
    return x + 1

    match Twice():
        case Twice(1, 1): pass
    return x + 1

    match Twice():
        case Twice(1, a=1): pass
    return x + 1

    match {"k": x, "l": 2}:
        case {Keys.A: a, Keys.B: b}: return a + b
    return x

    K = 3
    match 1:
        case K(): return x
    return x + 1

    try:
        raise ExceptionGroup("g", [ValueError("a"), TypeError("b")])
    except* ValueError as e:
        x = x + len(e.exceptions)
    except* TypeError as e:
        x = x * 3
    return x #2

    try:
        try:
            raise ExceptionGroup("g", [ValueError("a"), KeyError("b")])
        except* ValueError:
            x = x + 1
    except ExceptionGroup as e:
        return x * 5, [type(q).__name__ for q in e.exceptions] #2

    try:
        raise ValueError("v")
    except* ValueError as e:
        y = x + len(e.exceptions)
    return y #2

    try:
        y = x + 1
    except* ValueError:
        y = x - 1
    else:
        y = y * 2
    finally:
        z = y + 1
    return z

    try:
        try:
            raise ExceptionGroup("g", [ValueError("a")])
        except* ValueError:
            raise KeyError("inner")
    except ExceptionGroup as e:
        return x + len(e.exceptions), type(e.exceptions[0]).__name__
    except KeyError as e:
        return x - 1, type(e.__context__).__name__ #2

    n = 0
    for i in range(4):
        try:
            try:
                if i == 1: raise KeyError(i)
                if i == 2: continue
                n += 1
            finally:
                n += 10
        except KeyError as e:
            n += 100 + e.args[0]
        else:
            n += 1000
    return x + n
"""

PRELUDE_3_12 = r"""
import torch
def generic[T](v: T, n: int = 2) -> T:
    return v * n
class Box[T]:
    def __init__(self, v: T) -> None: self.v = v
    def get(self) -> T: return self.v
class Base[T]:
    def f(self, v): return v + 1
class Sub[T](Base[T]):
    def f(self, v): return super().f(v) * 2
type Pair[T] = tuple[T, T]
"""

TABLE_3_12 = r"""
generic(x) + generic(3), Box(x + 1).get() * 2, x + len(Pair.__type_params__), Sub().f(x)
Box[int](x).get() + 1 #2

    def f[T](v: T) -> T:
        return v + 1
    return f(x) #2

    def f[T: (int, float), *Ts, **P](v: T, *a: *Ts) -> T:
        return v + len(a)
    return f(x, 1, 2), f.__type_params__[0].__name__ #3

    class A[T]:
        k = 3
        def m(self, v: T) -> T: return v * self.k
    return A().m(x) #2

    type L = list[int]
    return x + len(L.__value__.__args__) #2

    i = 7
    r = [i * x for i in range(3)]
    return sum(r) + i

    i = 3
    r = [float((x + i).sum()) for i in range(3)]
    return x * sum(r) + i #2

    fs = [lambda: i * x for i in range(3)]
    return sum(f() for f in fs)

    i = 5
    try:
        [1 // (1 - i) * x for i in range(3)]
    except ZeroDivisionError:
        return x + i

    try:
        r = [q for q in [x]]
        return q
    except NameError as e:
        return r[0] + 1, str(e)

    r = [last := x + i for i in range(3)]
    return last, r

    n = 3
    s = f"{n!r:>{n + 2}} {'nested' + f'{n:03d}'} {x.shape[0]=}"
    return x + len(s), s

    class A:
        a: int = 1
        b: "torch.Tensor"
    return x + A.a, sorted(A.__annotations__) #2

    def f(v: int, *, w: float = 2.0) -> "str": return v * w
    return f(x), sorted(f.__annotations__)
"""

TABLE_3_13 = r"""
    def f[T = int](v: T) -> T: return v + 1
    return f(x), f.__type_params__[0].__default__.__name__ #2

    a = 3
    d = locals()
    d["a"] = 5
    return x + a, sorted(d) #2

    class A:
        def __init__(self): self.q = 1
    return x + len(A.__static_attributes__), A.__firstlineno__ > 0 #2
"""

PRELUDE_3_14 = r"""
import annotationlib, torch
from string.templatelib import Interpolation, Template
def render(t):
    return "".join(p if isinstance(p, str) else format(p.value, p.format_spec) for p in t)
def double(t): return t.values[0] * 2 + t.values[1]
KEPT = t"kept {3} {torch.ones(4)}"
class Enter:
    def __init__(self, v): self.v = v; self.__enter__ = lambda: 0
    def __enter__(self): return self.v + 1
    def __exit__(self, *a): pass
"""

TABLE_3_14 = r"""
double(t"{x + 1}{2}"), t"{x} and {x + 1}".interpolations[1].value * 2, t"{t'{x}'}".values[0].values[0] + 1
x + KEPT.values[1] + len(KEPT.strings), (x + 1, (KEPT + t"{x}").values[-1] * 2, (t"{x}!" + KEPT).strings)
x * sum(1 for p in KEPT), x + len(render(KEPT.__class__() + t"{7:03d}")) #2

    n = 3
    t = t"a{n:03d}b{n!r}"
    return x + len(render(t)), render(t), isinstance(t, Template), hasattr(t, "strings")

    w = "w"
    t = t"hello {w!r:>{5}} {x.shape[0]=}{x}"
    return x + 1, t.strings, [(i.expression, i.conversion, i.format_spec) for i in t.interpolations], t.values

    t = t"n {x + 1}"
    return x + 1, t is t, (t, t)[0] is t, {t: 1}[t], t == t"n {x + 1}"

    t, u = t"a{1}", t"b{x * 2}c"
    t += u
    return x * len(t.values), t.strings, t.values, [type(q).__name__ for q in t]

    return x + 1, t"a" + "b"

    out = [x.sum()]
    for p in t"a{x}b{4!s:q}":
        match p:
            case str() as s: out.append(s)
            case Interpolation(v, e, c, f): out.append((v, e, c, f))
    return out

    try:
        t"{1 // 0}"
    except ZeroDivisionError:
        return x + 1

    t = t"{float(x.sum()) > 0:.2f} {x * 2}"
    return t.values[1] + 1, render(t"{x.shape[0]}") #2

    for i, p in enumerate(t"a{x}b"):
        print(i)
        x = x + i
    return x #4

    t = t"{x * 3}"
    print("break")
    return t.values[0] + 1, t.strings #2

    return x + all(i > 0 for i in (1, 2)) + any(i > 2 for i in (1, 2)), tuple(i * 2 for i in range(3))

    any = lambda g: 7
    return x + any(i for i in (1,))

    try:
        raise NotImplementedError
    except NotImplementedError:
        return x + 1

    try:
        raise KeyError("a")
    except ValueError, KeyError:
        return x + 1

    def f(v: undefined_name) -> also_undefined: return v + 1
    return f(x)

    def f(v: int) -> str: return v + 1
    return f(x), f.__annotations__, f.__annotate__(1)

    K = float
    def f(v: K): return v + 1
    return f(x), f.__annotations__["v"]

    class A:
        v: Undefined
        w: int = 3
    return x + A.w #2

    def f(v: int): return v
    f.__annotations__ = {"q": 1}
    return f(x) + 1, f.__annotations__

    with Enter(x) as v: return v * 2

    with object(): return x

    a = b = c = d = e = f = g = h = i = j = k = l = m = n = o = p = q = r = x
    return a + r, (q, p, o, n)[1] + m + x[0] * 255 + 256

    return sum(map(lambda a, b: a * b, [x, 2], [3, 4], strict=True))
"""

TABLES = {
    (3, 11): (PRELUDE_3_11, TABLE_3_11),
    (3, 12): (PRELUDE_3_12, TABLE_3_12),
    (3, 13): (PRELUDE_3_12, TABLE_3_13),
    (3, 14): (PRELUDE_3_14, TABLE_3_14),
}
THEMES = [Theme(*TABLES[version]) for version in TABLES if sys.version_info >= version]
theme = THEMES[0]  # the syntax that every version has


@pytest.mark.parametrize("theme, at", [(theme, at) for theme in THEMES for at in range(len(theme.cases))])
def test_programs_of_versions(theme, at):
    theme.check(at)
