"""A whole training step in one compiled function: the backward and the optimizer run between graphs.

Found by a step over a small classifier: the frame hook, which is on while `loss.backward()` runs, captured
the compiled backward itself.
"""

import copy

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect

pytestmark = pytest.mark.regression


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_loss_and_parameters_are_eagers(backend):
    net = torch.nn.Sequential(
        torch.nn.Linear(10, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    ).double()
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (net, twin)]
    compiled = dynamotor.compile(step, backend=backend)
    with collect("capture") as events:
        for _ in range(4):
            x, y = torch.randn(8, 10, dtype=torch.float64), torch.randint(0, 3, (8,))
            assert compiled(twin, optimizers[1], x, y) == pytest.approx(
                step(net, optimizers[0], x, y), rel=1e-9
            )
    for a, b in zip(net.state_dict().values(), twin.state_dict().values()):
        torch.testing.assert_close(a, b)
    assert len(events) <= 6, [e.data["name"] for e in events]
