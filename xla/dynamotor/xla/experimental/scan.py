"""`scan`: a loop over the first dimension of tensors that carries a state along, compiled once for all
iterations.

>>> def step(carry, x):
...     return carry + x, carry * x
>>> last, ys = scan(step, init, xs)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynamotor.extension_api import Ambient, checked, warn_once

from .. import placement
from ..compat import TreeSpec, tree_flatten, tree_unflatten
from ..errors import require
from ..ir import Meta
from ..jax_call import draw_seeds, run, same_function
from ..recent import Recent
from ..subgraph import Subgraph, trace
from ..tensor import is_xla

Flat = list[torch.Tensor]


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Any = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Call `carry, y = fn(carry, x)` for each slice x of `xs` along the first dimension: (last carry, all y
    stacked).

    fn: traced once, differentiable; carry, x and y are tensors or nested containers of them, and each carry
    has the shapes and dtypes of `init`; y, or parts of it, may be None. It may use tensors from outside
    (parameters), not change them; it may write the carry that it got in place. partition_fn: accepted without
    effect, a warning says so: each iteration's forward is computed again in the backward pass, so only the
    carries are kept. is_fn_pure: the trace of `fn` may be used again by later calls with tensors of the same
    kinds: the values that it reads do not change, and it uses no tensors from outside. Random numbers differ
    from iteration to iteration. On CPU tensors the loop runs in Python. DM671 for arguments that do not fit.
    """
    flat_init, carry_spec = tree_flatten(init)
    flat_xs, x_spec = tree_flatten(xs)
    require(callable(fn), "DM671", f"scan got {fn!r} as its function", why="it cannot be called")
    length = common_length("scan got xs", flat_xs)
    if not all(is_xla(t) for t in flat_init + flat_xs):
        return _in_python(fn, init, flat_xs, x_spec, length)
    if partition_fn is not None:
        warn_once(
            "xla.scan.partition_fn",
            "partition_fn has no effect: scan computes each iteration again in the backward pass",
        )
    loop = (_pure_loop if is_fn_pure else _Loop.of)(fn, flat_init, flat_xs, carry_spec, x_spec, length)
    results = _Scan.apply(loop, *flat_init, *flat_xs, *loop.forward.captured)
    count = len(flat_init)
    return tree_unflatten(list(results[:count]), carry_spec), loop.unflatten(list(results[count:]))


