"""CUDA graphs checked on a GPU: actions of a user around replays, each against eager.

>>> row = CHECKS["results that are held"]("cuda"); row["ok"], row["counts"]

On a CPU the same programs run without graphs, so that the checks themselves can be tried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dynamotor.api import compile as compile_
from dynamotor.base.events import counters

from . import models
from .numerics import largest_error

Check = Callable[[str], dict[str, Any]]
CHECKS: dict[str, Check] = {}
MODE = "reduce-overhead"


def check(label: str) -> Callable[[Callable[[str], dict[str, Any]]], Check]:
    """Register a check; its row holds what graphs did, and is right only if any was replayed (on a GPU)."""

    def add(function: Callable[[str], dict[str, Any]]) -> Check:
        def run(device: str) -> dict[str, Any]:
            counters["cudagraphs"].clear()
            row = function(device)
            replays = row.pop("replays", 2)
            row["counts"] = dict(counters["cudagraphs"])
            row["ok"] = bool(row["ok"]) and (device == "cpu" or row["counts"].get("replayed", 0) >= replays)
            return row

        CHECKS[label] = run
        return run

    return add


def _net(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(32, 64), torch.nn.GELU(), torch.nn.BatchNorm1d(64), linear(64, 8)).to(
        device
    )


def _batches(device: str, count: int, rows: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 32, generator=generator).to(device) for _ in range(count)]


def _pair(device: str) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """A module, a copy of it, and the copy compiled."""
    plain = _net(device)
    ours = copy.deepcopy(plain)
    return plain, ours, compile_(ours, mode=MODE)


def _drift(ours: torch.nn.Module, plain: torch.nn.Module) -> float:
    tensors = [*ours.parameters(), *(b for b in ours.buffers() if b.is_floating_point())]
    wanted = [*plain.parameters(), *(b for b in plain.buffers() if b.is_floating_point())]
    return largest_error([t.detach() for t in tensors], [t.detach() for t in wanted])


@check("inference follows its inputs")
def _inference(device: str) -> dict[str, Any]:
    case = models.load("BertForMaskedLM", small=True, dropout=False)
    model = case.model.to(device).eval()
    call = compile_(copy.deepcopy(model), mode=MODE)
    worst = 0.0
    with torch.no_grad():
        for n in range(8):
            batch = {k: v.to(device) for k, v in case.make_inputs(seed=n)[1].items()}
            worst = max(worst, largest_error([call(**batch).logits], [model(**batch).logits]))
    return {"error_out": worst, "ok": worst < 1e-4}


@check("results that are held")
def _held(device: str) -> dict[str, Any]:
    plain, _, call = _pair(device)
    plain.eval(), call.eval()
    batches = _batches(
        device, 12, rows=40_000 if device != "cpu" else 50
    )  # results larger than the copied part
    with torch.no_grad():
        kept = [call(x) for x in batches]
        error = max(largest_error([a], [plain(x)]) for a, x in zip(kept, batches))
    return {"error_out": error, "ok": error < 1e-4}


def _train(
    device: str, make: Callable[[Any], torch.optim.Optimizer], steps: int = 8, set_to_none: bool = True
) -> dict[str, Any]:
    plain, ours, call = _pair(device)
    for model, step in ((plain, plain), (ours, call)):
        optimizer = make(model.parameters())
        for x in _batches(device, steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            step(x).square().mean().backward()
            optimizer.step()
    drift = _drift(ours, plain)
    return {"error_parameters": drift, "ok": drift < 2e-3, "replays": 6}


@check("training, SGD")
def _sgd(device: str) -> dict[str, Any]:
    return _train(device, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@check("training, foreach AdamW")
def _adamw(device: str) -> dict[str, Any]:
    return _train(device, lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True))


@check("training, gradients set to zero")
def _zeroed(device: str) -> dict[str, Any]:
    return _train(device, lambda p: torch.optim.SGD(p, lr=0.1), set_to_none=False)


@check("gradient accumulation")
def _accumulation(device: str) -> dict[str, Any]:
    plain, ours, call = _pair(device)
    error = 0.0
    for _ in range(4):
        for model, step in ((plain, plain), (ours, call)):
            model.zero_grad()
            for x in _batches(device, 3):
                step(x).square().mean().backward()
        error = max(
            error, largest_error([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
        )
    return {"error_grad": error, "ok": error < 1e-3}


@check("dropout draws anew in each replay")
def _dropout(device: str) -> dict[str, Any]:
    call = compile_(lambda x: F.dropout(x, 0.5) * 2, mode=MODE)
    x = torch.ones(1000, device=device)
    draws = []
    for seed in (7, 8, 7):
        torch.manual_seed(seed)
        draws.append(torch.stack([call(x).clone() for _ in range(5)]))
    distinct = len({tuple(row.tolist()) for row in draws[0]})
    ok = distinct == 5 and torch.equal(draws[0][3:], draws[2][3:]) and not torch.equal(draws[0], draws[1])
    return {"distinct": distinct, "ok": ok}


@check("float16 with a gradient scaler")
def _scaler(device: str) -> dict[str, Any]:
    plain, ours, call = _pair(device)
    losses: list[list[float]] = []
    for model, step in ((plain, plain), (ours, call)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        losses.append([])
        for x in _batches(device, 8):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16 if device != "cpu" else torch.bfloat16):
                loss = step(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses))
    return {"error_loss": worst, "error_parameters": _drift(ours, plain), "ok": worst < 2e-2}


def _streams(device: str) -> Iterator[Any]:
    if device == "cpu":
        yield from (None, None)
        return
    current = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    for stream in (current, side, current, side):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream
        torch.cuda.synchronize()


@check("other streams")
def _other_streams(device: str) -> dict[str, Any]:
    plain, _, call = _pair(device)
    plain.eval(), call.eval()
    error = 0.0
    with torch.no_grad():
        for _ in _streams(device):
            for x in _batches(device, 5):
                error = max(error, largest_error([call(x)], [plain(x)]))
    return {"error_out": error, "ok": error < 1e-4}


@check("graph breaks and several shapes")
def _breaks(device: str) -> dict[str, Any]:
    net = _net(device).eval()

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        print(end="")  # a break
        return torch.softmax(y, -1) + x[:, :8]

    call, error = compile_(fn, mode=MODE), 0.0
    with torch.no_grad():
        for rows in (16, 24) * 5:
            (x,) = _batches(device, 1, rows)
            error = max(error, largest_error([call(x)], [fn(x)]))
    return {"error_out": error, "ok": error < 1e-4}


@check("inputs that are changed in place run plainly")
def _mutated(device: str) -> dict[str, Any]:
    call, error = compile_(lambda x: x.add_(1) * 2, mode=MODE), 0.0
    for n in range(5):
        x = torch.full((8,), float(n), device=device)
        y = call(x)
        error = max(
            error, largest_error([x, y], [torch.full_like(x, n + 1.0), torch.full_like(x, 2 * n + 2.0)])
        )
    return {"error_out": error, "ok": error == 0, "replays": 0}


@check("what cannot be recorded runs plainly")
def _refused(device: str) -> dict[str, Any]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.linalg.inv(x + 4 * torch.eye(8, device=x.device)) * 2
        )  # the host waits for it, to see whether there is one

    call, error = compile_(fn, mode=MODE), 0.0
    before = torch.cuda.current_stream() if device != "cpu" else None
    for _ in range(6):
        x = torch.rand(8, 8, device=device)
        error = max(error, largest_error([call(x)], [fn(x)]))
    same = device == "cpu" or torch.cuda.current_stream() == before
    return {"error_out": error, "same stream": same, "ok": error < 1e-4 and same, "replays": 0}


@check("graphs go on after one was refused")
def _after(device: str) -> dict[str, Any]:
    return _train(device, lambda p: torch.optim.SGD(p, lr=0.1))
