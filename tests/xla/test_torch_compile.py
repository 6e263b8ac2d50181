"""The bridge's backends under torch.compile's own capture."""

import copy

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

from dynamotor import torch_compile_xla  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.sync import sync  # noqa: E402


@pytest.mark.parametrize("backend", [torch_compile_xla.xla_backend, torch_compile_xla.xla_everytime_backend])
def test_models_train_under_torch_compile(backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    device = copy.deepcopy(model).to("xla")
    torch._dynamo.reset()
    fast = torch.compile(device, backend=backend)
    for _ in range(2):
        x = torch.randn(3, 6)
        for net, inputs in ((fast, x.to("xla")), (model, x)):
            net.zero_grad()
            net(inputs).square().sum().backward()
    for mine, expected in zip(device.parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)


def test_calls_of_trace_once_record_nothing():
    model = torch.nn.Linear(4, 4).to("xla")
    torch._dynamo.reset()
    fast = torch.compile(model, backend=torch_compile_xla.xla_backend)
    x = torch.randn(2, 4, device="xla")
    with torch.no_grad():
        fast(x)
        sync()
        before = sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::"))
        result = fast(x)
    assert sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::")) == before
    torch.testing.assert_close(result.cpu(), torch.nn.functional.linear(x.cpu(), model.weight.detach().cpu(), model.bias.detach().cpu()))
