"""Operators, numbers and the builtin functions."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import math, operator, torch, fractions, decimal
class V:
    def __init__(self, v): self.v = v
    def __add__(self, o): return V(self.v + (o.v if isinstance(o, V) else o))
    def __radd__(self, o): return V(("r", o, self.v))
    def __sub__(self, o): return NotImplemented
    def __rsub__(self, o): return ("rsub", o)
    def __mul__(self, o): return V(self.v * 2)
    def __imul__(self, o): self.v = ("i", o); return self
    def __truediv__(self, o): return ("div", o)
    def __floordiv__(self, o): return ("fdiv", o)
    def __mod__(self, o): return ("mod", o)
    def __divmod__(self, o): return ("dm", o)
    def __pow__(self, o, m=None): return ("pow", o, m)
    def __matmul__(self, o): return ("mm", o)
    def __lshift__(self, o): return ("ls", o)
    def __rshift__(self, o): return ("rs", o)
    def __and__(self, o): return ("and", o)
    def __or__(self, o): return ("or", o)
    def __xor__(self, o): return ("xor", o)
    def __neg__(self): return ("neg",)
    def __pos__(self): return ("pos",)
    def __invert__(self): return ("inv",)
    def __abs__(self): return ("abs",)
    def __eq__(self, o): return isinstance(o, V) and self.v == o.v
    def __lt__(self, o): return self.v < o.v
    def __le__(self, o): return self.v <= o.v
    def __hash__(self): return hash(self.v)
    def __bool__(self): return bool(self.v)
    def __len__(self): return 5
    def __getitem__(self, k): return ("item", k)
    def __setitem__(self, k, v): self.v = (k, v)
    def __delitem__(self, k): self.v = ("del", k)
    def __contains__(self, k): return k == 3
    def __int__(self): return 7
    def __float__(self): return 2.5
    def __complex__(self): return 1j
    def __index__(self): return 2
    def __round__(self, n=None): return ("round", n)
    def __trunc__(self): return 4
    def __floor__(self): return 5
    def __ceil__(self): return 6
    def __call__(self, *a, **k): return (a, k)
    def __iter__(self): return iter((1, 2))
    def __reversed__(self): return iter((2, 1))
    def __str__(self): return "V!"
    def __repr__(self): return "V?"
    def __format__(self, spec): return f"<{spec}>"
    def __bytes__(self): return b"v"
    def __sizeof__(self): return 3
class W(V):
    def __radd__(self, o): return ("W radd", o)
class Plain: pass
glob = 10
"""

