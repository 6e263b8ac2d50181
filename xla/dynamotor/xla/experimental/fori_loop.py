"""Loops whose number of iterations the data decide, as one operation: jax's `while_loop`.

>>> while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, x * 2), (i, x))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from .. import jax_call
from ..errors import require
from ..ir import Meta
from ..subgraph import Subgraph, trace


def while_loop(
    cond_fn: Callable[..., torch.Tensor],
    body_fn: Callable[..., Sequence[torch.Tensor]],
    carried_inputs: Sequence[torch.Tensor],
    additional_inputs: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """While `cond_fn(*carried, *additional)` holds: `carried = body_fn(*carried, *additional)`; the last
    carried tensors.

    Both are traced once; tensors from outside may be used. No gradients (jax cannot run such loops
    backwards). DM669 where a function reads data, writes or draws; DM671 where the body's results have other
    shapes or dtypes than the carried tensors.
    """
    carried, rest, device = list(carried_inputs), list(additional_inputs), carried_inputs[0].device
    metas = [Meta.of(t.shape, t.dtype) for t in (*carried, *rest)]
    with torch.no_grad():
        cond = trace(lambda ts: [cond_fn(*ts)], metas, device, "while_loop's condition")
        body = trace(lambda ts: list(body_fn(*ts)), metas, device, "while_loop's body")
        same = body.outputs == metas[: len(carried)]
        require(
            same and not (cond.graph.draws or body.graph.draws),
            "DM671",
            "while_loop cannot carry what its body returned",
            why="it draws" if same else f"{metas[: len(carried)]} became {body.outputs}",
        )
        sizes = (len(carried), len(rest), len(cond.captured))
        key = ("while", cond.key, body.key, tuple(cond.scalars), tuple(body.scalars), sizes)
        number = jax_call.number_of(
            key, lambda: _loop(cond.without_captured(), body.without_captured(), *sizes)
        )
        return tuple(jax_call.apply(number, [*carried, *rest, *cond.captured, *body.captured]))


def fori_loop(lower: int, upper: int, body_fun: Callable[..., Any], init_val: torch.Tensor) -> torch.Tensor:
    """`init_val = body_fun(i, init_val)` for i from `lower` to `upper`, without it; `i` is an int64
    tensor.
    """
    start = torch.tensor(lower, device=init_val.device)
    return while_loop(
        lambda i, _: i < upper, lambda i, value: (i + 1, body_fun(i, value)), (start, init_val)
    )[1]


def _loop(cond: Subgraph, body: Subgraph, carried: int, rest: int, seen: int) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        state, more = tuple(arrays[:carried]), arrays[carried : carried + rest]
        for_cond, for_body = arrays[carried + rest :][:seen], arrays[carried + rest + seen :]

        def call(sub: Subgraph, now: Any, own: Any) -> Any:
            return sub.call(*now, *more, *own)

        return jax.lax.while_loop(
            lambda now: call(cond, now, for_cond)[0].reshape(()),
            lambda now: tuple(call(body, now, for_body)),
            state,
        )

    return run
