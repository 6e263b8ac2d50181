"""Compiling what most programs do does not import sympy or torch._dynamo: over a second of a first call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.nn as nn
import torch.nn.functional as F
import dynamotor

heavy = ("sympy", "triton", "torch._dynamo", "torch._inductor", "jax", "pandas", "matplotlib", "transformers")
print([name for name in heavy if name in sys.modules])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = self.table(tokens)
        q, k, v = (t.view(*x.shape[:2], 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        y = F.gelu(self.norm(x + F.dropout(self.out(mixed), 0.1)))
        y = F.softmax(y @ y.transpose(1, 2), -1) @ y
        return F.cross_entropy((y @ self.table.weight.T).view(-1, 50), tokens.view(-1)) + y.square().mean()

class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.groups, self.second = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, 2, 1)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        y = F.interpolate(F.avg_pool2d(self.groups(self.second(F.pad(x, (1, 1)))), 1), size=x.shape[2:])
        y = torch.cat([x, F.interpolate(y, size=x.shape[2:], mode="bilinear")], 1)[:, torch.arange(8)]
        y = torch.stack([y.mean((2, 3)), F.adaptive_avg_pool2d(y, 1).flatten(1), F.normalize(y[:, :, 0, 0])])
        return F.mse_loss(self.out(y.sum(0).gather(1, torch.zeros(2, 8).long())).cumsum(1), torch.ones(2, 5))

dynamotor.config.strict = True
dynamotor.compile(Block(), backend="aot_eager")(torch.randint(0, 50, (2, 4))).backward()
for layout in (torch.contiguous_format, torch.channels_last):
    model = Images().to(memory_format=layout)
    image = torch.randn(2, 3, 16, 16).to(memory_format=layout)
    if layout is torch.channels_last:
        model.forward = lambda x: model.norm(F.max_pool2d(model.first(x), 2)).sum()
    dynamotor.compile(model, backend="aot_eager")(image).backward()
    with torch.no_grad():
        dynamotor.compile(model.eval(), backend="aot_eager")(image)
print([name for name in ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
"""


def test_importing_the_package_and_compiling_import_no_heavy_module() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"], done.stdout + done.stderr


@pytest.mark.slow
def test_no_common_op_s_first_compilation_imports_symbolic_algebra_or_triton() -> None:
    driver = Path(__file__).with_name("imports_of_ops.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", driver], capture_output=True, text=True, check=True
    )
    assert not done.stdout, done.stdout
