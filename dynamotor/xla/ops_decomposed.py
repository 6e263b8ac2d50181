"""Ops that PyTorch's own decompositions say as well as a rule would. Each is recorded as one op; what it
consists of is traced, once for each kind of arguments, where it is lowered.

>>> torch.nn.functional.layer_norm(x, [64])     # one recorded op: "xla::native_layer_norm"
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten

from ..base.errors import XlaError
from .dtypes import jax_dtype, torch_dtype
from .ir import Meta
from .lowering import Unsupported, aten, decomposition, decompositions, op
from .promotion import is_array
from .recent import Recent
from .subgraph import trace_call

prims = torch.ops.prims
_DEVICE = torch.device("xla", 0)  # whichever: nothing of the program is kept but its instructions
_programs = Recent(1024)


def parts_of(func: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """The rule: what the decomposition does, on arrays; where all results are empty, nothing."""
    specs = out if type(out) is tuple else (out,)
    if out is not None and all(spec is None or 0 in spec.shape for spec in specs):
        nothing = [spec and jnp.zeros(spec.shape, jax_dtype(spec.dtype)) for spec in specs]
        return nothing if type(out) is tuple else nothing[0]
    leaves, tree = tree_flatten((args, kwargs))
    metas = {i: Meta.of(x.shape, torch_dtype(x.dtype)) for i, x in enumerate(leaves) if is_array(x)}
    key = (func, tree, *[metas.get(i, (type(leaf), str(leaf))) for i, leaf in enumerate(leaves)])
    if key not in _programs:
        made: list[bool] = []

        def traced(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            decomposed = decompositions.get(func) or decomposition_table[func]
            results = decomposed(*args, **kwargs)
            results = [results] if isinstance(results, torch.Tensor) else results
            made[:] = [result is not None for result in results]
            return [result for result in results if result is not None]

        try:
            sub, _ = trace_call(traced, leaves, tree, metas, _DEVICE, str(func))
        except XlaError as error:
            raise Unsupported(str(error)) from error
        for step in sub.graph.steps.values():  # parts are no operations of the program
            step.instruction.uses -= step.item < 0
        _programs[key] = sub.call, made
    program, made = _programs.get(key)
    found = iter(program(*[leaves[i] for i in metas]))
    results = [next(found) if there else None for there in made]
    if type(out) is not tuple:
        return results[0]
    # What batch norm keeps for its backward in inference is empty on some devices.
    return [jnp.zeros(spec.shape) if spec and 0 in spec.shape else r for r, spec in zip(results, out)]


decomposition(aten._native_batch_norm_legit_no_training.default)(
    lambda x, weight, bias, mean, variance, momentum, eps: aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, variance, False, momentum, eps
    )[:3]
)

for _target in (
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
    aten.gelu.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten._euclidean_dist.default,
):
    op(_target, out=True)(partial(parts_of, _target))

# What these decompositions are made of beside aten's ops.
for _prim in (prims.broadcast_in_dim.default, prims.div.default, prims.sum.default, prims.var.default):
    decomposition(_prim)(_prim.impl_aten)  # type: ignore[attr-defined]  # set by torch._prims
