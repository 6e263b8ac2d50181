"""Compiling a transformer's training step does not import sympy or torch._dynamo: over a second of a first
call.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
import dynamotor

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

dynamotor.config.strict = True
dynamotor.compile(Block(), backend="aot_eager")(torch.randint(0, 50, (2, 4))).backward()
print([name for name in ("sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])
"""


def test_compiling_a_transformer_imports_no_symbolic_algebra() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
