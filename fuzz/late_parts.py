"""The state that programs of `late` read, and the places that read it."""

from __future__ import annotations

# The module in which a program runs: all that its reads and their changes name.
HEAD = """
import collections, contextvars, functools, itertools, operator, os, random, sys, types, warnings, weakref
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

K, TABLE, ITEMS, FLAG, LOG, MODE = 2.0, {'k': 2.0}, [2.0], False, [], 'a'
T, ARRAY, ORDER = torch.tensor(2.0, dtype=torch.float64), np.array([2.0]), collections.OrderedDict(k=2.0)
VAR, SPACE = contextvars.ContextVar('VAR', default=2.0), types.SimpleNamespace(k=2.0)
VAR.set(2.0)
os.environ['DM_FUZZ_K'] = '2.0'


class Base:
    inherited = 2.0


class Holder(Base):
    k = 2.0
    calls = 0

    def get(self):
        return self.k

    @property
    def shown(self):
        return self.k + 1

    @classmethod
    def of_class(cls):
        return cls.k

    @staticmethod
    def fixed():
        return 2.0


class Other(Holder):
    k = 3.0


class Slotted:
    __slots__ = ('k',)

    def __init__(self):
        self.k = 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 2.0
        self.w = nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64))
        self.register_buffer('held', torch.tensor(2.0, dtype=torch.float64))
        self.layers = nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 3).double()])


torch.manual_seed(5)
holder, HELD, slotted, net = Holder(), [Holder()], Slotted(), Net()
held_weakly = weakref.ref(holder)


def helper():
    return K


def first():
    return 2.0


def second():
    return 5.0


def code():
    return 2.0


def with_default(k=2.0, *, more=1.0):
    return k * more


def make():
    n = 2.0

    def get():
        return n

    def put(v):
        nonlocal n
        n = v

    return get, put


get, put = make()
bound, of_class, item = holder.get, Holder.of_class, TABLE.get
partly = functools.partial(lambda o: o.k, holder)
module = sys.modules['late_module'] = types.ModuleType('late_module')
module.k = 2.0


def imported():
    import late_module
    return late_module.k


part = functools.partial(with_default, more=2.0)


@functools.lru_cache
def cached():
    return K


GLOBALS = globals()
"""

