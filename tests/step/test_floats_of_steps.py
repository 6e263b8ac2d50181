"""Floats of the model and the loss that change from step to step: inputs of one whole step."""

import copy

import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import counters


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.k = torch.nn.Linear(4, 2), 1.5

    def forward(self, x):
        return F.leaky_relu(self.linear(x), self.k / 10) * self.k


def test_one_program_serves_all_values():
    model, weight = Scaled(), [0.1]
    eager = copy.deepcopy(model)
    adam, own = (torch.optim.AdamW(m.parameters(), 0.1) for m in (model, eager))

    def loss_of(found, y):
        return F.cross_entropy(found, y) * weight[0] + found.pow(2).mean() * (1 - weight[0])

    before = counters["frames"]["captured"]
    step = dynamotor.compile_step(model, loss_of, adam)
    for k in range(6):
        x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        model.k = eager.k = 1.5 + k / 10
        weight[0] = 0.1 + k / 15
        want = loss_of(eager(x), y)
        want.backward()
        own.step()
        own.zero_grad()
        torch.testing.assert_close(step(x, y), want.detach())
    torch.testing.assert_close(list(model.parameters()), list(eager.parameters()))
    assert counters["frames"]["captured"] - before == 2