TABLE = r"""
x * 2 + 1, 3
1 + x - 2 * x / 4
x // 2, x % 3, -x, +x, abs(x)
x ** 2, 2 ** x, divmod(7, 3), divmod(-7, 3), divmod(7.5, 2)
(x > 0) & (x < 1), (x > 0) | (x < -1), ~(x > 0), (x > 0) ^ True
x @ x.T
1 if x.shape[0] > 2 else x
x.shape[0] and x, 0 or x, not x.shape
7 // 2, -7 // 2, 7 % -3, -7 % 3, 7.5 // 2, -7.5 % 2
2 ** 10, 2 ** -1, (-8) ** (1 / 3), 0 ** 0, 0.0 ** 0
1 << 5, 257 >> 3, 6 & 3, 6 | 3, 6 ^ 3, ~6
True + True, True & False, True | 2, True ^ True, not 3
1 / 3, 1e300 * 1e10, -1e300 * 1e10, 1e-320
int("12"), int("ff", 16), int(3.9), int(-3.9), int("0b11", 0), int(True)
float("1.5"), float("inf"), float("-inf"), float("1e3"), float(3)
complex(1, 2), complex("1+2j"), 1j * 1j, abs(3 + 4j), (1 + 2j).conjugate(), (1 + 2j).real
round(2.5), round(3.5), round(2.675, 2), round(-1.5), round(1234, -2)
bin(10), oct(10), hex(255), chr(97), ord("a"), ascii("é"), repr("a'b")
min(3, 1, 2), max([3, 1, 2]), min("bca"), max((1, 2), (1, 3)), min([], default=5)
min([3, -4, 2], key=abs), max("aB", key=str.lower), min(2, 1, key=lambda v: -v)
sum([1, 2, 3]), sum([1.5, 2], 10), sum([[1], [2]], []), sum(())
sum([x, x * 2, x * 3])
sorted([3, 1, 2]), sorted("bca", reverse=True), sorted([(1, "b"), (0, "c")], key=lambda p: p[1])
sorted({"b": 1, "a": 2}), sorted([2, 1], key=lambda v: (v % 2, v))
list(reversed([1, 2, 3])), list(reversed("abc")), list(reversed(range(3)))
list(enumerate("ab")), list(enumerate(["a"], 5)), dict(enumerate("xy", start=2))
list(zip([1, 2], "ab", (3, 4))), list(zip()), list(zip([1, 2], [3]))
list(map(lambda a, b: a + b, [1, 2], [3, 4])), list(map(str, [1, 2])), list(filter(None, [0, 1, "", "a"]))
list(filter(lambda v: v > 1, [1, 2, 3])), any([0, 0, 1]), all([1, 0]), any([]), all([])
any(v > 2 for v in [1, 2, 3]), all(v > 0 for v in (1, 2))
range(5)[2], range(5)[1:4], len(range(0, 10, 3)), 3 in range(5), list(range(5, 0, -2)), range(3) == range(0, 3, 1)
range(10).index(4), range(10).count(20), range(1, 8, 2).stop, range(3).start, range(3).step
slice(1, 2), slice(None, 5, 2).indices(10), slice(1, 5).start, [1, 2, 3, 4][slice(1, 3)]
isinstance(1, int), isinstance(True, int), isinstance(1, (str, float)), isinstance("a", str | int), issubclass(bool, int)
isinstance(x, torch.Tensor), isinstance(x, (list, torch.Tensor)), type(x) is torch.Tensor, issubclass(torch.nn.Parameter, torch.Tensor)
type(1), type("a"), type(None), type(x), type(type), type([])
callable(len), callable(3), callable(lambda: 1), callable(V), callable(V(1)), callable(Plain())
id(x) == id(x) #2
hash("a") == hash("a"), hash(1) == hash(1.0), hash((1, 2)) == hash((1, 2))
getattr(x, "shape"), getattr(x, "nope", 5), hasattr(x, "ndim"), hasattr(x, "nope")
len("abc"), len([1]), len({1: 2}), len(x), len(x.shape), len(range(4))
bool([]), bool(""), bool(0.0), bool([0]), bool(None), bool({})
pow(2, 5), pow(2, 5, 7), pow(2.0, 3), pow(3, -1, 7)
divmod(10, 3), abs(-3.5), abs(-2), abs(True)
str(1.0), str(1e16), str(1e-5), str(None), str(True), str([1, "a"]), str({"a": (1,)})
repr(1.5), repr("x\n"), repr([None]), repr({1}), repr((1,)), repr(b"a")
bytes(3), bytes([1, 2]), b"ab" + b"c", b"abc"[1], bytes("é", "utf8"), b"a,b".split(b",")
bytearray(b"a") #2
iter([1, 2]).__next__(), next(iter("ab")), next(iter([]), "none")
vars(Plain()), Plain.__name__
dir(Plain()) == dir(Plain()) #2
(lambda *a, **k: (a, k))(1, *[2, 3], a=4, **{"b": 5})
math.sqrt(2), math.pi, math.floor(-1.5), math.ceil(1.2), math.trunc(-1.7), math.fmod(7, 3)
math.gcd(12, 18), math.lcm(4, 6), math.factorial(5), math.comb(5, 2), math.perm(5, 2), math.isqrt(17)
math.exp(1), math.log(10), math.log(8, 2), math.log2(8), math.log10(1000), math.log1p(0.5), math.expm1(0.5)
math.sin(1), math.cos(1), math.tan(1), math.atan2(1, 2), math.hypot(3, 4), math.degrees(1), math.radians(90)
math.isnan(float("nan")), math.isinf(1e400), math.isfinite(1), math.isclose(1, 1 + 1e-12), math.copysign(1, -0.0)
math.prod([1, 2, 3]), math.fsum([0.1] * 10), math.dist([0, 0], [3, 4]), math.frexp(8.5), math.ldexp(0.5, 3), math.modf(1.5)
math.prod(x.shape), math.sqrt(x.shape[-1]), x * math.sqrt(x.size(0))
(5).bit_length(), (255).to_bytes(2, "big"), int.from_bytes(b"\x01\x02", "big"), (7).bit_count(), (3).real, (3).numerator
(1.5).is_integer(), (0.5).as_integer_ratio(), float.fromhex("0x1p3"), (2.0).hex(), (1.5).__floor__()
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, x is not None, "a" in "abc", 3 not in [1, 2]
(1, 2) < (1, 3), [1, 2] == [1, 2], "a" < "b", {1} < {1, 2}, (1,) != (1, 2)
None is None, None == 0, [] is [], () == (), "" == b""
x is x, x is not None, x.shape == (3, 4), x.shape != torch.Size([3, 4])
operator.add(1, 2), operator.itemgetter(1)([1, 2]), operator.attrgetter("ndim")(x), operator.methodcaller("upper")("a")
operator.itemgetter(0, 2)("abc"), operator.attrgetter("ndim", "shape")(x), operator.methodcaller("split", ",")("a,b")
operator.mul(x, 2), operator.neg(x), operator.matmul(x, x.T), operator.truediv(1, 2), operator.mod(7, 4)
operator.contains([1], 1), operator.countOf([1, 1], 1), operator.indexOf([1, 2], 2), operator.concat([1], [2]), operator.length_hint([1])
operator.index(3), operator.not_(0), operator.truth(1), operator.is_(x, x), operator.inv(5), operator.and_(6, 3)
operator.iadd([1], [2]), operator.getitem([1, 2], 1), operator.lt(1, 2), operator.ge(2, 2), operator.abs(-1), operator.floordiv(7, 2)
V(1) + V(2), 5 + V(1), V(1) + 5
5 - V(1), V(2) * 3, V(1) / 2, V(1) // 2, V(1) % 2, divmod(V(1), 2)
V(1) ** 2, pow(V(1), 2, 3), V(1) @ 2, V(1) << 1, V(1) >> 1, V(1) & 1, V(1) | 1, V(1) ^ 1
-V(1), +V(1), ~V(1), abs(V(1))
V(1) == V(1), V(1) != V(1), V(1) != 3, V(1) < V(2), V(1) > V(2), V(1) <= V(1), V(1) >= V(2)
bool(V(0)), bool(V(1)), not V(0), len(V(1)), V(1)[3], V(1)[1:2], V(1)[..., None], 3 in V(1), 4 in V(1), 4 not in V(1)
int(V(1)), float(V(1)), [1, 2, 3][V(1)]
operator.index(V(1)) #2
"abc"[V(1):] #2
complex(V(1))
round(V(1)), round(V(1), 3)
math.trunc(V(1)) #2
math.ceil(V(1)) #2
math.floor(V(1)) #2
V(1)(1, a=2), list(V(1)), list(reversed(V(1))), str(V(1)), repr(V(1)), f"{V(1)}", f"{V(1):>5}", f"{V(1)!r}", "%s" % V(1)
V(1) + W(2), W(1) + V(2), W(1) + 1, sum([V(1), V(2)], V(0))
[*V(1)], (*V(1), 3), {**{"a": 1}, "b": V(1)}
sorted([V(3), V(1)])[0], max(V(1), V(2)), min([V(4), V(2)])
{V(1): 2}[V(1)], V(1) in [V(1)], [V(2), V(1)].index(V(1)), {V(1), V(1)} == {V(1)}
V(1) - V(2)
V(1) < 3
1 / 0
1 % 0
int("a")
[1, 2][5]
{}["a"]
"a" + 1
len(3)
None.foo
x.foo
x.names
undefined_name
(1, 2)[3]
float("abc")
min([])
chr(-1)
1 < "a"
Plain() + 1
Plain()[0]
Plain()()
next(iter([]))
sum(["a"])
int(None)
[].pop()
"abc".index("z")
(lambda a: a)()
(lambda a: a)(1, 2)
(lambda: 1)(a=2)
math.sqrt(-1)
range(1, 2, 0)
ord("ab")
round("a")
x + "a"
x[10]
torch.cat([])
x.view(7)
x.reshape(2, 2)

    a = 5
    a += 2; a -= 1; a *= 3; a /= 2; a //= 2; a **= 2; a %= 7
    b = 6
    b <<= 2; b >>= 1; b &= 12; b |= 3; b ^= 1
    return a, b, x

    y = x.clone()
    y += 1; y *= 2; y -= x; y /= 3
    return y

    y = x
    y += 1
    return y

    a = [1]; b = a
    a += [2]
    a *= 2
    return a, b, a is b

    v = V(1); w = v
    v *= 4
    v[2] = 5
    del w[7]
    return v, w, v is w

    global glob
    glob += 1
    return glob, x * glob #2

    S[0] += 1; S[1]["a"] -= 1; S[1]["new"] = x
    return S[0]

    S[0], S[1]["a"] = S[1]["a"], S[0]
    S.append(3); S.insert(0, "z")
    return x

    a, b, *c = range(5)
    (d, e), *f = [(1, 2), 3]
    *g, h = "xyz"
    return a, b, c, d, e, f, g, h

    a = b = c = []
    a.append(1)
    return b is c, c

    n = 0
    while True:
        n += 1
        if n == 3: continue
        if n > 5: break
    else:
        n = 100
    return n

    for i in range(3):
        if i == 7: break
    else:
        i = "else"
    return i

    total = 0
    for i, (a, b) in enumerate([(1, 2), (3, 4)]):
        for k in range(b):
            if k == 2: break
            total += a * i + k
        else:
            total += 100
    return total, i, a

    if (n := len(x)) > 2 and (m := n * 2):
        return n, m
    return None

    assert x.shape[0] == 3, "three"
    assert x.ndim == 3, f"ndim {x.ndim}"

    del S[0]
    a = [1, 2, 3, 4]
    del a[1:3], a[-1]
    return a

    a = 3
    del a
    return a

    def f(): return unbound
    unbound = 3
    del unbound
    return f()

    x1: int = 5
    y: "str"
    return x1

    return [y for y in x], [y.sum() for y in x.unbind(1)]

    a, b, c = slice(V(1)), slice(V(1)), slice(0, V(2))
    return a <= a, a < a, a == a, a >= b, a == b, a != b, c < a, c <= c, a == 3, slice(0, 3) > c

    a, b = slice(float("nan")), slice(x, 1)
    return a == a, a <= a, a != a, b == b, b <= b, a == slice(float("nan"))
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
