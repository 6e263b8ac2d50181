"""A parameter that only unused outputs depend on has no gradient, as in eager: not zeros, which momentum and
decay would act on.
"""

import pytest
import torch
from torch import nn

import dynamotor


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.trunk(x).tanh()
        return self.left(y), self.right(y), y * 2


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_gradients_are_there_exactly_when_eager_has_them(backend, used):
    torch.manual_seed(0)
    model = Two()
    x = torch.randn(3, 4)

    def gradients(call):
        model.zero_grad()
        outputs = call(x)
        sum(outputs[i].square().sum() for i in used).backward()
        return [p.grad for p in model.parameters()]

    expected = gradients(model)
    compiled = dynamotor.compile(model, backend=backend)
    for _ in range(2):
        for want, got in zip(expected, gradients(compiled), strict=True):
            assert (want is None) == (got is None)
            assert want is None or torch.allclose(want, got, atol=1e-6)
