"""Collectives inside compiled functions, by both captures: alone and with two replicas."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
from replicas import run_replicas  # noqa: E402

PROGRAM = """
import torch, torch._dynamo, dynamotor, dynamotor.xla
dynamotor.xla.install_as_torch_xla()
import torch_xla.core.xla_model as xm, torch_xla.core.functions as xf, torch_xla.runtime as xr
n = xr.world_size()

def in_place(x):
    y, z = x * 2, x + 1
    xm.all_reduce(xm.REDUCE_SUM, [y, z], scale=0.5)
    return y + z

def lists(x):
    parts = xm.reduce_scatter(xm.REDUCE_SUM, [x, x * 2], 1.0, 0, n)
    return sum(xm.all_gather([part + 1 for part in parts]))

def gradients(x):
    return xf.all_reduce(xm.REDUCE_SUM, x * x * (xr.global_ordinal() + 1)) * x

FUNCTIONS = dict(
    all_reduce=lambda x: xm.all_reduce(xm.REDUCE_MAX, x * 2) + 1,
    in_place=in_place,
    lists=lists,
    gradients=gradients,
    reduce_scatter=lambda x: xm.reduce_scatter(xm.REDUCE_SUM, x * 2, 1.0, 0, n) + 1,
    all_gather=lambda x: xm.all_gather(x * 2, 1) + 1,
    all_to_all=lambda x: xm.all_to_all(x * 2, 0, 1, n) + 1,
    permute=lambda x: xm.collective_permute(x * 2, [[i, (i + 1) % n] for i in range(n)]) + 1,
    place=lambda x: x * xm.xrt_world_size() + xm.get_ordinal() + xr.global_ordinal(),
)
WAYS = dict(
    openxla=lambda f: torch.compile(f, backend="openxla", fullgraph=True),
    xla=lambda f: dynamotor.compile(f, backend="xla", fullgraph=True),
)

def run(f):
    x = (torch.arange(8.0).view(4, 2) + xr.global_ordinal()).to("xla").requires_grad_()
    y = f(x)
    if y.requires_grad:
        y.sum().backward()
    return y.detach().cpu(), None if x.grad is None else x.grad.cpu()

for name, f in FUNCTIONS.items():
    want = run(f)
    for way, wrap in WAYS.items():
        fast = wrap(f)
        for _ in range(2):
            torch.testing.assert_close(run(fast), want, msg=lambda m: f"{name} {way}: {m}")
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_collectives_are_captured_and_equal_the_lazy_ones(replicas: int) -> None:
    assert all("done" in said for said in run_replicas(PROGRAM, replicas))
