"""Softmax over scores and a column more, which is cut off again: eager's values and gradients, and no scores
beside the column in memory.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench.verification  # noqa: F401  (registers the interpreter)
import dynamotor
from bench.triton_interpret import available
from dynamotor import config, counters
from dynamotor.base.events import collect

pytestmark = pytest.mark.skipif(not available(), reason="Triton is not there as an interpreter")


def shifted(a, b):
    c = torch.cat([a, b], dim=-1)
    c = c - c.max(dim=-1, keepdim=True).values
    return F.softmax(c, dim=-1, dtype=c.dtype)[..., :-1]


def plain(a, b):
    return torch.softmax(torch.cat((a, b), -1), -1)[..., :-1]


def widened(a, b):
    return F.softmax(torch.cat([a.half(), b.half()], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def written_between(a, b):
    c = torch.cat([a * 2, b], dim=-1)
    a = a + 1
    b = b.clone()
    b.add_(3)
    return F.softmax(c, dim=-1)[..., :-1] * a + b


def written_columns(a, b):
    c = torch.cat([a, b], dim=-1)
    c.mul_(2)
    return F.softmax(c, dim=-1)[..., :-1]


def written_weights(a, b):
    p = F.softmax(torch.cat([a, b], dim=-1), dim=-1)
    p.add_(2)
    return p[..., :-1]


def written_after_the_cut(a, b):
    p = F.softmax(torch.cat([a, b], dim=-1), dim=-1)
    cut = p[..., :-1]
    p.add_(2)
    return cut


def run(function, a, b):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    y = function(a, b.view(1, -1, 1, 1).expand(a.shape[0], -1, a.shape[2], -1))
    grads = torch.autograd.grad(
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), (a, b)
    )
    return [y, *grads]


@pytest.mark.parametrize("function", [shifted, plain, widened, written_between])
def test_values_and_gradients_are_eagers(function):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 37) * 4, torch.randn(3)
    a[0, 0, 0], a[0, 1, 2, 7:] = -3e38, float("-inf")
    before = counters["softmax"]["without its extra column"]
    with config.patch(target="triton", strict=True):
        found = run(dynamotor.compile(function), a, b)
    assert counters["softmax"]["without its extra column"] > before
    wanted = run(function, a.double() if function is not widened else a, b.double())
    for ours, theirs in zip(found, wanted, strict=True):
        tolerance = {widened: 2e-3, written_between: 1e-4}.get(function, 2e-6)
        close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(ours.double(), theirs.double(), **close)


def test_rows_of_nothing_and_numbers_that_are_not_finite():
    a, b = torch.zeros(2, 3, 4, 8), torch.tensor([0.0, float("-inf"), 1.0])
    a[0], a[1, 0, 0, 0], a[1, 2, 1, 3] = float("-inf"), float("nan"), float("inf")
    with config.patch(target="triton"):
        found = run(dynamotor.compile(shifted), a, b)[0]
    torch.testing.assert_close(found, run(shifted, a, b)[0], equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: torch.softmax(torch.cat((a, b), -1), -1),
        lambda a, b: torch.softmax(torch.cat((a, b), -1), -1)[..., 1:],
        lambda a, b: torch.softmax(torch.cat((b, a), -1), -1)[..., :-1],
        lambda a, b: torch.softmax(torch.cat((a, b), -1), 2)[..., :-1],
        lambda a, b: (c := torch.softmax(torch.cat((a, b), -1), -1))[..., :-1] + c.sum(),
        lambda a, b: (c := torch.cat((a, b), -1)).sum() + torch.softmax(c - c.amin(-1, True), -1)[..., :-1],
    ],
)
def test_other_programs_stay_as_they_are(function):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 37), torch.randn(3)
    before = counters["softmax"]["without its extra column"]
    with config.patch(target="triton"):
        found = run(dynamotor.compile(function), a, b)
    assert counters["softmax"]["without its extra column"] == before
    for ours, theirs in zip(found, run(function, a, b), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("function", [written_columns, written_weights, written_after_the_cut])
def test_writes_whose_results_are_not_read_stay(function):
    a, b = torch.randn(2, 3, 5, 37), torch.randn(2, 3, 5, 1)
    with config.patch(target="triton"), torch.no_grad():
        found = dynamotor.compile(function)(a, b)
    torch.testing.assert_close(found, function(a, b), rtol=1e-5, atol=1e-6)


def test_a_processor_s_programs_stay_as_they_are():
    before = counters["softmax"]["without its extra column"]
    run(dynamotor.compile(shifted), torch.randn(2, 3, 4, 8), torch.randn(3))
    assert counters["softmax"]["without its extra column"] == before


def test_no_scores_lie_beside_the_column():
    a, b = torch.randn(2, 3, 5, 37), torch.randn(3)
    with config.patch(target="triton", program_cache=False), collect("code") as events:
        run(dynamotor.compile(shifted), a, b)
    assert events and not any("38]" in str(e.data["program"]) for e in events)


class Attention(nn.Module):
    """As transformers' GptOss computes it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(16, 96), nn.Parameter(torch.randn(2))

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 24, 3, 2, 16).permute(2, 0, 3, 1, 4)
        later = torch.ones(24, 24, device=x.device).triu(1) * -1e30
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + later
        c = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(2, -1, 24, -1)], dim=-1)
        c = c - c.max(dim=-1, keepdim=True).values
        p = F.softmax(c, dim=-1, dtype=c.dtype)[..., :-1]
        return torch.matmul(F.dropout(p, 0.0, training=True).to(v.dtype), v)


def test_a_step_goes_through_its_scores_once_each_way():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 24, 16)
    plain_model = copy.deepcopy(model)
    sgd, plain_sgd = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain_model))
    with config.patch(target="triton", program_cache=False), collect("code") as events:
        step = dynamotor.compile_step(model, lambda y, x: y.float().square().mean(), sgd)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = step(x, x)
    for _ in range(3):
        plain_sgd.zero_grad()
        wanted = plain_model(x).square().mean()
        wanted.backward()
        plain_sgd.step()
    torch.testing.assert_close(loss, wanted, rtol=2e-2, atol=1e-3)
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)
    text = str(events[-1].data["program"])
    scores = re.findall(r"^ *(buf\d+): .*\[(?:2, 2|4), 24, 24\]", text, re.M)
    lines = [line for line in text.splitlines() if re.match(r" *kernel\d+\(", line)]
    assert len([line for line in lines if any(re.search(rf"{name}\b", line) for name in scores)]) == 2
    assert len(scores) == 5 and "24, 25]" not in text


def test_second_derivatives():
    a, b = torch.randn(1, 3, 2, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def penalty(function):
        x = a.clone().requires_grad_()
        y = function(x, b.view(1, -1, 1, 1).expand(1, -1, 2, -1))
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)[0]

    with config.patch(target="triton"):
        torch.testing.assert_close(penalty(dynamotor.compile(shifted)), penalty(shifted))