# Expressions that are read, and the statement that sets each to `v`.
READS = {
    "K": "K = v",
    "TABLE['k']": "TABLE['k'] = v",
    "TABLE.get('new', 1.0)": "TABLE['new'] = v",
    "len(TABLE)": "TABLE[str(v)] = v",
    "sum(TABLE.values())": "TABLE['k'] = v",
    "ITEMS[0]": "ITEMS[0] = v",
    "ITEMS[-1]": "ITEMS.append(v)",
    "len(ITEMS)": "ITEMS[:] = [v] * int(v)",
    "sum(ITEMS)": "ITEMS.insert(0, v)",
    "max([i + 1 for i in ITEMS])": "ITEMS = [v]",
    "next(iter(ORDER.values()))": "ORDER['k'] = v",
    "Holder.k": "Holder.k = v",
    "holder.k": "holder.k = v",
    "holder.get()": "holder.get = lambda: v",
    "Holder().get()": "Holder.get = lambda self: v",
    "holder.shown": "holder.__dict__['k'] = v",
    "Holder.of_class()": "setattr(Holder, 'k', v)",
    "holder.fixed()": "Holder.fixed = staticmethod(lambda: v)",
    "holder.inherited": "Base.inherited = v",
    "getattr(holder, 'late', 1.0)": "holder.late = v",
    "(1.0 if isinstance(holder, Other) else 2.0)": "holder.__class__ = Other if v > 3 else Holder",
    "held_weakly().k": "holder.k = v",
    "slotted.k": "slotted.k = v",
    "SPACE.k": "SPACE.k = v",
    "helper()": "helper = lambda: v",
    "code()": "code.__code__ = (second if v > 3 else first).__code__",
    "with_default()": "with_default.__defaults__ = (v,)",
    "with_default(1.0)": "with_default.__kwdefaults__['more'] = v",
    "part()": "part = functools.partial(with_default, v)",
    "get()": "put(v)",
    "HELD[0].k": "HELD[0] = Holder(); HELD[0].k = v",
    "(3.0 if FLAG else 2.0)": "FLAG = v > 4",
    "{'a': 2.0, 'b': 3.0}[MODE]": "MODE = 'b' if v > 4 else 'a'",
    "VAR.get()": "VAR.set(v)",
    "float(os.environ['DM_FUZZ_K'])": "os.environ['DM_FUZZ_K'] = str(v)",
    "T": "T = torch.tensor(v, dtype=torch.float64)",
    "T.clone()": "T.fill_(v)",
    "T.item()": "T.fill_(v)",
    "ARRAY[0].item()": "ARRAY[0] = v",
    "net.k": "net.k = v",
    "net.held": "net.held = torch.tensor(v, dtype=torch.float64)",
    "net.held.clone()": "net.held.fill_(v)",
    "net.w.detach()": "torch.no_grad()(net.w.fill_)(v)",
    "net.layers[0].bias.detach().sum()": "net.layers.insert(0, nn.Linear(3, 3).double())",
    "(2.0 if net.training else 3.0)": "net.train(v > 4)",
    "(2.0 if net.w.requires_grad else 3.0)": "net.w.requires_grad_(v > 4)",
    "cached()": "K = v; cached.cache_clear()",
    "GLOBALS['K']": "GLOBALS['K'] = v",
    "globals()['K']": "K = v",
    "eval('K')": "K = v",
    "bound()": "holder.k = v",
    "of_class()": "Holder.k = v",
    "item('k')": "TABLE['k'] = v",
    "partly()": "holder.k = v",
    "imported()": "module.k = v",
    "operator.attrgetter('k')(holder)": "holder.k = v",
    "(2.0 if torch.is_grad_enabled() else 3.0)": "pass",
    "(2.0 if torch.is_autocast_enabled('cpu') else 3.0)": "pass",
    "1.5": "pass",
    "random.random()": "random.seed(v)",
    "torch.rand((), dtype=torch.float64)": "torch.manual_seed(int(v))",
}
GLOBALS = "K, TABLE, ITEMS, FLAG, MODE, T, helper, part, holder"
UNARY = (
    "x.sin()", "x * 1.5", "x.tanh() + x", "x.exp()", "(x * x).sum(0, keepdim=True) + x", "x.clone()", "x[:] * 1",
    "F.dropout(x, 0.5)", "x + torch.rand_like(x)", "F.linear(x, net.layers[-1].weight)", "x.softmax(-1)", "x * net.w",
)  # fmt: skip
EFFECTS = (
    "pass", "pass", "pass", "LOG.append(1)", "holder.calls += 1", "LOG.append(len(ITEMS))", "SPACE.k = SPACE.k + 1",
    "warnings.warn('seen %d' % len(LOG))", "random.random()", "torch.rand(2)", "net.held.add_(1)", "TABLE['n'] = len(LOG)",
)  # fmt: skip

