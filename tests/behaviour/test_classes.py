"""Classes: descriptors, metaclasses, super, properties, slots, dataclasses, enums, and functions."""

from __future__ import annotations

import pytest

from .harness import Theme

PRELUDE = r"""
import abc, dataclasses, enum, functools, inspect, types, typing, torch
from collections import OrderedDict
from dataclasses import dataclass, field
class Base:
    kind = "base"; count = 0
    def __init__(self, a=1): self.a = a
    def who(self): return "base", self.a
    @property
    def double(self): return self.a * 2
    @double.setter
    def double(self, v): self.a = v / 2
    @double.deleter
    def double(self): del self.a
    @staticmethod
    def st(v): return v + 1
    @classmethod
    def cl(cls, v): return cls.kind, v
    @classmethod
    def make(cls, *a, **k): return cls(*a, **k)
    @functools.cached_property
    def cached(self): S3.append("computed"); return self.a * 10
    def __eq__(self, o): return isinstance(o, Base) and self.a == o.a
    def __hash__(self): return hash(self.a)
S3 = []
class Empty: __slots__ = ()
class OfClass:
    v = 3
    @classmethod
    @property
    def kind(cls): return cls.v + 1
    @classmethod
    @property
    def where(cls): return slice(0, cls.v)
    static = classmethod(staticmethod(lambda v: v))
class Plain: pass
class Left(Base):
    kind = "left"
    def who(self): return ("left",) + super().who()
class Right(Base):
    def who(self): return ("right",) + super().who()
class Both(Left, Right):
    def __init__(self, a=2, b=3):
        super().__init__(a); self.b = b
    def who(self): return ("both",) + super(Both, self).who()
class Meta(type):
    registry = []
    def __new__(m, name, bases, ns, tag=None):
        cls = super().__new__(m, name, bases, ns); cls.tag = tag; return cls
    def __call__(cls, *a, **k):
        obj = super().__call__(*a, **k); obj.made = True; return obj
    def __len__(cls): return 42
    def __getitem__(cls, k): return ("meta", k)
    def __contains__(cls, k): return k == 1
    def __iter__(cls): return iter([1, 2])
    def __instancecheck__(cls, o): return o == 3 or type.__instancecheck__(cls, o)
    @property
    def prop(cls): return "mp"
    def method(cls): return cls.__name__
class WithMeta(metaclass=Meta, tag="t"):
    def __init__(self, v=0): self.v = v
class Typed:
    def __init__(self, kind, default): self.kind, self.default = kind, default
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, o, t=None): return self if o is None else o.__dict__.get(self.name, self.default)
    def __set__(self, o, v):
        if not isinstance(v, self.kind): raise TypeError(f"{self.name} needs {self.kind.__name__}")
        o.__dict__[self.name] = v
    def __delete__(self, o): o.__dict__.pop(self.name, None)
class NonData:
    def __get__(self, o, t=None): return ("nondata", o is None)
class Described:
    n = Typed(int, 7); f = Typed(float, 1.5); nd = NonData()
class Slots:
    __slots__ = ("p", "q")
    def __init__(self): self.p = 1
class SlotsChild(Slots):
    __slots__ = ("r",)
class GetAttr:
    def __init__(self): self.real = 1
    def __getattr__(self, n):
        if n.startswith("no"): raise AttributeError(n)
        return "ga " + n
class GetAttribute:
    def __getattribute__(self, n):
        if n == "magic": return 99
        return object.__getattribute__(self, n)
class SetAttr:
    def __init__(self): object.__setattr__(self, "log", [])
    def __setattr__(self, n, v): self.log.append((n, v)); super().__setattr__(n, v)
    def __delattr__(self, n): self.log.append(("del", n)); super().__delattr__(n)
class InCell(Base):
    def __init__(self, a):
        super().__init__(a); self.f = lambda: self.a
    def who(self): return [self.f() for _ in (1,)], super().who(), (lambda: self)().a
    def who_else(self):
        f = lambda: self.a
        self = Base(9)
        return f(), super().who()
class OfAnother(Base):
    def who(self): return super(Left, self).who()
    def gone(self):
        del self
        return super().who()
class New:
    def __new__(cls, v):
        o = super().__new__(cls); o.n = v; return o
    def __init__(self, v): self.i = v
class NewOther:
    def __new__(cls): return 5
class Single:
    _it = None
    def __new__(cls):
        if cls._it is None: cls._it = object.__new__(cls)
        return cls._it
class Abs(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
    def g(self): return self.f() + 1
class Con(Abs):
    def f(self): return 3
class Init:
    subs = []
    def __init_subclass__(cls, **k): super().__init_subclass__(); Init.subs.append((cls.__name__, k))
class InitA(Init, z=1): pass
@dataclass
class DC:
    a: int
    b: float = 2.0
    c: list = field(default_factory=list)
    def total(self): return self.a + self.b
@dataclass(frozen=True, order=True)
class FZ:
    a: int
    b: str = "b"
@dataclass(slots=True)
class DS:
    a: int = 1
@dataclass
class DI(DC):
    d: int = 9
    e: dataclasses.InitVar[int] = 3
    def __post_init__(self, e): self.f = e + self.d
@dataclass(kw_only=True)
class KW:
    a: int
    b: int = 2
class Color(enum.Enum):
    RED = 1; GREEN = "g"; ALIAS = 1
    def nice(self): return self.name.lower()
    @classmethod
    def first(cls): return cls.RED
class Num(enum.IntEnum):
    A = 1; B = 2
class Fl(enum.Flag):
    X = enum.auto(); Y = enum.auto(); Z = X | Y
class St(str, enum.Enum):
    U = "u"; V = "v"
class TD(typing.TypedDict):
    a: int
class NT(typing.NamedTuple):
    a: int
    b: int = 4
    def s(self): return self.a + self.b
class Callable2:
    def __init__(self, k): self.k = k
    def __call__(self, v, *, m=1): return v * self.k * m
class Mod(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.w = torch.nn.Parameter(torch.arange(4.)); self.register_buffer("buf", torch.ones(4)); self.n = 0
        self.sub = torch.nn.ModuleList([torch.nn.Identity()]); self.d = torch.nn.ModuleDict({"i": torch.nn.ReLU()})
    def forward(self, x): self.n += 1; return x * self.w + self.buf
mod = Mod()
obj = Base(4)
T = typing.TypeVar("T")
class Gen(typing.Generic[T]):
    def __init__(self, v): self.v = v
def deco(f):
    @functools.wraps(f)
    def inner(*a, **k): return ("deco", f(*a, **k))
    return inner
def with_args(n):
    def d(f):
        def inner(*a): return n, f(*a)
        return inner
    return d
@deco
def decorated(v): "doc"; return v
@with_args(3)
@deco
def twice(v): return v
def defaults(a, b=2, *args, c, d=4, **kw): return a, b, args, c, d, kw
def posonly(a, b=1, /, c=2): return a, b, c
def mutable(v, acc=[]): acc.append(v); return list(acc)
def counter():
    n = 0
    def inc():
        nonlocal n
        n += 1
        return n
    return inc
inc = counter()
def fact(n): return 1 if n < 2 else n * fact(n - 1)
def annotated(a: int) -> str: return str(a)
"""

