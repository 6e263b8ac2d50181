"""The module in which random Python programs live: classes, globals, closures, generators, context managers.

It is text that is run once for eager and once for the compiled twin, so that both start alike and neither
sees the other.
"""

# ruff: noqa: E501, E701, E702  (programs, written short)

from __future__ import annotations

WORLD = """
import collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator, random, sys, typing, weakref
import numpy as np
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


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


Pair = collections.namedtuple("Pair", "left right")


class Row(typing.NamedTuple):
    t: object
    n: int = 2
    def double(self): return self.t * self.n


@dataclasses.dataclass(slots=True, order=True)
class Slot:
    a: float
    t: object = dataclasses.field(default=None, compare=False)


class Key:
    def __init__(self, v): self.v = v
    def __hash__(self): return hash(self.v)  # the number of calls is not compared
    def __eq__(self, other): return isinstance(other, Key) and self.v == other.v
    def __repr__(self): return f"Key({self.v})"
    def __lt__(self, other): return self.v < other.v
    def __bool__(self):
        LOG.append("bool")
        return self.v > 1


class Meter:
    reads = 0
    @property
    def value(self):
        self.reads += 1
        return self.reads
    @value.setter
    def value(self, v): LOG.append(("set", v))
    @functools.cached_property
    def kept(self):
        LOG.append("kept")
        return self.reads + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0
    def forward(self, t, k=1):
        self.calls += 1
        self.seen += 1
        if self.training:
            self.mean = self.mean * 0.5 + t.detach().reshape(-1)[:4] * k
        return t * self.w + self.mean


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


# Generators that read the container that they fill.
def growing(items, n):
    for i in range(n):
        yield (items[-1] if items else 0) + i
def counting(held, n):
    for i in range(n):
        yield len(held)
def pairs(held, n):
    for i in range(n):
        yield len(held), i
def letters(log, n):
    for i in range(n):
        log.append(i)
        yield str(len(log))
def doubling(items, n):
    items.extend(items[-1] * 2 for i in range(n))
    return items
def adding(items, n):
    items += (items[-1] + len(items) for i in range(n))
    return items
def taking(it, t):
    for v in it:
        if v > 1:
            return t * v
    else:
        return t


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


def checked(t, n):
    if (t > n).any():
        raise Failure(n, t)
    assert not t.isnan().all(), n
    torch._assert((t < 90).all(), "large")
    return t + 1


def arrayed(t, n):
    a = t.detach().numpy()
    b = np.abs(a) * n + a.max()
    return torch.from_numpy(b if n % 2 else np.stack([b, a])[0])


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
slot, meter, net = Slot(1.5), Meter(), Net()
S, Q, IT = {1, 2}, collections.deque([1, 2], maxlen=5), iter(range(1000))
REF, KEYS, WEAK = weakref.ref(net), {Key(1): 1, Key(2): 2}, weakref.WeakKeyDictionary({net: 3})
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
    "(slot.a, slot.t, meter, S, list(Q), len(KEYS))",
    "(net.calls, net.training, dict(net._buffers), dict(net._parameters))",
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
# What looks at memory, containers, iterators and modules in odder ways: a part of the programs is made of it.
MORE_TENSORS = """
net({t})|net({t}, k={n})|{t} * net.w|{t}.data|{t}.view_as({t})|{t}[1:]|{t}[0]|{t}.t()|{t}.view(-1)[:4]|{t}.narrow(0, 0, 1)|Row({t}, {n}).double()|{t} * meter.value
taking(IT, {t})|taking(iter(box), {t})|taking(count({n}), {t})|{t} * next(IT)|slot.t if slot.t is not None else {t}|{t} * random.random()|torch.randint(0, 3, (4,)) + {t}
doubling({l}, {n} % 3)[-1]|adding({l}, {n} % 3)[-1]|functools.reduce(lambda a, b: a * 2 + b, {l})|Row(*{l}[:1]).t|{t} + net.seen|net.mean * {t}|{t}.add_(1)|{t}.relu_()
sum({l})|sum(({l})[1:], ({l})[0])|max({l}, key=lambda v: LOG.append('key') or {n})|{t} * Level.HIGH|{t}.detach().mul_(2)|{t}.requires_grad_()
checked({t}, {n})|checked({t}.detach(), 9)|arrayed({t}, {n})|{t} * float(np.abs({t}.detach().numpy()).max())|torch.tensor(np.floor({t}.detach().numpy()))|{t}.to(net.w.dtype)
"""
MORE_NUMBERS = """
next(IT)|len(S)|Q[0]|meter.value|meter.kept|slot.a|len(KEYS)|KEYS[Key({n})]|KEYS.get(Key({n}), 5)|Level(1) + {n}|sum(growing([{n}], 3))|len(list(zip(IT, box)))|net.calls
[*map(lambda v: next(IT), box)][-1]|sum(itertools.takewhile(lambda v: v < {n}, count(4)))|len(sorted([Key(2), Key({n}), Key(1)]))|[i // (i - {n}) for i in range(3)][-1]
int(torch.randint(0, 5, (1,)))|random.randrange(5)|len("".join(letters(LOG, {n} % 3)))|dict(pairs(D, {n} % 3)).get(1, 2)|max(growing(G, 2))|{n} if Key({n}) else 3|Q.index(1)
sum(v for v in growing(G, 2) if v)|len({Key({n}), Key(1)})|next(i for i in failing({n}))|(lambda: (yield {n}))().send(None)|len([*failing({n} % 3)])|sum(x * y for x, y in zip(box, count(2)))
"""
MORE_CONDITIONS = """
Key({n})|Key({n}) == Key(1)|Key({n}) in KEYS|{n} in S|Slot({n}) < slot|net.training|Level.LOW < {n}|Key(1) in [Key({n}), Key(1)]|net.w.requires_grad
any(Key(i) for i in range({n}))|net in WEAK|REF() is not None|{n} in count(4)|meter.value > 2|{n} in IT|{t}.is_leaf|{t}._version > 0|len({v.data_ptr() for v in ({t}, {t})}) < 2|x is y|isinstance(slot, Slot)|Q
"""
MORE_ACTIONS = """
G.extend(growing(G, {n} % 3))|box.items.extend(growing(box.items, {n} % 3))|D.update(pairs(D, {n} % 3))|S.update(counting(S, {n} % 3))|Q.extend(counting(Q, {n} % 3))|Q.extendleft(growing(Q, 2))
box.items.__init__(growing(box.items, {n} % 3))|box.items.__iadd__(counting(box.items, 2))|box.items.sort(key=lambda v: LOG.append(v) or -v)|LOG.append("-".join(letters(LOG, {n} % 3)))
LOG.append(next(IT))|LOG.append(list(itertools.islice(IT, {n} % 3)))|slot.a = {n}|slot.t = {t}|slot.zzz = {n}|meter.value = {n}|S.add({n})|S.discard({n})|Q.append({n})|Q.rotate({n})|Q.popleft()
net.seen.add_({n})|net.mean = {t}.detach()|net.w.data.mul_(0.5)|net.gain = {n}|net.eval()|net.train()|net.register_buffer('late', {t})|net.seen = net.seen + 1|net.w.requires_grad_({c})|net.zero_grad()
KEYS[Key({n})] = {n}|KEYS.pop(Key({n}), None)|{t}.data.add_(1)|{t}.detach().zero_()|{t}.view(-1)[0] = {n}|{t}[0].mul_(2)|y.add_(1)|x.mul_(2)|x[0] = {n}|torch.manual_seed({n})|random.seed({n})
LOG.append(random.random())|LOG.append([v for v in failing({n})])|LOG.append(tuple(i * {n} for i in IT if i < 3))|{t}.t_()|{t}.set_(({t}).clone())|x.data = {t}.detach()
LOG.append({k: v for k, v in pairs(D, {n} % 3)})|{l}.extend({l})|del {l}[:1]|{l}.append({l}[-1])|{l}.clear()|{t}.register_hook(lambda g: LOG.append('hook'))|net.to(torch.float32)|np.add({t}.detach().numpy(), 1, out={t}.detach().numpy())|LOG.append(torch.initial_seed())|LOG.append(int(torch.get_rng_state().sum()))
"""
MORE_CHANGES = """
net.eval()|net.train()|net.w.data.fill_({n})|setattr(net, 'w', torch.nn.Parameter(torch.ones(4)))|net.register_forward_hook(lambda m, a, o: o + 1)|net.seen.fill_({n})|setattr(net, 'mean', torch.ones(4))
net.load_state_dict({'w': torch.ones(4), 'seen': torch.zeros(()), 'mean': torch.ones(4)}, strict=False)|adder.__closure__[0].cell_contents.__class__|adder.__closure__[1].__setattr__('cell_contents', {n})
S.add({n})|Q.clear()|globals().update(IT=iter([{n}, 1, 2]))|next(IT)|WEAK.clear()|slot.__setattr__('a', {n})|setattr(Key, '__bool__', lambda self: False)|setattr(Key, '__eq__', lambda self, other: True)
setattr(Meter, 'value', 3)|KEYS.clear()|globals().update(growing=counting)|setattr(Row, 'double', lambda self: self.t)|net.w.requires_grad_(False)|setattr(net, 'forward', lambda t, k=1: t * k)
torch.manual_seed({n})|setattr(Level, 'HIGH', 4)|net.double()|net.register_parameter('w', torch.nn.Parameter(torch.zeros(4)))|globals().update(net=Net())|net._buffers.pop('late', None)|box.items.extend([4, 5])
"""
# What raises, always or sometimes. Results are read: an op whose result is unread need not run (docs/trust.md).
RISKS = """
risky({t}, {n})|D['missing']|LOG.append({n})|box.locked = {n}|box.nothing|point.nothing|{t}.nothing|LOG.append({t} @ torch.ones(7, 7))|{t}.view(5, 7)
torch.cat([{t}, torch.ones(9, 1, 1)])|{t}[99]|{n} // ({n} % 2)|math.sqrt(-{n})|int('x{n}')|undefined|{n} + 'a'|len({n})|{n}[0]|helper()|helper({t}, z=1)
Box.make()|one, two = [{n}] * ({n} % 4)|G[{n}]|{l}[{n}]|Box.count()|assert {c}, {n}|Color({n})|Sub.plus({t})|next(iter(range({n} % 2)))|del D[{n}]
f(1, 2, 3, 4)|{t}.add_(torch.ones(9))|failing({n})|raising({n}, {t})|list(failing({n}))|[risky(v, {n}) for v in {l}]|box.items.remove({n})|del box.locked
{t}.sin_().view(7)|W.add_(1).view(7)|LOG.append(late)|torch.stack([{t}, {t}[0]])|F.linear({t}, W[:2])|{t}.to('nowhere')|torch.ones({n}, -1)|raise Failure({n})
W.add_({t}[torch.tensor({n})].sum())|{t}.add_(1), W.add_({t}[torch.tensor([0, {n}])].sum())|W.add_({t}.index_select(0, torch.tensor([{n}])).sum())
x.add_(1), W.add_(x[torch.tensor({n})].sum())|W.mul_(2), W.add_(F.embedding(torch.tensor([{n}]), W[:, None]).sum())|W.add_(torch.tensor({n}) // torch.tensor({n} % 2))
"""
# Uses of the error in an `except` block.
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
