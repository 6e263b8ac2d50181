"""The loop op behind `scan`: its body is a traced function, compiled once however many iterations there are.

>>> body = trace(step, metas, device, "scan")
>>> run(body, init, xs, body.captured, 10)      # [*carry, *ys]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import rng
from .lowering import op
from .subgraph import Subgraph

torch.library.define(
    "dynamotor_xla::scan",
    "(Tensor[] init, Tensor[] xs, Tensor[] captured, Tensor? scalars, Tensor? seeds, int length, int body, bool reverse,"
    " bool keep_carries) -> Tensor[]",
)

bodies: list[Subgraph] = []
_numbers: dict[tuple, int] = {}


def intern(body: Subgraph) -> int:
    """The number of a body; equal bodies get one number, so that the program around them is compiled once."""
    number = _numbers.get(body.key)
    if number is None:
        number = _numbers[body.key] = len(bodies)
        bodies.append(body)
    return number


def draw_seeds(body: Subgraph, length: int, device: torch.device) -> torch.Tensor | None:
    """The random state of each iteration, int64 [length, 2]; None where the body draws nothing."""
    return (
        torch.randint(0, 2**32, (length, 2), dtype=torch.int64, device=device) if body.graph.draws else None
    )


def run(
    body: Subgraph,
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    captured: list[torch.Tensor],
    length: int,
    seeds: torch.Tensor | None = None,
    reverse: bool = False,
    keep_carries: bool = False,
) -> list[torch.Tensor]:
    """The loop: (carry..., slices of xs..., captured...) -> (carry..., y...) `length` times; [*last carry,
    *stacked ys].

    With `keep_carries` followed by the carries with which each iteration began, stacked. `reverse`: from the
    last slice to the first.
    """
    device = (init + xs)[0].device
    scalars = torch.tensor(body.scalars, dtype=torch.float64).to(device) if body.scalars else None
    return torch.ops.dynamotor_xla.scan(
        init, xs, captured, scalars, seeds, length, intern(body), reverse, keep_carries
    )


@torch.library.register_fake("dynamotor_xla::scan")
def _fake(
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    captured: list[torch.Tensor],
    scalars: torch.Tensor | None,
    seeds: torch.Tensor | None,
    length: int,
    body: int,
    reverse: bool,
    keep_carries: bool,
) -> list[torch.Tensor]:
    like = (init + xs + captured)[0]
    metas = bodies[body].outputs
    carry = [like.new_empty(meta.shape, dtype=meta.dtype) for meta in metas[: len(init)]]
    stacked = metas[len(init) :] + (metas[: len(init)] if keep_carries else [])
    return carry + [like.new_empty((length, *meta.shape), dtype=meta.dtype) for meta in stacked]


@op(torch.ops.dynamotor_xla.scan)
def _scan(
    init: list[jax.Array],
    xs: list[jax.Array],
    captured: list[jax.Array],
    scalars: jax.Array | None,
    seeds: jax.Array | None,
    length: int,
    body: int,
    reverse: bool,
    keep_carries: bool,
) -> list[Any]:
    program, draws = bodies[body].program, bodies[body].graph.draws
    numbers = [] if scalars is None else [scalars]

    def step(carry: list[jax.Array], inputs: Any) -> Any:
        slices, seed = inputs
        seed = [] if seed is None else [rng.keys_from(seed, draws)]
        results = program(*carry, *slices, *captured, *numbers, *seed)
        return results[: len(carry)], (results[len(carry) :], carry if keep_carries else [])

    seeds = None if seeds is None else seeds.astype(jnp.uint32)
    carry, (ys, carries) = jax.lax.scan(step, list(init), (list(xs), seeds), length=length, reverse=reverse)
    return [*carry, *ys, *carries]