TABLE = r"""
OfClass.kind, OfClass().kind, OfClass.where, OfClass.static(2), OfClass().static(2) #2
Base().who(), Left().who(), Right(5).who(), Both().who(), Both(1, 2).b, Both.kind, Right.kind, Both().kind
obj.double, obj.a, obj.st(3), Base.st(1), obj.cl(2), Left.cl(3), Left.make(a=5).a, type(Both.make()).__name__
obj == Base(4), obj != Base(4), obj == 3, hash(obj) == hash(Base(4)), obj in [Base(4)], {obj: 1}[Base(4)]
isinstance(Both(), Left), issubclass(Both, Right), Both.__mro__[1].__name__, Both.__bases__, Both.__name__, Both.__qualname__, Both().__class__
Base.who(obj), Base.double.fget(obj), type(obj).__name__, Base.__dict__["kind"], vars(obj), obj.__dict__
obj.cached, Base(3).cached, Left().cached
len(WithMeta), WithMeta[3], 1 in WithMeta, 2 in WithMeta, list(WithMeta), WithMeta.prop, WithMeta.method(), WithMeta.tag, type(WithMeta)
WithMeta().made, WithMeta(3).v, isinstance(3, WithMeta), isinstance(WithMeta(), WithMeta), isinstance(4, WithMeta)
Described().n, Described().f, Described().nd, Described.n.default, Described.nd
Slots().p, SlotsChild().p, hasattr(Slots(), "q"), hasattr(Slots(), "__dict__")
inspect.signature(Base.st).parameters, vars(Empty), OrderedDict(a=x).keys(), OrderedDict(a=1, b=2).items()

    o = types.SimpleNamespace(); d = vars(o); d["a"] = x
    return o, o.__dict__ is d, d

    a, b, d = Plain(), Plain(), {"u": x}
    a.__dict__ = b.__dict__ = d; a.v = 1
    return a.__dict__ is b.__dict__, b.v, d
Slots().q
GetAttr().foo, GetAttr().real, hasattr(GetAttr(), "nope"), getattr(GetAttr(), "nothing", 3)
GetAttr().nope
GetAttribute().magic, GetAttribute().__class__.__name__, hasattr(GetAttribute(), "zz")
GetAttribute().zz
New(3).n, New(3).i, NewOther()
Single() is Single() #2
Con().g(), Con().f(), isinstance(Con(), Abs), Abs.__abstractmethods__
Abs()
Init.subs, InitA().subs
DC(1), DC(1, 3.0), DC(1).total(), DC(1) == DC(1), DC(1, c=[1]).c, DC(1) != DC(2), DC(a=x).a, repr(DC(1))
dataclasses.asdict(DC(1, 2.0, [3])), dataclasses.astuple(DC(1)), dataclasses.replace(DC(1), a=5), dataclasses.is_dataclass(DC), [f.name for f in dataclasses.fields(DC)]
FZ(1) < FZ(2), FZ(1), hash(FZ(1)) == hash(FZ(1)), {FZ(1): 2}[FZ(1)], sorted([FZ(2), FZ(1)]), max(FZ(1, "a"), FZ(1, "c"))
DS().a, DS(3), DI(1), DI(1, e=5).f, KW(a=1), KW(a=1, b=3).b
KW(1)
DC()
DC(1, 2, 3, 4)
FZ(1) < 3
Color.RED, Color.RED.value, Color.RED.name, Color("g"), Color["RED"], Color.ALIAS is Color.RED, Color.GREEN.nice(), Color.first()
list(Color), len(Color), Color.RED in Color, Color.RED == Color.RED, Color.RED != Color.GREEN, isinstance(Color.RED, Color), {Color.RED: 1}[Color.RED]
Color("zz")
Color["zz"]
Num.A + 1, Num.B > Num.A, Num(2), Num.A == 1, [0, 1, 2][Num.B], sorted([Num.B, Num.A]), x * Num.B
Fl.X | Fl.Y, Fl.X in Fl.Z, Fl.Z & Fl.X, bool(Fl.X & Fl.Y), Fl.Z.value
~Fl.X #2
St.U == "u", St("v"), St.U.value, "u" == St.U, St.U.upper(), {"u": 1}[St.U]
TD(a=1), NT(1), NT(1).s(), NT(1, 2).b, NT(1)._asdict(), NT._fields
Callable2(3)(2), Callable2(3)(2, m=2), callable(Callable2(1)), list(map(Callable2(2), [1, 2])), Callable2(2)(x)
Gen(3).v, isinstance(Gen(1), Gen)
Gen[int](4).v #2
decorated(1), decorated.__name__, decorated.__doc__, twice(2), decorated.__wrapped__(5)
defaults(1, c=3), defaults(1, 5, 6, 7, c=1, z=9), defaults(*[1, 2, 3], **{"c": 4, "e": 5}), posonly(1), posonly(1, 2, c=3)
defaults(1)
posonly(a=1)
posonly(1, 2, 3, 4)
defaults(1, a=2, c=3)
fact(6), annotated(3), annotated.__annotations__, annotated.__name__, defaults.__defaults__, defaults.__kwdefaults__, fact.__code__.co_varnames
(lambda: 3)(), (lambda a, b=2: a + b)(1), (lambda *a: a)(1, 2), (lambda **k: k)(z=1), (lambda a: lambda b: a + b)(1)(2)
mutable(1)
mod.training, [n for n, _ in mod.named_parameters()], [n for n, _ in mod.named_buffers()], mod.w.shape, len(mod.sub), mod.d["i"](x), list(mod.d)
mod(x) #2
mod.sub[0](x), [type(m).__name__ for m in mod.modules()], [n for n, _ in mod.named_modules()], isinstance(mod, Mod)
list(mod.state_dict()) #2
[n for n, _ in mod.named_children()], sum(p.numel() for p in mod.parameters()), mod.get_parameter("w") is mod.w, hasattr(mod, "zz")
mod.zz
types.SimpleNamespace(a=1).a, types.SimpleNamespace(b=x).b
types.SimpleNamespace(a=1) == types.SimpleNamespace(a=1) #2
obj.nope
Base.nope
Base(1, 2, 3)
Base(z=1)
super(Left, Both()).who(), super(Both, Both()).kind
InCell(3).who(), InCell(4).who_else()
OfAnother(3).who()
OfAnother(3).gone()
type("Made", (), {}).__name__ #2

    b = Base(); b.a = 5; b.double = 20; b.new = x; setattr(b, "other", 3); delattr(b, "other")
    return b, b.a, hasattr(b, "other")

    b = Base(); del b.double
    return hasattr(b, "a"), b.__dict__

    obj.a += 0; obj.seen = getattr(obj, "seen", 0) + 1
    return obj.seen #2

    d = Described(); d.n = 3; a = d.n; del d.n; d.nd = "own"
    return a, d.n, d.nd, d

    d = Described(); d.n = "x"

    s = Slots(); s.q = x; s.p = 2
    return s, s.q

    s = Slots(); s.zz = 1

    s = SetAttr(); s.a = 1; s.b = x; del s.a
    return s.log, hasattr(s, "a")

    Base.count += 1
    return Base.count #2

    b = Base(); b.who = lambda: "own"
    return b.who(), type(b).who(b)

    f = FZ(1)
    f.a = 2

    d = DC(1); d.c.append(x); d.a += 1
    return d

    c = counter()
    return c(), c(), c()

    return inc() #2

    def add(n):
        def f(v): return v + n
        return f
    return [add(i)(10) for i in range(3)], add(x)(1)

    def outer():
        v = 1
        def mid():
            def inner():
                nonlocal v
                v += 5
                return v
            return inner
        r = mid()()
        return r, v
    return outer()

    def rec(n, acc=()):
        return acc if n == 0 else rec(n - 1, acc + (n,))
    return rec(4)

    class Local:
        k = 3
        def __init__(self, v): self.v = v
        def get(self): return self.v * self.k
    return Local(x).get() #2

    class Local(Base):
        def who(self): return "local", super().who()
    return Local(3).who() #2

    m = obj.who
    return m(), m.__self__ is obj, m.__name__, m.__func__ is Base.who

    f = functools.partial(defaults, 1, c=3)
    return f(), f(5, d=6), f.args, f.keywords

    ns = types.SimpleNamespace(a=1); ns.b = x; ns.a += 1
    return ns

    b = Base(); b.__class__ = Left
    return b.who() #2

    def f(*, a, b=2): return a, b
    return f(a=1), f(**{"a": 3, "b": 4})

    def f(a, *rest, **kw): return a, rest, kw
    args = (1, 2); kw = {"z": 3}
    return f(*args, *[3], y=0, **kw)

    mod.n = 0
    y = mod(x) + mod(x)
    return y, mod.n

    mod.extra = x
    r = mod.extra.sum()
    del mod.extra
    return r, hasattr(mod, "extra")

    m = mod.eval(); a = m.training; mod.train()
    return a, mod.training

    with_it = {**vars(Base(3))}
    with_it["b"] = 2
    return Base(**{"a": with_it["a"]})
"""

theme = Theme(PRELUDE, TABLE)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("at", range(len(theme.cases)))
def test_as_in_eager(at: int) -> None:
    theme.check(at)
