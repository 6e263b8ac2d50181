"""ctc_loss: values and gradients are the CPU's for every reduction and every way to say targets and lengths."""

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
import dynamotor.xla  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402

INPUTS, LENGTHS = (7, 5, 7, 2), (4, 2, 0, 3)  # the last one's target does not fit: infinite


def loss(log_probs, targets, lengths, options):
    return torch.nn.functional.ctc_loss(log_probs, targets, *lengths, **options)


def outcome(log_probs, targets, lengths, options, device):
    log_probs = log_probs.to(device).detach().requires_grad_()
    value = loss(log_probs, targets.to(device), lengths, options)
    value.sum().backward()
    return value.detach().cpu(), log_probs.grad.cpu()


@pytest.mark.parametrize(
    ("form", "kind", "reduction", "zero"),
    (
        ("rows", list, "none", False),
        ("rows", torch.tensor, "mean", True),
        ("one after the other", list, "mean", False),
        ("one after the other", torch.tensor, "sum", True),
    ),
)
def test_losses_and_gradients_are_the_cpus(form, kind, reduction, zero) -> None:
    metrics.clear()
    targets = torch.randint(1, 5, (4, 4))
    targets[0, 1] = targets[0, 0]
    if form != "rows":
        targets = torch.cat([row[:n] for row, n in zip(targets, LENGTHS)])
    log_probs = torch.randn(7, 4, 5, dtype=torch.float64).log_softmax(-1)
    options = {"reduction": reduction, "zero_infinity": zero}
    given = log_probs, targets, (kind(INPUTS), kind(LENGTHS)), options
    torch.testing.assert_close(outcome(*given, "xla"), outcome(*given, "cpu"), equal_nan=True)
    assert not [name for name in metrics.all_counters() if name.startswith("aten::")]


def test_one_sample_has_no_batch_dimension() -> None:
    given = (
        torch.randn(7, 5, dtype=torch.float64).log_softmax(-1),
        torch.tensor([1, 1, 2]),
        (torch.tensor(7), torch.tensor(3)),
        {"blank": 4, "reduction": "none"},
    )
    torch.testing.assert_close(outcome(*given, "xla"), outcome(*given, "cpu"))


def test_the_bridge_trains_with_it() -> None:
    def f(x, targets):
        return loss(x.log_softmax(-1), targets, ((7, 6), (2, 3)), {})

    x, targets = torch.randn(7, 2, 5, dtype=torch.float64), torch.randint(1, 5, (2, 4))
    wanted, given = x.clone().requires_grad_(), x.to("xla").requires_grad_()
    f(wanted, targets).backward()
    dynamotor.compile(f, backend="xla")(given, targets.to("xla")).backward()
    torch.testing.assert_close(given.grad.cpu(), wanted.grad)