def tree_flatten_none(pytree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves of nested containers that are not None, and what nests further ones in the same way."""
    leaves, spec = tree_flatten(pytree)
    present = [leaf is not None for leaf in leaves]

    def unflatten(given: Sequence[Any]) -> Any:
        found = iter(given)
        return tree_unflatten([next(found) if there else None for there in present], spec)

    return [leaf for leaf in leaves if leaf is not None], unflatten


def common_length(what: str, tensors: Sequence[Any]) -> int:
    """The first dimension that all tensors have; DM671 where there is none."""
    lengths = {len(x) if isinstance(x, torch.Tensor) and x.dim() else None for x in tensors}
    length = next(iter(lengths), None)
    require(
        len(lengths) == 1 and length is not None,
        "DM671",
        f"{what} without a common first dimension",
        why=f"their lengths are {sorted(map(str, lengths))}",
    )
    return checked(int, length)


def _need_same_carry(same: bool, before: Any, after: Any) -> None:
    what = "scan's function returned another carry than it got"
    require(same, "DM671", what, why=f"{before!r} became {after!r}")


def _in_python(
    fn: Callable[..., Any], carry: Any, flat_xs: Flat, x_spec: TreeSpec, length: int
) -> tuple[Any, Any]:
    require(
        length > 0,
        "DM671",
        "scan got xs of length 0",
        why="the shape of its result is unknown without an iteration",
    )
    rows: list[list[Any]] = []
    for i in range(length):
        carry, y = fn(carry, tree_unflatten([x[i] for x in flat_xs], x_spec))
        row, unflatten = tree_flatten_none(y)
        rows.append(row)
    return carry, unflatten([torch.stack(column) for column in zip(*rows)])


@dataclass
class _Loop:
    """One scan: its traced body, and how its backward pass is traced."""

    step: Callable[[Flat, Flat], tuple[Flat, Flat]]
    forward: Subgraph
    n_carry: int
    n_xs: int
    length: int
    unflatten: Callable[[Sequence[Any]], Any]  # the ys
    device: torch.device
    backwards: dict[tuple[bool, ...], Subgraph] = field(default_factory=dict)  # by what needs a gradient

    @classmethod
    def of(
        cls, fn: Callable[..., Any], init: Flat, xs: Flat, carry_spec: TreeSpec, x_spec: TreeSpec, length: int
    ) -> _Loop:
        nestings: list[Any] = []

        def step(carry: Flat, x: Flat) -> tuple[Flat, Flat]:
            new, y = fn(tree_unflatten(carry, carry_spec), tree_unflatten(x, x_spec))
            flat_new, new_spec = tree_flatten(new)
            _need_same_carry(new_spec == carry_spec, carry_spec, new_spec)
            flat_y, unflatten = tree_flatten_none(y)
            nestings.append(unflatten)
            return flat_new, flat_y

        metas = [_meta(t) for t in init] + [
            _meta(x[0]) if length else Meta.of(x.shape[1:], x.dtype) for x in xs
        ]
        count = len(init)

        def body(tensors: Flat) -> Flat:
            new, ys = step(tensors[:count], tensors[count:])
            return new + ys

        device = (init + xs)[0].device
        with torch.no_grad():
            forward = trace(body, metas, device, "scan's function", writable=count)
        for before, after in zip(metas, forward.outputs[:count]):
            _need_same_carry(before is after, before, after)
        return cls(step, forward, count, len(xs), length, nestings[0], device)

    def backward(self, needs: Sequence[bool]) -> Subgraph:
        """`_trace_backward`, done once: a pure function's loop is called many times."""
        found = self.backwards.get(tuple(needs))
        if found is None:
            found = self.backwards[tuple(needs)] = self._trace_backward(needs)
        return found

    def _trace_backward(self, needs: Sequence[bool]) -> Subgraph:
        """One iteration backwards: (gradients of the carry and, summed up so far, of captured tensors; carry,
        x, gradients of ys) -> (the same gradients one iteration earlier; gradients of x). Computes the
        iteration's forward again."""
        n, captured = self.n_carry, self.forward.captured
        wanted_x = [i for i in range(self.n_xs) if needs[n + i]]
        wanted = [c for i, c in enumerate(captured) if needs[n + self.n_xs + i]]
        carry, ys = self.forward.outputs[:n], self.forward.outputs[n:]
        state = [m for m in carry if _smooth(m)] + [_meta(c) for c in wanted]
        x_metas = self.forward.graph.leaves[n : n + self.n_xs]
        smooth_ys = [m for m in ys if _smooth(m)]

        def body(tensors: Flat) -> Flat:
            parts, at = [], 0
            for size in (len(state) - len(wanted), len(wanted), n, self.n_xs, len(smooth_ys)):
                parts.append(tensors[at : at + size])
                at += size
            grad_carry, sums, inner, x, grad_ys = parts
            with torch.enable_grad():
                inner = [t.detach().requires_grad_(_smooth(m)) for t, m in zip(inner, carry)]
                x = [t.detach().requires_grad_(i in wanted_x) for i, t in enumerate(x)]
                new, out = self.step([t.clone() for t in inner], x)  # it may write its carry
                pairs = list(zip([t for t, m in zip(new, carry) if _smooth(m)], grad_carry))
                pairs += zip([t for t, m in zip(out, ys) if _smooth(m)], grad_ys)
                pairs = [(o, g) for o, g in pairs if o.requires_grad]
                into = [t for t, m in zip(inner, carry) if _smooth(m)] + wanted + [x[i] for i in wanted_x]
                grads: Any = [None] * len(into)
                if pairs:
                    grads = torch.autograd.grad(
                        [o for o, _ in pairs], into, [g for _, g in pairs], allow_unused=True
                    )
            grads = [
                torch.zeros(t.shape, dtype=t.dtype, device=t.device) if g is None else g
                for t, g in zip(into, grads)
            ]
            first = len(grad_carry)
            summed = [total + g for total, g in zip(sums, grads[first : first + len(wanted)])]
            return grads[:first] + summed + grads[first + len(wanted) :]

        return trace(body, [*state, *carry, *x_metas, *smooth_ys], self.device, "scan's backward pass")


_SCAN_COMPUTATION_CACHE = Recent(64)  # loops of pure functions; torch_xla's tests clear it by this name


def _pure_loop(
    fn: Callable[..., Any], init: Flat, xs: Flat, carry_spec: TreeSpec, x_spec: TreeSpec, length: int
) -> _Loop:
    """The loop of a pure function, traced once for tensors of these kinds."""
    metas = tuple([_meta(t) for t in init + xs])
    key = (same_function(fn), metas, carry_spec, x_spec, length, Ambient.current(), placement.settings())
    loop = _SCAN_COMPUTATION_CACHE.get(key)
    if loop is None:
        loop = _Loop.of(fn, init, xs, carry_spec, x_spec, length)
        if not loop.forward.captured:  # else it would keep tensors from outside alive, or use old ones
            _SCAN_COMPUTATION_CACHE[key] = loop
    return loop


class _Scan(torch.autograd.Function):
    """(carries and ys of a loop), differentiable once."""

    @staticmethod
    def forward(ctx: Any, loop: _Loop, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, m = loop.n_carry, loop.n_xs
        init, xs, captured = list(tensors[:n]), list(tensors[n : n + m]), list(tensors[n + m :])
        ctx.loop, ctx.needs = loop, list(ctx.needs_input_grad[1:])
        keep = any(ctx.needs)
        seeds = draw_seeds(loop.forward, loop.length, loop.device)
        results = run(loop.forward, init, xs, captured, loop.length, seeds, keep_carries=keep)
        n_out = len(loop.forward.outputs)
        if keep:
            body = ctx.backward_body = loop.backward(ctx.needs)
            # Rows that the backward pass does not read need not be kept. Captured tensors come last, so that
            # autograd notices when they are changed in between.
            reads, first = body.reads(), len(body.outputs) - sum(ctx.needs[n : n + m])
            rows = [t if first + i in reads else None for i, t in enumerate([*results[n_out:], *xs])]
            ctx.save_for_backward(*rows, seeds, *body.captured)
        ctx.mark_non_differentiable(
            *[t for t in results[:n_out] if not (t.is_floating_point() or t.is_complex())]
        )
        return tuple(results[:n_out])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        loop, needs = ctx.loop, ctx.needs
        n, m = loop.n_carry, loop.n_xs
        saved = list(ctx.saved_tensors)
        seeds, captured, outputs = saved[n + m], saved[n + m + 1 :], loop.forward.outputs
        metas = outputs[:n] + loop.forward.graph.leaves[n : n + m]
        kept = [
            torch.empty((loop.length, *meta.shape), dtype=meta.dtype, device=loop.device) if t is None else t
            for t, meta in zip(saved, metas)
        ]
        smooth = [g for g, meta in zip(grads, outputs) if _smooth(meta)]
        n_smooth = sum(map(_smooth, outputs[:n]))
        wanted = [c for i, c in enumerate(loop.forward.captured) if needs[n + m + i]]
        sums = [torch.zeros(c.shape, dtype=c.dtype, device=c.device) for c in wanted]
        init, rows = smooth[:n_smooth] + sums, [*kept, *smooth[n_smooth:]]
        results = run(ctx.backward_body, init, rows, captured, loop.length, seeds, reverse=True)
        carry_grads, rest = iter(results[:n_smooth]), iter(results[n_smooth : n_smooth + len(wanted)])
        x_grads = iter(results[n_smooth + len(wanted) :])
        found: list[Any] = [next(carry_grads) if _smooth(meta) else None for meta in outputs[:n]]
        found += [next(x_grads) if need else None for need in needs[n : n + m]]
        found += [next(rest) if need else None for need in needs[n + m :]]
        return None, *found


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta.of(tensor.shape, tensor.dtype)


def _smooth(meta: Meta) -> bool:
    return meta.dtype.is_floating_point or meta.dtype.is_complex
