"""`explain` describes the running code: a fresh compilation, earlier compilations, and what eager PyTorch does
in between.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor import counters

x = torch.randn(3, 4)


def breaks(x):
    y = x.sin()
    print(end="")
    return helper(y) + 1


def helper(y):
    return y * 2


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_compiled_function_is_described_as_it_is(times):
    compiled = dynamotor.compile(breaks)
    for _ in range(times):
        compiled(x)
    captured = counters["frames"]["captured"]
    found = dynamotor.explain(compiled)(x)
    assert (found.graph_count, found.op_count, found.graph_break_count) == (2, 3, 1)
    assert found.break_reasons[0].where.function == "breaks"
    assert len(found.guards) == 2
    assert times == 0 or counters["frames"]["captured"] == captured  # nothing was compiled for it


def test_only_what_served_the_call_is_described():
    compiled = dynamotor.compile(lambda x, n: x * n if n > 1 else breaks(x))
    compiled(x, 1), compiled(x, 2)
    assert dynamotor.explain(compiled)(x, 2).graph_break_count == 0
    assert dynamotor.explain(compiled)(x, 1).graph_break_count == 1


def test_a_compiled_module_and_fresh_options():
    module = dynamotor.compile(nn.Linear(4, 4))
    module(x)
    captured = counters["frames"]["captured"]
    assert dynamotor.explain(module)(x).graph_count == 1 and counters["frames"]["captured"] == captured
    assert (
        dynamotor.explain(module, backend="eager")(x).graph_count == 1
        and counters["frames"]["captured"] == captured + 1
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(4, 4), nn.LSTM(4, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.lstm(self.first(x).relu())[0].tanh())


def test_ops_that_eager_runs_between_compiled_parts_are_named():
    compiled = dynamotor.compile(Recurrent())
    for _ in range(2):
        text = str(dynamotor.explain(compiled)(x))
        assert "in eager PyTorch: a part (op)" in text and "DM238" in text, text


def test_a_break_is_shown_with_its_cure():
    def step(x):
        return x + 1 if x.sum() > 0 else x - 1

    assert "what to do: use torch.where" in str(dynamotor.explain(step)(torch.ones(3)))
