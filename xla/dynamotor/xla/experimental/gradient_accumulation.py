"""Forward and backward over several micro-batches as one loop on the device, with one set of gradients at the
end.

>>> # xs: [steps, batch, ...]
>>> loss, = gradient_accumulation(lambda x, y: loss_fn(model(x), y), (xs, ys), model)
>>> optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import require
from ..ir import Meta
from ..jax_call import draw_seeds, run
from ..subgraph import trace
from .scan import common_length


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: Sequence[torch.Tensor],
    model: torch.nn.Module,
    carried_tensors: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *more_carried: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Run `train_step` for each slice along the first dimension and add up the gradients of its mean loss.

    train_step: takes one slice of each of `iterable_tensors`, then the carried tensors; returns the loss, or
    with carried tensors (loss, *new carried). Traced once; the backward pass belongs to the loop.
    iterable_tensors: xla tensors with one common first dimension, the number of steps. model: its parameters'
    `.grad` get the sums (added to the present values). carried_tensors: handed from step to step, as one
    tuple or one after the other. Returns (mean loss, *carried). DM671 for arguments that do not fit.
    """
    xs, first = list(iterable_tensors), carried_tensors
    carried = [] if first is None else [*(first if isinstance(first, tuple) else (first,)), *more_carried]
    steps = common_length("gradient_accumulation got iterable_tensors", xs)
    require(steps, "DM671", "gradient_accumulation got iterable_tensors of length 0")
    parameters = [p for p in model.parameters() if p.requires_grad]
    n_carried = len(carried)

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        total, sums = tensors[0], tensors[1 + n_carried : 1 + n_carried + len(parameters)]
        with torch.enable_grad():
            result = train_step(*tensors[1 + n_carried + len(parameters) :], *tensors[1 : 1 + n_carried])
            loss, *new = result if n_carried else (result,)
            loss = loss / steps
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        added = [s if g is None else s + g for s, g in zip(sums, grads)]
        return [total + loss.detach().to(total.dtype), *(t.detach() for t in new), *added]

    init = [torch.zeros((), device=xs[0].device), *(c.detach() for c in carried)]
    init += [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    metas = [Meta.of(t.shape, t.dtype) for t in init] + [Meta.of(x.shape[1:], x.dtype) for x in xs]
    loop = trace(body, metas, xs[0].device, "gradient_accumulation's train_step")
    for before, after in zip(metas, loop.outputs):
        require(
            before is after,
            "DM671",
            "train_step returned other carried tensors than it got",
            why=f"{before!r} became {after!r}",
        )
    with torch.no_grad():
        results = run(
            loop, init, [x.detach() for x in xs], loop.captured, steps, draw_seeds(loop, steps, xs[0].device)
        )
    for p, grad in zip(parameters, results[1 + n_carried :]):
        p.grad = grad
    return tuple(results[: 1 + n_carried])
