"""The module in which random Python programs live: classes, globals, closures, generators, context managers.

It is text that is run once for eager and once for the compiled twin, so that both start alike and neither
sees the other.
"""

# ruff: noqa: E501, E701, E702  (programs, written short)

from __future__ import annotations

WORLD = """
import collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator, random, sys
import torch
import torch.nn.functional as F

LOG = []
G = [1.0, 2.0, 0.5]
D = {"k": 1.5, "m": 2, "z": -1}
N = 2
FLAG = True
W = torch.full((4,), 0.5)


class Failure(Exception):
    def __init__(self, code, t=None):
        super().__init__(f"failure {code}")
        self.code, self.t = code, t


class Box:
    kind, count = "box", 0

    def __init__(self, a, items=()):
        self.a, self.items, self.t = a, list(items), None

    def scale(self, t): return t * self.a
    @property
    def half(self): return self.a / 2
    @half.setter
    def half(self, value): self.a = value * 2
    @property
    def locked(self): return self.a
    @staticmethod
    def plus(t, n): return t + n
    @classmethod
    def make(cls, a):
        cls.count += 1
        return cls(a)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, v): self.items[i] = v
    def __iter__(self): return iter(self.items)
    def __call__(self, t, *rest, k=1): return t * self.a + len(rest) + k
    def __contains__(self, v): return v in self.items
    def __eq__(self, other): return isinstance(other, Box) and self.a == other.a
    def __bool__(self): return self.a > 0
    def __add__(self, other): return Box(self.a + getattr(other, "a", other), self.items)
    def __enter__(self):
        LOG.append(("enter", self.a))
        return self
    def __exit__(self, kind, value, trace):
        LOG.append(("exit", kind and kind.__name__))
        return isinstance(value, Failure) and self.a > 1


class Sub(Box):
    kind = "sub"

    def scale(self, t): return super().scale(t) + 1
    def __getattr__(self, name):
        if name.startswith("extra"):
            return len(name)
        raise AttributeError(name)


@dataclasses.dataclass
class Point:
    x: float
    y: int = 2


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "left right")


@contextlib.contextmanager
def recorded(name):
    LOG.append(name)
    try:
        yield len(LOG)
    finally:
        LOG.append("end " + name)


def helper(t, k=1, *, shift=0.0): return t * k + shift
def other(t, k=2, *, shift=1.0): return t - k + shift


def count(n):
    for i in range(n):
        got = yield i * 2
        if got is not None:
            LOG.append(got)


def chained(n):
    last = yield from count(n)
    yield -1


def make_adder(n):
    calls = 0
    def add(t):
        nonlocal calls
        calls += 1
        return t + n + calls
    return add


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        LOG.append(fn.__name__)
        return fn(*args, **kwargs)
    return wrapper


@logged
def wrapped(t): return t - 1


def risky(t, n):
    if n % 3 == 2:
        raise Failure(n, t)
    return t * 2


def failing(n):
    try:
        for i in range(n):
            yield i
            if i == 2:
                raise Failure(i)
    finally:
        LOG.append("closed")


def raising(n, t):
    try:
        return risky(t, n)
    except Failure as error:
        if n % 2:
            raise KeyError(n) from error
        raise
    finally:
        LOG.append("raised?")


box, sub, point, adder = Box(1.5, [1, 2, 3]), Sub(0.5, [2]), Point(0.5), make_adder(3)
"""

# Globals whose contents are compared after each call.
STATE = (
    "LOG",
    "G",
    "D",
    "N",
    "FLAG",
    "W",
    "box",
    "sub",
    "point",
    "adder",
    "Box.count",
    "Box.kind",
    "helper.__defaults__",
)

