"""Values computed once from weights are computed again after any write, however linear it is and however it
is made.
"""

import copy

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def negate_two(w):
    w.view(-1)[[3, 3 + 64]] *= -1


def swap_rows(w):
    w[[0, 1]] = w[[1, 0]]


EDITS = {
    "neg_": lambda w: w.neg_(),
    "mul_4": lambda w: w.mul_(4),
    "two signs": negate_two,
    "rows": swap_rows,
    "halves": lambda w: w.mul_(0.5),
    "copy_": lambda w: w.copy_(-w),
}


@pytest.mark.parametrize("way", ["no_grad", "data", "numpy"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits(edit, way):
    model = Net().eval()
    fast = dynamotor.compile(model)
    x = torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        weight = model.conv.weight
        EDITS[edit](
            weight
            if way == "no_grad"
            else weight.data
            if way == "data"
            else torch.from_numpy(weight.detach().numpy())
        )
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_load_state_dict():
    model = Net().eval()
    fast = dynamotor.compile(model)
    x = torch.randn(2, 8, 6, 6)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        fast(x)
        model.load_state_dict(
            {name: -value if name.startswith("conv") else value for name, value in state.items()}
        )
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


NORM = torch.nn.BatchNorm1d(4)


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NORM.running_var.exp() * 2,
        lambda: (NORM.running_var.exp() * 2).view(2, 2),
        lambda: (NORM.running_var.exp() * 2).split(2)[1],
        lambda: (torch.arange(4) * 3).unfold(0, 2, 2),
        lambda: torch.arange(4).cumsum(0).reshape(2, 2).t(),
        lambda: torch.tensor([1, 2, 3, 4]).view(2, 2),
        lambda: torch.tensor([1, 2, 3, 4]),
    ],
)
def test_results_are_new_at_each_call(make, backend):
    """A view of a constant was handed out, which the program may write."""

    def program(x):
        return make(), x + 1

    compiled = dynamotor.compile(program, backend=backend)
    with torch.no_grad():
        expected = make().clone()
        for _ in range(3):
            found, _ = compiled(torch.ones(3))
            assert torch.equal(found, expected)
            found.add_(100)
