"""Mixed precision: autocast, and scaling whose skipped steps are decided on the device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax")
import dynamotor.xla.core.xla_model as xm  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.base.events import collect  # noqa: E402
from dynamotor.xla.amp import GradScaler, autocast, syncfree  # noqa: E402


def test_autocast():
    linear = torch.nn.Linear(4, 3).to("xla")
    x = torch.randn(2, 4, device="xla")
    with autocast(xm.xla_device()):
        assert linear(x).dtype == torch.bfloat16
    with autocast("xla", dtype=torch.float16):
        assert linear(x).dtype == torch.float16
    with autocast(xm.xla_device(), enabled=False):
        assert linear(x).dtype == torch.float32
    with pytest.raises(DynamotorError, match="DM668"):
        autocast("cpu")


CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.02}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("AdamW", {"lr": 0.01}),
]


@pytest.mark.parametrize("name,options", CASES)
def test_skipped_steps_leave_no_trace(name, options):
    """found_inf = 1, 0, 1, 0, 0 gives what torch's optimizer gives for the steps that count."""
    start, grads = torch.randn(5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone().to("xla"))
    ours, theirs = getattr(syncfree, name)([q], **options), getattr(torch.optim, name)([p], **options)
    for i, found in enumerate((1.0, 0.0, 1.0, 0.0, 0.0)):
        q.grad = (grads[i] if not found else grads[i] / 0).to("xla")
        ours.step(found_inf=torch.tensor([found]).to("xla"))
        xm.mark_step()
        if not found:
            p.grad = grads[i].clone()
            theirs.step()
        torch.testing.assert_close(
            q.detach().cpu(), p.detach(), rtol=1e-5, atol=1e-6
        )  # step counts on the device are float32
    ours.step()
    p.grad = grads[4].clone()
    theirs.step()
    torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-5, atol=1e-6)


def test_found_inf_must_be_one_number():
    p = torch.nn.Parameter(torch.ones(2, device="xla"))
    p.sum().backward()
    with pytest.raises(ValueError):
        syncfree.Adam([p]).step(found_inf=torch.zeros(2, device="xla"))


def train(optimizer_of, scaler, device, growing=None):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3).double().to(device)
    optimizer = optimizer_of(model.parameters())
    scales = []
    for i in range(6):
        x = (
            torch.full((4, 6), 0.1 * (i + 1), dtype=torch.float64)
            if i != 2
            else torch.full((4, 6), float("inf"), dtype=torch.float64)
        )
        optimizer.zero_grad()
        scaler.scale(model(x.to(device)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        xm.mark_step()
        scales.append(scaler.get_scale())
    return scales, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["syncfree", "torch"])
def test_grad_scaler(kind):
    expected = train(
        lambda p: torch.optim.Adam(p, lr=0.1),
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "cpu",
    )
    optimizers = syncfree if kind == "syncfree" else torch.optim
    found = train(lambda p: optimizers.Adam(p, lr=0.1), GradScaler(init_scale=8.0, growth_interval=2), "xla")
    assert found[0] == expected[0]
    for a, b in zip(found[1], expected[1]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_with_a_syncfree_optimizer_is_one_graph():
    model = torch.nn.Linear(6, 3).to("xla")
    optimizer, scaler = syncfree.AdamW(model.parameters()), GradScaler()
    x = torch.randn(4, 6, device="xla")
    xm.mark_step()
    with collect("xla.flush") as events:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            xm.mark_step()
    assert [e.data["cause"] for e in events] == ["mark_step"] * 3


def test_zero_gradients_in_place_of_skipping():
    p = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), GradScaler(use_zero_grad=True)
    scaler.scale((p / 0).sum()).backward()
    with collect("xla.flush") as events:
        scaler.step(optimizer)
        scaler.update()
    assert not events and p.tolist() == [1.0, 1.0]
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert p.tolist() == pytest.approx([0.9, 0.9])