TENSORS = """
{t} + {t}|{t} * {n}|torch.relu({t})|{t}.sin()|{t} * G[0]|{t} + D['k']|box.scale({t})|sub.scale({t})|box({t}, {n}, k=2)|helper({t})|-{t}
helper({t}, {n}, shift=0.5)|wrapped({t})|adder({t})|torch.where({t} > 0, {t}, 0.5)|sum([{t}, {t}])|{t} if {c} else {t}|{t}.clone()|{t} + W
(lambda v: v + {n})({t})|functools.reduce(operator.add, [{t}, {t}])|functools.partial(helper, k={n})({t})|torch.stack([{t}, {t}]).sum(0)
{t}[:]|{t}.detach()|{t}.view(-1).view({t}.shape)|max([{t}, {t}], key=lambda v: {n})|next(iter([{t}]))|[*({t}, {t})][-1]|{t}.mul(box.half)
{l}[-1]|{l}[{n} % len({l})]|Pair({t}, {t}).right|{t}.T.T|F.dropout({t}, 0.5)|torch.rand_like({t})|{t} * torch.rand(4)|{t} * math.sqrt({n} + 1)
getattr(torch, 'tanh')({t})|{t}.to(torch.float64).float()|{t}.reshape(-1).reshape({t}.shape)|copy.copy({t})|risky({t}, {n})|({t} @ {t}.T) @ {t}
Box.plus({t}, {n})|Box.make({n}).scale({t})|{t}.softmax(-1)|{t}.sum(0, keepdim=True) + {t}|{t}.unsqueeze(0)[0]|{t}.contiguous()|{t} ** 2
{t} / ({n} + 1.5)|torch.cat([{t}, {t}])[:{t}.shape[0]]|{t}.expand({t}.shape)|(lambda v=({t}): v * 2)()|{t} * point.x|{t}.cumsum(0)|torch.zeros_like({t})
"""
NUMBERS = """
len({l})|{n} + 1|{n} * 2 % 5|{t}.shape[-1]|{t}.dim()|len(box)|N|int({c})|D.get('m', 3)|max({n}, {n})|len(LOG) % 4|box[0]|Box.count|sub.extra_one
list(chained({n} % 4))[-1]|sum(v for v in count({n} % 4))|Color.RED.value|point.y|int(G[0])|isinstance(sub, Box) + {n}|[i for i in range({n} % 4 + 1)][-1]
{n} if {c} else {n}|len(dict.fromkeys(range({n} % 3)))|sum(map(lambda v: v * 2, range({n} % 3)))|next((i for i in box if i > 1), 7)|-{n}|{n} // 2
len(str({n}))|any(i > 2 for i in box) + 1|sorted([{n}, 1, 3])[0]|{n} ** 2 % 7|{t}.size(0)|{t}.numel() % 5|functools.reduce(operator.mul, [1, 2, {n}])
(lambda *a, **k: len(a) + len(k))({n}, 1, z=2)|len(set([{n}, 1, 2]))|int('3') + {n}|divmod({n}, 3)[1]|abs({n}) % 6|min(box)|len(list(itertools.chain(box, sub)))
"""
CONDITIONS = """
{n} > 1|FLAG|'k' in D|{n} in box|isinstance(sub, Sub)|{t}.requires_grad|{t}.dim() == 2|G[0] > 0.9|0 < {n} < 4|not {c}|{t} is {t}|hasattr(box, 'extra')
torch.is_grad_enabled()|len({l}) > 1|box == sub|box|{t}.sum() > 0|bool((adder(torch.zeros(1)) > 5).any())|D['z'] < 0|Color.RED is Color(1)|N == 2|{n} % 2
{t}.is_contiguous()|{t}.dtype == torch.float32|callable(helper)|type(box) is Box|box.t is None|LOG|{c} and {c}|{c} or {n} > 2|{t}.shape == {t}.shape
"""
LISTS = """
[{t}, {t}]|[{t} * i for i in range({n} % 3 + 1)]|list(({t}, {t}))|{l} + [{t}]|{l}[::-1]|[v + 1 for v in {l}]|[v for v in {l} if {c}] or [{t}]
[*{l}, {t}]|sorted({l}, key=lambda v: {n})|{l}[:2]|list(map(torch.relu, {l}))|[a + b for a, b in zip({l}, {l})]|list({t}.unbind(0))|[{t}] * 2
"""
ACTIONS = """
LOG.append({n})|LOG.append({t}.shape)|G.append({n} * 0.5)|G[0] += 0.25|D['k'] = {n} + 0.5|D['n', {n}] = {n}|box.a = {n} * 0.5|box.t = {t}|sub.items.append({n})
{l}.append({t})|{l}.reverse()|{l}[0] = {t}|{l}.insert(0, {t})|del D['m']|D.pop('z', None)|D.setdefault('q', {n})|D.update(m={n})|box.half = {n}|box[0] = {n}
point.y += 1|point.x = {n} / 2|Box.count += 1|setattr(box, 'extra', {n})|delattr(box, 'extra')|{t}.add_(1)|{t}[0] = {n}|{t}.mul_({t}.detach())|print({n})
LOG.extend(str(i) for i in range({n} % 3))|assert {c}, 'asserted'|G.sort()|D.clear()|LOG.pop()|sub.t = {t} * 2|box.items[:] = [{n}, 1]|LOG.append('%03d' % {n})
{t}.data.mul_(2)|{t}.zero_()|{t}[:, 1:] = {t}[:, :-1].clone()|LOG.append(len(D))|W.add_(0.5)|LOG.append(float({t}.sum() * 0 + {n}))|{t}.requires_grad_()
"""
# What raises, always or sometimes.
RISKS = """
risky({t}, {n})|D['missing']|LOG.append({n})|box.locked = {n}|box.nothing|point.nothing|{t}.nothing|LOG.append({t} @ torch.ones(7, 7))|{t}.view(5, 7)
torch.cat([{t}, torch.ones(9, 1, 1)])|{t}[99]|{n} // ({n} % 2)|math.sqrt(-{n})|int('x{n}')|undefined|{n} + 'a'|len({n})|{n}[0]|helper()|helper({t}, z=1)
Box.make()|one, two = [{n}] * ({n} % 4)|G[{n}]|{l}[{n}]|Box.count()|assert {c}, {n}|Color({n})|Sub.plus({t})|next(iter(range({n} % 2)))|del D[{n}]
f(1, 2, 3, 4)|{t}.add_(torch.ones(9))|failing({n})|raising({n}, {t})|list(failing({n}))|[risky(v, {n}) for v in {l}]|box.items.remove({n})|del box.locked
{t}.sin_().view(7)|W.add_(1).view(7)|LOG.append(late)|torch.stack([{t}, {t}[0]])|F.linear({t}, W[:2])|{t}.to('nowhere')|torch.ones({n}, -1)|raise Failure({n})
"""
# What an `except` block does with its error.
HANDLERS = """
LOG.append((type(e).__name__, str(e)))|LOG.append(e)|LOG.append(e.args)|LOG.append(type(e.__context__).__name__)|LOG.append(e.__cause__ is None)
raise|raise e|raise ValueError('again') from e|raise ValueError('again')|raise KeyError('k') from None|LOG.append(sys.exc_info()[1] is e)|e.extra = {n}
LOG.append(sys.exception() is e)|LOG.append(repr(e))|e.add_note('noted')|LOG.append(e.__traceback__ is not None)|box.error = e|raise Failure({n}) from e
LOG.append(e.__suppress_context__)|e.args = ({n},)|risky({t}, {n})|LOG.append(e.with_traceback(None) is e)|LOG.append(isinstance(e, LookupError))
"""
CHANGES = """
globals().update(N={n})|globals().update(FLAG=not FLAG)|G.__setitem__(0, {n} * 0.5)|G.append(3.0)|D.update(k={n})|D.update(new={n})|D.pop('m', None)
setattr(box, 'a', {n} * 0.5)|setattr(Box, 'kind', 'changed')|setattr(Box, 'scale', lambda self, t: t - self.a)|setattr(box, '__class__', Sub)|box.items.append({n})
setattr(helper, '__defaults__', ({n},))|globals().update(helper=other)|setattr(helper, '__code__', other.__code__)|globals().update(adder=make_adder({n}))
setattr(box, 'scale', lambda t: t * 3)|setattr(point, 'y', {n})|W.mul_(2)|globals().update(W=torch.ones(4))|sub.__dict__.update(a={n})|setattr(Sub, '__len__', lambda self: 5)
LOG.clear()|setattr(box, 't', torch.ones(4))|globals().update(box=Sub({n}, [1]))|D.__setitem__('z', 5)|setattr(Box, 'half', property(lambda self: 4.0))
torch.set_grad_enabled(False)|torch.set_grad_enabled(True)|globals().update(G=[0.5, 0.25])|globals().update(wrapped=logged(other))|box.items.clear()
W.requires_grad_()|globals().update(W=torch.full((4,), 2.0, dtype=torch.float64))|setattr(Box, '__call__', lambda self, t, *rest, k=0: t + k)|G.reverse()
"""
