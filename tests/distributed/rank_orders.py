"""Programs between a gather of parts of a sequence and a scatter, run by both ranks, compiled and in eager.

>>> pair.run(compared, "mlp", 3)     # on each rank: {"worst": 1e-15, "copies": 0}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import collect

PART, WIDTH = 4, 6
Weights = tuple[torch.Tensor, ...]


def gather(x: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(x, 1, dist.group.WORLD)


def scatter(x: torch.Tensor) -> torch.Tensor:
    return functional.reduce_scatter_tensor_autograd(x, "sum", 1, dist.group.WORLD)


def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    whole = gather(x)
    return scatter(F.silu(whole @ a) * (whole @ a + bias) @ b)


def with_biases(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return scatter(F.linear(F.linear(gather(x), a, bias).relu(), b))


def twice(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return mlp(x + mlp(x, a, b, bias), a, b, bias)


def positions(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    whole = gather(x)
    places = torch.arange(whole.shape[1], dtype=x.dtype)[:, None]
    return scatter((whole @ a + places).sin() @ b)


def shifted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return scatter(((gather(x) @ a).roll(1, 1) + bias) @ b)


def read_by_others(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = (gather(x) @ a).sin()
    return scatter(y @ b) + y[:, :PART] * y[:, PART:].cos()


def along_the_sequence(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return scatter((gather(x) @ a).softmax(1) @ b)


def two_gathers(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return scatter((gather(x) * gather(x.cos())) @ b)


def of_one_number(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows = gather(x.sum(-1))  # matrices: the batch by the sequence
    return scatter((rows @ rows.t().sin() @ rows).cos())


def own_rows_added(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    own = torch.cat([x, x.sin()], 1)
    return scatter((gather(x) @ a + own) @ b)


def weighted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    whole = gather(x)
    return scatter(whole @ (whole.flatten(0, 1).t() @ whole.flatten(0, 1)))


# By name: the program, and how many copies of the order forward and backward keep.
PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "mlp": (mlp, True),
    "with biases": (with_biases, True),
    "twice": (twice, True),
    "two gathers": (two_gathers, True),
    "weighted": (weighted, True),
    "positions": (positions, False),
    "shifted": (shifted, False),
    "read by others": (read_by_others, False),
    "along the sequence": (along_the_sequence, False),
    "of one number": (of_one_number, False),
    "own rows added": (own_rows_added, False),
}


def compared(rank: int, name: str, batch: int) -> dict[str, Any]:
    """How far results and gradients are from eager's, and the copies in the graphs."""
    dynamotor.reset()
    program = PROGRAMS[name][0]
    torch.manual_seed(rank)
    given = [
        torch.randn(shape).double().requires_grad_()
        for shape in ((batch, PART, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    ]
    with collect("aten_graph") as events:
        found = []
        for call in (program, dynamotor.compile(program, fullgraph=True)):
            out = call(*given)
            grads = torch.autograd.grad(out.square().sum(), given, allow_unused=True)
            found.append([out.detach(), *[grad for grad in grads if grad is not None]])
    copies = sum(
        node.target is torch.ops.aten.cat.default and len(node.args[0]) == 2
        for event in events
        for node in event.data["graph"].graph.nodes
    )
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))
    return {"worst": worst, "copies": copies}
