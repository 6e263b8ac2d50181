"""Runs models of PyTorch's XLA bridge on CPU eager, the lazy device and trace_once; prints one JSON line each. Started by test_ten_models.py."""

import copy
import json
import sys

import torch

import dynamotor
from bench.xla_models import cases
from dynamotor import xla
from dynamotor.base.events import collect
from dynamotor.xla import metrics, rng
from dynamotor.xla.sync import sync


def recorded() -> int:
    return sum(n for name, n in metrics.all_counters().items() if name.startswith("xla::"))


def on_xla(values):
    return tuple(v.to("xla") for v in values)


def error(mine, expected) -> float:
    return float((mine.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-12))


def inference(case) -> dict:
    model, inputs = case.make(small=True, phase="infer")
    with torch.no_grad():
        expected = model(*inputs)
        model, inputs = model.to("xla"), on_xla(inputs)
        lazy = model(*inputs)
        sync()
        fast = dynamotor.compile(model, backend="xla")
        with collect("xla.program") as programs:
            first = fast(*inputs)
        before = recorded()
        again = fast(*inputs)
        records = recorded() - before
    return {
        "error": error(lazy.cpu(), expected),
        "bits": torch.equal(first.cpu(), lazy.cpu()) and torch.equal(again.cpu(), lazy.cpu()),
        "executables": len(programs),
        "records": records,
    }


def gradients(model, inputs, backend) -> tuple:
    """(loss, gradients, buffers) of one training step; on the device when `backend` is not None ("" for the lazy device)."""
    model = copy.deepcopy(model)
    if backend is not None:
        model, inputs = model.to("xla"), on_xla(inputs)
        sync()
        rng.set_state(3)
    function = dynamotor.compile(model, backend=backend) if backend else model
    output = function(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    loss = (output * (weights if backend is None else weights.to("xla"))).sum()
    loss.backward()
    if backend is not None:
        sync()
    return (
        loss.detach().cpu(),
        [p.grad.cpu() for p in model.parameters() if p.grad is not None],
        [b.cpu() for b in model.buffers()],
    )


def training(case, dropout: bool) -> dict:
    model, inputs = case.make(small=True, phase="train")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and not dropout:
            module.p = 0.0
    lazy, once = gradients(model, inputs, ""), gradients(model, inputs, "xla")
    bits = torch.equal(lazy[0], once[0]) and all(torch.equal(a, b) for x, y in zip(lazy[1:], once[1:]) for a, b in zip(x, y))
    result = {"bits": bits, "gradients": len(lazy[1])}
    if not dropout:
        # In float64: batch norm over the few values of a small batch magnifies float32's rounding, in eager as well.
        model, inputs = model.double(), tuple(t.double() if t.is_floating_point() else t for t in inputs)
        exact, once = gradients(model, inputs, None), gradients(model, inputs, "xla")
        largest = max(float(b.abs().max()) for b in exact[1])
        result |= {
            "loss_error": error(once[0], exact[0]),
            "gradient_error": max(float((a - b).abs().max()) for a, b in zip(once[1], exact[1])) / largest,
        }
    return result


def main() -> None:
    assert xla.device_count() >= 1
    for name in sys.argv[1:]:
        case = cases[name]
        row = {"model": name, "infer": inference(case), "train": training(case, dropout=False)}
        if any(isinstance(m, torch.nn.Dropout) for m in case.make(True, "train")[0].modules()):
            row["dropout"] = training(case, dropout=True)
        row["fallbacks"] = [name for name in metrics.all_counters() if name.startswith("aten::")]
        print(json.dumps(row), flush=True)


main()
