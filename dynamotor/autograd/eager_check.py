"""The check mode before the aten graph: the trace of a torch graph, split into a forward and its
backwards and joined to autograd again, computes the torch graph's results.

Both run once, op by op, on copies of the examples; results, written inputs and gradients are compared, so
that a gradient left out, a decomposition of another function, saved values in another order or a lost write
is an error (DM922) that names the result. What comes after the aten graphs is checked in
`codegen/checked.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.config import config
from ..base.errors import InternalError
from ..base.events import counters, silence
from ..graph.private_draws import PrivateDraws
from ..graph.repeatable import may_run_again
from ..graph.spec import CPU, Compiled, duplicate, far

Values = dict[str, torch.Tensor | None]
_FAR = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2, torch.complex64: 1e-2}
_FAR_HALF = 0.1


def check_traced(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    graded: Sequence[bool],
    trace: Callable[[Sequence[Any]], Compiled],
) -> None:
    """Compare what `trace(examples)` gives with the torch graph; InternalError DM922 where they differ."""
    if not may_run_again(gm, inputs):
        return
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    draws = PrivateDraws({CPU: torch.get_rng_state()})
    try:
        with draws:
            want = _values(gm.forward, _copies(inputs, graded), names)
    except Exception:  # eager refuses the copies (a leaf that is written): nothing to compare with
        counters["check"]["graphs that eager refuses"] += 1
        return
    given, counted = _copies(inputs, graded), counters["fallback"].copy()
    with config.patch(check=False, fallback_random=True), silence():
        run = trace(given)
        with PrivateDraws(draws.states) if draws.has_drawn else contextlib.nullcontext():
            got = _values(run, given, names)
    counters["fallback"].clear()
    counters["fallback"].update(counted)
    for name, value in want.items():
        if (why := _difference(got[name], value)) is not None:
            cure = "report the program; backend='eager' runs it as it is"
            raise InternalError("DM922", f"{name} of a traced graph is not eager's", why=why, cure=cure)


def _copies(inputs: Sequence[Any], graded: Sequence[bool]) -> list[Any]:
    return [
        duplicate(x.detach()).requires_grad_(g) if isinstance(x, torch.Tensor) else x
        for x, g in zip(inputs, graded, strict=True)
    ]


def _values(run: Compiled, inputs: Sequence[Any], names: Sequence[str]) -> Values:
    """Results, inputs as they are then, and the gradients of sums of the results with unequal weights."""
    results = [x for x in run(*inputs) if isinstance(x, torch.Tensor)]
    found: Values = {f"result {k}": x.detach() for k, x in enumerate(results)}
    tensors = {name: x for name, x in zip(names, inputs, strict=True) if isinstance(x, torch.Tensor)}
    found |= {f"the input {name}": x.detach() for name, x in tensors.items()}
    roots = [x for x in results if x.requires_grad]
    leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    if roots and leaves:
        weights = [torch.linspace(0.5, 1.5, x.numel()).to(x.dtype).view(x.shape) for x in roots]
        grads = torch.autograd.grad(roots, list(leaves.values()), weights, allow_unused=True)
        found |= {f"the gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}
    return found


def _difference(got: torch.Tensor | None, want: torch.Tensor | None) -> str | None:
    if got is None or want is None:
        other = got if want is None else want
        return None if other is None or not other.any() else "it is absent in one of them"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype}{list(got.shape)}, and not {want.dtype}{list(want.shape)}"
    narrow = want.itemsize < 2 and want.is_floating_point()
    if want.layout is not torch.strided or want.is_meta or narrow:
        return None
    off = far(got, want, _FAR.get(want.dtype, _FAR_HALF))
    return f"{int(off.sum())} of {off.numel()} elements differ" if off.any() else None
