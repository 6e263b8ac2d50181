"""Training through the new families of kernels, for both targets: gradients beside eager's, and which ops are
left to aten.
"""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from bench import triton_interpret
from dynamotor.base.config import config
from dynamotor.base.events import collect

TARGETS = [
    "",
    pytest.param(
        "triton", marks=pytest.mark.skipif(not triton_interpret.available(), reason="no interpreter")
    ),
]
I = torch.tensor([[4, 1, 4], [0, 4, 2]])  # noqa: E741
EMBED, X, IMAGE = torch.randn(6, 8), torch.randn(4, 10), torch.randn(2, 3, 8, 10)

FUNCTIONS = {
    "embedding": (lambda w: F.embedding(I, w).tanh(), EMBED),
    "embedding with padding": (lambda w: F.embedding(I, w, padding_idx=4) * 2, EMBED),
    "index": (lambda x: x[I[0]] * 2 + x[:, I[1]].sum(), EMBED),
    "gather": (lambda x: x.gather(1, I.repeat(2, 1)).exp(), X),
    "index_select": (lambda x: x.index_select(1, I[0]) ** 2, X),
    "scatter_add": (lambda x: torch.zeros(4, 12).scatter_add(1, I.repeat(2, 1), x[:, :3] ** 2).sin(), X),
    "scatter": (lambda x: x.sin().scatter(1, torch.tensor([[1], [0], [2], [3]]), x[:, :1] * 3), X),
    "index_put": (lambda x: x.sin().index_put((torch.tensor([1, 3]),), x[:2] * 3), X),
    "cumsum": (lambda x: torch.cumsum(x.sin(), 1) * x, X),
    "cumsum of another dimension": (lambda x: torch.cumsum(x, 0).tanh(), X),
    "cumprod": (lambda x: torch.cumprod(x, 1), X),
    "cummax": (lambda x: torch.cummax(x, 1)[0] ** 2, X),
    "max_pool2d": (lambda x: F.max_pool2d(x.sin(), 3, 2, 1) * 2, IMAGE),
    "avg_pool2d": (lambda x: F.avg_pool2d(x.sin(), 2), IMAGE),
    "nearest": (lambda x: F.interpolate(x.sin(), scale_factor=2), IMAGE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x.sin(), (4, 5)), IMAGE),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), X),
    "every second column": (lambda x: x[..., ::2].clamp(max=1) * (x[..., 1::2].sin() + 1), X),
    "every third from the second": (lambda x: (x[1:, 1:9:3] ** 2).sum() + x[:, 2::4].exp(), X),
}
LEFT = {"cumprod": ["aten.max.dim"]}
ON_A_CPU = {
    "avg_pool2d": ["aten.avg_pool2d.default", "aten.avg_pool2d_backward.default"],
    "every second column": ["aten.slice_scatter.default"],
    "every third from the second": ["aten.slice_scatter.default"] * 2,
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_eagers(name, target):
    f, x = FUNCTIONS[name]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.randn(f(x).shape)
    with config.patch(target=target, strict=True), collect("fallback") as events:
        (dynamotor.compile(f)(ours) * weight).sum().backward()
    (f(theirs) * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert ours.grad.stride() == theirs.grad.stride()
    if name == "cumprod" and torch.__version__ < "2.13":
        return  # this PyTorch's derivative is one of other ops, a few for each column
    left = [e.data["op"] for e in events if "op" in e.data]
    assert left == (LEFT if target else {**LEFT, **ON_A_CPU}).get(name, [])
