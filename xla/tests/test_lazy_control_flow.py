"""PyTorch's control flow operators on xla tensors: lazily, and captured by `torch.compile`."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from replicas import run_script  # noqa: E402

PROGRAM = """
import torch
if EARLY:
    import torch._dynamo
import dynamotor, dynamotor.xla
dynamotor.xla.install_as_torch_xla()
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

w = torch.randn(4)
FUNCTIONS = dict(
    cond=lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,)),
    nested=lambda x: torch.cond(x[0, 0] > 9, lambda x: x + 1, lambda x: torch.cond(x[0, 0] < 0, lambda x: x * 2, lambda x: x * 3, (x,)), (x * 1,)),
    while_loop=lambda x: while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.zeros((), dtype=torch.int64, device=x.device), x)
    )[1],
    scan=lambda x: scan(lambda c, x: (c + x, c * x), torch.zeros(4, device=x.device), x)[1],
    map=lambda x: map_(lambda x: x.sin(), x),
    flex=lambda x: flex_attention(*[x.view(1, 1, 4, 4)] * 3, score_mod=lambda s, b, h, i, j: s + (i - j)),
)
GRADED = ("cond", "nested", "map")

def run(f, x):
    y = f(x)
    if y.requires_grad:
        y.square().sum().backward()
    return y.detach().cpu(), None if x.grad is None else x.grad.cpu()

for name in NAMES:
    f = FUNCTIONS[name]
    for sign in (1, -1):
        t = sign * torch.rand(4, 4)
        want = run(f, t.clone().requires_grad_(name in GRADED))
        for way, wrap in (("lazy", lambda f: f), ("openxla", lambda f: torch.compile(f, backend="openxla"))):
            found = run(wrap(f), t.to("xla").requires_grad_(name in GRADED))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name} {way}: {m}")
print("done")
"""


ALL = ("cond", "nested", "while_loop", "scan", "map", "flex")


@pytest.mark.parametrize(
    ("early", "names"),
    [
        (True, ("cond",)),
        pytest.param(True, ALL, marks=pytest.mark.slow),
        pytest.param(False, ALL, marks=pytest.mark.slow),
    ],
)
def test_control_flow_equals_the_cpus(early: bool, names: tuple[str, ...]) -> None:
    done = run_script(PROGRAM.replace("EARLY", str(early)).replace("NAMES", str(names)))
    assert "done" in done.stdout, done.stderr[-3000:]
