"""Small programs that together have all parts of a program's entry; run as a script, all of them once, checked beside eager."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Compile = Callable[..., Any]
PROGRAMS: dict[str, Callable[[Compile], None]] = {}


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def program(fn: Callable[[Compile], None]) -> Callable[[Compile], None]:
    PROGRAMS[fn.__name__] = fn
    return fn


def beside_eager(compile: Compile, fn: Callable[..., Any], *args: torch.Tensor) -> None:
    """Outputs, written inputs and gradients are eager's, at several calls."""
    fast = compile(fn)
    for _ in range(2):
        theirs, ours = ([a.detach().clone().requires_grad_(a.requires_grad) for a in args] for _ in range(2))
        expected, found = fn(*theirs), fast(*ours)
        close(found, expected)
        if any(a.requires_grad for a in args):
            flat = lambda out: [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]  # noqa: E731
            torch.autograd.backward([(o * o).sum() for o in flat(expected)])
            torch.autograd.backward([(o * o).sum() for o in flat(found)])
        close([a.detach() for a in ours], [a.detach() for a in theirs])
        close([a.grad for a in ours if a.grad is not None], [a.grad for a in theirs if a.grad is not None])
        assert [a.grad is None for a in ours] == [a.grad is None for a in theirs]


def model(compile: Compile, module: torch.nn.Module, x: torch.Tensor, train: bool) -> None:
    theirs = copy.deepcopy(module).train(train)
    fast = compile(module.train(train))
    for _ in range(2):
        if train:
            a, b = theirs(x).square().mean(), fast(x).square().mean()
            a.backward(), b.backward()
            close(b, a)
            close([p.grad for p in module.parameters()], [p.grad for p in theirs.parameters()])
        else:
            with torch.no_grad():
                close(fast(x), theirs(x))
                for one in (theirs, module):
                    next(one.parameters()).data.mul_(1.5)  # folded weights follow
        close(dict(module.named_buffers()), dict(theirs.named_buffers()))


def convolutions() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
                               torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(288, 5))


@program
def convolutions_in_inference(compile: Compile) -> None:
    model(compile, convolutions(), torch.randn(2, 3, 16, 16), train=False)


@program
def convolutions_in_training(compile: Compile) -> None:
    model(compile, convolutions(), torch.randn(2, 3, 16, 16), train=True)


@program
def attention(compile: Compile) -> None:
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model(compile, layer, torch.randn(2, 7, 32), train=True)


@program
def embedding(compile: Compile) -> None:
    table = torch.randn(11, 6, requires_grad=True)
    positions = torch.tensor([[1, 2, 2], [10, 0, 1]])
    beside_eager(compile, lambda table, at: F.layer_norm(F.embedding(at, table), (6,)), table, positions)


@program
def views_of_inputs_and_results(compile: Compile) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple:
        z = x * y
        return x[1:], z.t(), z[0], y, z.detach()

    beside_eager(compile, fn, torch.randn(3, 4), torch.randn(3, 4))


@program
def written_inputs(compile: Compile) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y[0] = 2
        return x.sum() + y

    beside_eager(compile, fn, torch.randn(3, 4), torch.randn(3, 4))


@program
def two_outputs_and_absent_gradients(compile: Compile) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple:
        return a.exp() * b, (b + 1).tanh()

    fast = compile(fn)
    for used in ((0, 1), (0,), (1,)):
        grads = []
        for call in (fn, fast):
            torch.manual_seed(0)
            a, b = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            out = call(a, b)
            sum(out[k].sum() for k in used).backward()
            grads.append((a.grad, b.grad))
        for theirs, ours in zip(*grads, strict=True):
            assert (theirs is None) == (ours is None)
            if theirs is not None:
                close(ours, theirs)


@program
def half_precision_regions(compile: Compile) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        with torch.no_grad():
            z = y.float().mean()
        return y.float() + z

    fast = compile(fn)
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    torch.testing.assert_close(fast(x, w), fn(x, w), rtol=2e-2, atol=2e-2)


@program
def random_numbers(compile: Compile) -> None:
    fast = compile(lambda x: F.dropout(x, 0.5) * 3)
    x = torch.ones(1000, requires_grad=True)
    out = fast(x)
    out.sum().backward()
    assert set(out.unique().tolist()) == {0.0, 6.0} and 300 < (out > 0).sum() < 700
    close(x.grad, out.detach())
    torch.manual_seed(5)
    first = fast(x)
    assert not torch.equal(first, fast(x))
    torch.manual_seed(5)
    assert torch.equal(first, fast(x))


@program
def numbers_types_and_shapes(compile: Compile) -> None:
    def fn(x: torch.Tensor) -> tuple:
        return (x.to(torch.float64) / 3, x > 0.5, torch.full((2,), float("-inf")), x.masked_fill(x < 0, float("nan")).nan_to_num(),
                torch.arange(5, dtype=torch.int32), x.sort(-1), torch.topk(x, 2).indices, x.numel())

    fast = compile(fn)
    x = torch.randn(3, 5)
    for found, expected in zip(fast(x), fn(x), strict=True):
        close(found, expected)


@program
def recurrence_and_losses(compile: Compile) -> None:
    torch.manual_seed(2)
    cell, head = torch.nn.GRUCell(6, 8), torch.nn.Linear(8, 4)

    def fn(x: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(3, 8)
        for step in x.unbind(1):
            h = cell(step * weight, h)
        return F.cross_entropy(head(h), label)

    beside_eager(compile, fn, torch.randn(3, 4, 6), torch.randn(6, requires_grad=True), torch.tensor([0, 1, 3]))


@program
def sizes_that_differ(compile: Compile) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple:
        y = F.layer_norm(x @ w, (8,)).view(x.shape[0] * 2, -1)
        return torch.cat([y, y.roll(1, 0)], 1).softmax(-1), x.flatten()[: x.shape[1] // 2 + 1]

    fast = compile(fn, dynamic=True)
    for b, s in ((4, 6), (3, 9), (7, 2)):
        beside_eager(lambda fn: fast, fn, torch.randn(b, s, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True))


@program
def a_cache_that_grows(compile: Compile) -> None:
    def step(x: torch.Tensor, keys: torch.Tensor) -> tuple:
        keys = torch.cat([keys, x], 1)
        return (x @ keys.transpose(1, 2)).softmax(-1) @ keys, keys

    fast, x = compile(step), torch.randn(1, 1, 8)
    ours = theirs = torch.randn(1, 3, 8)
    for _ in range(6):
        (a, ours), (b, theirs) = fast(x, ours), step(x, theirs)
        close((a, ours), (b, theirs))


@program
def complex_rotations(compile: Compile) -> None:
    """Aten calls that give views, whose results are copied."""

    def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(turns)
        return torch.view_as_real(pairs).flatten(-2)

    beside_eager(compile, rotate, torch.randn(3, 8, requires_grad=True), torch.randn(4, 2))


@program
def sizes_that_data_decides(compile: Compile) -> None:
    fast = compile(lambda x: x[x > 0].exp().sum() * 2)
    for n in (20, 30, 40):
        x = torch.randn(n)
        close(fast(x), x[x > 0].exp().sum() * 2)


def main() -> None:
    import dynamotor

    for run in PROGRAMS.values():
        run(dynamotor.compile)
    json.dump(dict(dynamotor.counters["cache"]), sys.stdout)


if __name__ == "__main__":
    main()
