"""Changing floats that PyTorch takes only as numbers: two programs at most, eager's results and gradients, and a
reason in the report."""

import math

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import counters

LABELS = torch.tensor([1, 2, 0])
PROGRAMS = {
    "dropout": lambda x, k: F.dropout(x * 2, k / 10) * 3,
    "dropout in place": lambda x, k: F.dropout(x * 2, k / 10, True, True) * 3,
    "dropout2d": lambda x, k: F.dropout2d(x.view(1, 3, 2, 2), k / 5),
    "cdist": lambda x, k: torch.cdist(x, x.sin(), k),
    "norms": lambda x, k: x.norm(k) + torch.linalg.vector_norm(x * 2, k, dim=1),
    "label smoothing": lambda x, k: F.cross_entropy(x, LABELS, label_smoothing=k / 10),
    "logspace": lambda x, k: torch.logspace(0, k, 4) * x,
    "gumbel_softmax": lambda x, k: F.gumbel_softmax(x, tau=k),
    "rrelu": lambda x, k: F.rrelu(x, k / 10, k / 5, training=True),
    "lp_pool": lambda x, k: F.lp_pool1d(x.exp(), k, 2),
    "16 bits": lambda x, k: F.softplus(x, k),
    "uniform_": lambda x, k: torch.empty(3, 4).uniform_(0, k) * x,
    "two calls": lambda x, k: F.celu(F.pairwise_distance(x, x.cos(), p=k), k) + F.dropout(x, k / 9).sum(),
}


def outcome(program, k, dtype):
    torch.manual_seed(3)
    x = torch.linspace(-1, 2, 12, dtype=dtype).view(3, 4).requires_grad_()
    found = program(x, k)
    found.sum().backward()
    return found.detach(), x.grad


def programs(name, backend, numbers):
    dynamotor.reset()
    before, compiled = counters["frames"]["captured"], dynamotor.compile(PROGRAMS[name], backend=backend)
    dtype = torch.bfloat16 if name == "16 bits" else torch.float32
    with dynamotor.config.patch(fallback_random=True):
        for k in numbers:
            found, expected = (outcome(program, k, dtype) for program in (compiled, PROGRAMS[name]))
            torch.testing.assert_close(found, expected, equal_nan=True)
    return counters["frames"]["captured"] - before


@pytest.mark.filterwarnings("ignore::dynamotor.EagerWarning")
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_programs_give_eagers_results(name, backend):
    assert programs(name, backend, [1.3 + 0.17 * i for i in range(6)]) <= 2


@pytest.mark.parametrize("name", ["cdist", "norms", "dropout"])
def test_numbers_where_functions_take_another_path_are_programs_of_their_own(name):
    numbers = [1.5, 2.0, 0.0, 1.0, 2.5, *([math.inf] if name != "dropout" else []), 0.0, 1.25]
    assert programs(name, "eager", numbers) <= 2 + len({0.0, 1.0, math.inf})


def test_a_number_that_the_function_refuses_raises_its_error():
    compiled = dynamotor.compile(lambda x, p: F.dropout(x * 2, p), backend="eager")
    x = torch.ones(3)
    for p in (0.1, 0.2, 0.3):
        compiled(x, p)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        compiled(x, 1.5)


def test_the_call_is_reported_and_strict_refuses_it():
    compiled = dynamotor.compile(lambda x, p: torch.cdist(x, x, p) * 2)
    x = torch.randn(3, 2)
    compiled(x, 1.5)
    before = counters["fallback"]["aot.DM281"]
    compiled(x, 1.6)
    assert counters["fallback"]["aot.DM281"] == before + 1
    dynamotor.reset()
    with dynamotor.config.patch(strict=True):
        compiled(x, 1.5)
        with pytest.raises(dynamotor.DynamotorError, match="DM281"):
            compiled(x, 1.7)


def test_a_module_whose_rate_follows_a_schedule():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
    before, compiled = counters["frames"]["captured"], dynamotor.compile(model, backend="eager")
    for step in range(6):
        model[1].p = 0.1 + 0.05 * step
        torch.manual_seed(step)
        got = compiled(torch.ones(2, 4))
        torch.manual_seed(step)
        assert torch.equal(got, model(torch.ones(2, 4)))
    assert counters["frames"]["captured"] - before <= 2