# name: (definitions, lines of `call`); {n}: the place's number, {read}: an expression, {effect}: a statement
PLACES: dict[str, tuple[str, str]] = {
    "forward": ("", "{effect}\nx = x * {read}"),
    "backward": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 1\n"
        "    @staticmethod\n    def backward(ctx, g):\n        {effect}\n        return g * {read}\n",
        "x = Part{n}.apply(x)",
    ),
    "forward of a function": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        {effect}\n        ctx.by = {read}\n"
        "        return x * ctx.by\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g * ctx.by\n",
        "x = Part{n}.apply(x)",
    ),
    "returned argument": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x, held):\n        ctx.by = {read}\n        return x.view_as(x)\n"
        "    @staticmethod\n    def backward(ctx, g):\n        {effect}\n        return g * ctx.by, None\n",
        "x = Part{n}.apply(x, [x * 2]) + Part{n}.apply(x * 2, ())",
    ),
    "context": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(x, held):\n        return x * 1\n"
        "    @staticmethod\n    def setup_context(ctx, inputs, output):\n"
        "        ctx.save_for_backward(inputs[0]); ctx.held = inputs[1]\n"
        "    @staticmethod\n    def backward(ctx, g):\n        {effect}\n"
        "        return g * ctx.held.k * {read} + ctx.saved_tensors[0], None\n",
        "x = Part{n}.apply(x, holder)",
    ),
    "double backward": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n        return x * x\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (x,) = ctx.saved_tensors\n        {effect}\n"
        "        return g * x * {read}\n",
        "x = Part{n}.apply(x)",
    ),
    "hook": ("", "x = x * 2; x.register_hook(lambda g: g * {read})"),
    "hook of a variable": ("", "x = x * 2; by = {read}; x.register_hook(lambda g: g * by); by = {read} + 1"),
    "hook of a function": (
        "def hook{n}(g):\n    {effect}\n    return g * {read}\n",
        "x = x * 2; x.register_hook(hook{n})",
    ),
    "hook of an object": (
        "class Hook{n}:\n    calls = 0\n    def __call__(self, g):\n        self.calls += 1\n"
        "        return g * self.calls * {read}\nhook{n} = Hook{n}()\n",
        "x = x * 2; x.register_hook(hook{n})",
    ),
    "hook of a method": (
        "def _on{n}(self, g):\n    self.calls += 1\n    return g * self.calls + {read}\nHolder.on{n} = _on{n}\n",
        "x = x * 2; x.register_hook(holder.on{n})",
    ),
    "hook that is removed": (
        "",
        "x = x * 2; handle = x.register_hook(lambda g: g * 3)\nx = x * {read}\nhandle.remove()",
    ),
    "hook of a leaf": (
        "def hook{n}(g):\n    {effect}\n    return g * {read}\n",
        "if leaf.requires_grad: leaf.register_hook(hook{n})",
    ),
    "hook after accumulation": (
        "def hook{n}(t):\n    {effect}\n    t.grad.mul_({read})\n",
        "if leaf.requires_grad: leaf.register_post_accumulate_grad_hook(hook{n})",
    ),
    "hook of a node": (
        "",
        "x = x * 2\nif x.grad_fn is not None: "
        "x.grad_fn.register_hook(lambda gi, go: (gi[0] * {read},) if len(gi) == 1 and gi[0] is not None else None)",
    ),
    "hooks of a module": (
        "class Inner{n}(nn.Module):\n    def forward(self, x):\n        {effect}\n        return x * {read}\n"
        "inner{n} = Inner{n}()\n"
        "inner{n}.register_forward_hook(lambda m, a, out: out * {read})\n"
        "inner{n}.register_forward_pre_hook(lambda m, a: (a[0] + {read},))\n",
        "x = inner{n}(x)",
    ),
    "backward hook of a module": (
        "inner{n} = nn.Tanh()\n"
        "inner{n}.register_full_backward_hook(lambda m, gi, go: tuple(g * {read} if g is not None else None for g in gi))\n",
        "x = inner{n}(x)",
    ),
    "checkpoint": (
        "def block{n}(x):\n    return x.sin() * {read}\n",
        "x = checkpoint(block{n}, x, use_reentrant=False)",
    ),
    "checkpoint with effects": (
        "def block{n}(x):\n    {effect}\n    return F.dropout(x.sin(), 0.5) * {read}\n",
        "x = checkpoint(block{n}, x, use_reentrant=False)",
    ),
    "nested checkpoint": (
        "def inner{n}(x):\n    return x.sin() * {read}\n"
        "def block{n}(x):\n    return checkpoint(inner{n}, x * {read}, use_reentrant=False).cos()\n",
        "x = checkpoint(block{n}, x, use_reentrant=False)",
    ),
    "reentrant checkpoint": (
        "def block{n}(x):\n    return x.sin() * {read}\n",
        "x = checkpoint(block{n}, x, use_reentrant=True)",
    ),
    "checkpoint of a function": (
        "class Part{n}(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g):\n        {effect}\n        return g * {read}\n"
        "def block{n}(x):\n    return Part{n}.apply(x.sin())\n",
        "x = checkpoint(block{n}, x, use_reentrant=False)",
    ),
    "saved tensors": (
        "",
        "with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):\n    x = x * x * {read}",
    ),
    "composite operator": (
        "@op('scale{n}', 'CompositeImplicitAutograd')\ndef scale{n}(x):\n    {effect}\n    return x * {read}\n",
        "x = scale{n}(x)",
    ),
    "custom operator": (
        "@custom('twice{n}')\ndef twice{n}(x: torch.Tensor) -> torch.Tensor:\n    {effect}\n    return x * {read}\n"
        "twice{n}.register_fake(lambda x: torch.empty_like(x))\n"
        "def formula{n}(ctx, g):\n    return g * {read}\ntwice{n}.register_autograd(formula{n})\n",
        "x = twice{n}(x)",
    ),
    "functional gradient": ("", "x = x + torch.func.grad(lambda t: (t.sin() * {read}).sum())(x)"),
    "vectorised": ("", "x = torch.vmap(lambda t: t * {read})(x)"),
    "gradient inside": (
        "",
        "y = x.detach().requires_grad_()\n{effect}\nx = x + torch.autograd.grad((y.sin() * {read}).sum(), y)[0]",
    ),
    "no gradients": ("", "with torch.no_grad():\n    {effect}\n    y = x * {read}\nx = x + y"),
    "autocast": (
        "",
        "with torch.autocast('cpu', torch.bfloat16):\n    {effect}\n"
        "    y = F.linear(x.float(), net.layers[0].weight.float()) * {read}\nwide = y.dtype is torch.float32\n"
        "x = x + (y.double() * 0 + (2.0 if wide else 1.0))",
    ),
    "break": ("", "{effect}\nprint(end='')\nx = x * {read}"),
    "branch": ("", "if x.sum() > {read} + 0.123:\n    x = x + 1\nelse:\n    {effect}"),
    "loop": ("", "for step in range(3):\n    x = x * {read}\n    {effect}"),
    "generator": (
        "def walk{n}(x):\n    for _ in range(2):\n        {effect}\n        yield x * {read}\n",
        "x = sum(walk{n}(x))",
    ),
    "region that raises": (
        "def fails{n}(x):\n    with torch.no_grad():\n        y = x.detach() * {read}\n"
        "        return y.index_select(0, torch.tensor([99]))\n",
        "try:\n    x = x + fails{n}(x)\nexcept IndexError:\n    {effect}",
    ),
    "region": (
        "",
        "with {region}:\n    y = x.detach() * {read}\n    {effect}\n"
        "    y = y.index_select(0, torch.tensor([{row}]))\nx = x + y.detach().clone().sum()",
    ),
    "finally": ("", "try:\n    x = x * {read}\nfinally:\n    {effect}"),
    "numpy": ("", "x = x + torch.from_numpy(np.sin(x.detach().numpy())) * {read}"),
    "detached in place": ("", "y = x.detach().clone(); y.mul_({read}); x = x + y"),
    "compiled again": (
        "@again\ndef part{n}(x):\n    {effect}\n    return x * {read}\n",
        "x = part{n}(x)",
    ),
}  # fmt: skip
REGIONS = (
    "torch.no_grad()", "torch.autocast('cpu', torch.bfloat16)", "torch.inference_mode()", "torch.enable_grad()",
    "torch.set_grad_enabled(FLAG)",
)  # fmt: skip
