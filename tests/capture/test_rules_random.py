"""Random changes of modules, settings, functions and globals between calls: each call gives eager's
result.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import dynamotor

GLOBALS = [1.0]


def helper(t):
    return t + GLOBALS[0] + len(GLOBALS)


def other(t):
    return t - 3


HELPER_CODE = helper.__code__


class Settings:
    def __init__(self):
        self.a, self.flags, self.seq, self.sub = 1.0, {"x": True, "y": 2}, [1.0, 2.0, (3.0, 4.0)], None


class Block(nn.Module):
    bias = 0.5

    def __init__(self, settings):
        super().__init__()
        self.linear, self.act, self.settings, self.opt = nn.Linear(4, 4), nn.ReLU(), settings, None
        self.fn = lambda t: t * 2
        self.register_buffer("b", torch.ones(4))
        self.table, self.names = {"k": self.linear}, {"p"}

    def forward(self, x, scale=1.0):
        y = self.act(self.linear(x)) * scale + self.bias + self.settings.a + self.b
        if self.settings.flags["x"]:
            y = y + self.settings.flags["y"]
        for v in self.settings.seq:
            y = y + (v if not isinstance(v, tuple) else sum(v))
        if self.opt is not None:
            y = self.opt(y)
        if "p" in self.names:
            y = y - 1
        if self.settings.sub is not None:
            y = y * self.settings.sub.a
        return self.fn(self.table["k"](y))


class Halving(Block):
    def forward(self, x):
        return x * 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(Settings()), Block(Settings())])
        self.mode, self.helper = "m", helper

    def forward(self, x):
        for block in self.blocks:
            x = self.helper(block(x))
        return {"m": x, "n": x + 1}[self.mode]


def with_sub(settings):
    settings.sub = Settings()
    settings.sub.a = random.random()


# (net, block, settings) -> None
CHANGES = [
    lambda n, b, s: setattr(s, "a", random.random()),
    lambda n, b, s: s.flags.update(x=not s.flags["x"]),
    lambda n, b, s: s.flags.update(y=random.randint(0, 9)),
    lambda n, b, s: s.seq.append(random.random()),
    lambda n, b, s: s.seq.__setitem__(0, random.random()),
    lambda n, b, s: s.seq.__setitem__(2, (random.random(),)),
    lambda n, b, s: setattr(b, "fn", random.choice([lambda t: t * 3, lambda t: t + 7, other])),
    lambda n, b, s: setattr(b, "opt", random.choice([None, nn.Tanh(), nn.Linear(4, 4)])),
    lambda n, b, s: setattr(b, "act", random.choice([nn.ReLU(), nn.Sigmoid(), nn.Identity()])),
    lambda n, b, s: b.b.add_(1),
    lambda n, b, s: setattr(b, "b", torch.rand(4)),
    lambda n, b, s: b.register_buffer("b", torch.rand(4)),
    lambda n, b, s: b.names.symmetric_difference_update({"p"}),
    lambda n, b, s: b.names.add("q"),
    lambda n, b, s: with_sub(s),
    lambda n, b, s: setattr(s, "sub", None),
    lambda n, b, s: setattr(n.blocks[1], "settings", n.blocks[0].settings),
    lambda n, b, s: setattr(n, "mode", random.choice("mn")),
    lambda n, b, s: GLOBALS.append(1.0),
    lambda n, b, s: GLOBALS.__setitem__(0, random.random()),
    lambda n, b, s: setattr(n, "helper", random.choice([helper, other])),
    lambda n, b, s: setattr(helper, "__code__", random.choice([other.__code__, HELPER_CODE])),
    lambda n, b, s: setattr(Block, "bias", random.random()),
    lambda n, b, s: setattr(b, "bias", random.random()),
    lambda n, b, s: b.__dict__.pop("bias", None),
    lambda n, b, s: b.table.update(k=random.choice([b.linear, nn.Linear(4, 4), n.blocks[0].linear])),
    lambda n, b, s: setattr(b.linear, "weight", nn.Parameter(torch.rand(4, 4))),
    lambda n, b, s: b.linear.weight.data.mul_(2),
    lambda n, b, s: b.linear.register_forward_hook(lambda m, i, o: o + 1),
    lambda n, b, s: b.linear._forward_hooks.clear(),
    lambda n, b, s: n.blocks.insert(1, Block(Settings())) if len(n.blocks) < 3 else None,
    lambda n, b, s: setattr(b, "__class__", random.choice([Block, Halving])),
    lambda n, b, s: setattr(Block.forward, "__defaults__", (random.random(),)),
    lambda n, b, s: setattr(b, "forward", lambda x: x * 5),
    lambda n, b, s: b.__dict__.pop("forward", None),
    lambda n, b, s: n.train(not n.training),
    lambda n, b, s: b.linear.requires_grad_(random.random() < 0.5),
    lambda n, b, s: setattr(b.linear, "bias", None),
]


@pytest.mark.parametrize("seed", range(8))
def test_random_changes_are_seen(seed, monkeypatch):
    random.seed(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(Block, "bias", 0.5)
    monkeypatch.setattr(Block.forward, "__defaults__", (1.0,))
    monkeypatch.setattr(helper, "__code__", HELPER_CODE)
    GLOBALS[:] = [1.0]
    net = Net()
    with dynamotor.config.patch(cache_size_limit=1000):
        compiled = dynamotor.compile(net, backend=lambda gm, inputs: gm.forward)
        for _ in range(25):
            block = random.choice(list(net.blocks))
            with torch.no_grad():
                random.choice(CHANGES)(net, block, block.settings)
            x = torch.randn(2, 4)
            want, got = net(x), compiled(x)
            assert torch.equal(want, got) and want.requires_grad == got.requires_grad
