"""Ops whose result's size (or number) depends on data: inside a trace that goes on all the same, each gives a
new unbacked symbol. One row an op.

>>> with shape_mode(DataSizes(env)): mask.nonzero().shape
(u0, 2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.registry import Registry
from .sizes import INFINITY, Dim, ShapeEnv, Size, equal, maximum
from .spec import TensorSpec, aten, numel
from .symbolic_rules import Unknown, broadcast, require

# (count, specs of the op's arguments) -> what `infer_spec` gives. `count(lo, hi, of=position of a tensor,
# as_=shape)` makes the symbol; with `of` the one that was made for the same contents before.
data_rules: Registry[OpOverload, Callable[..., Any]] = Registry("data-dependent size")
data_rule = data_rules.register
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


class DataSizes:
    """Where a trace's unbacked symbols come from. `met`: such an op was met since `begin()`; `made`: symbols
    that it made, for the nodes that bind them.
    """

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.begin()
        self._counted: dict[Any, tuple[Any, Size]] = {}

    def begin(self) -> DataSizes:
        """Another call of the program."""
        self.met, self.made = False, list[Size]()
        return self

    def infer(self, func: OpOverload, args: tuple, specs: tuple, kwargs: dict[str, Any]) -> Any:
        """The specs (or the number) of a data-dependent op's result; raises Unknown where no rule says."""

        def count(
            lo: Dim = 0, hi: Dim = INFINITY, of: int | None = None, shape: tuple[Dim, ...] = ()
        ) -> Size:
            if of is None:
                return self._new(lo, hi)
            tensor = args[of] if isinstance(args[of], torch.Tensor) else _only(args[of])
            if tensor.is_inference():  # nobody counts its writes
                return self._new(lo, hi)
            key = func is aten._local_scalar_dense.default, id(tensor), tensor._version, shape
            if key not in self._counted:
                self._counted[key] = tensor, self._new(lo, hi)
            return self._counted[key][1]

        found = data_rules[func](count, *specs, **kwargs)
        self.met = True
        return found

    def _new(self, lo: Dim, hi: Dim) -> Size:
        made = self.env.unbacked(lo if type(lo) is int else 0, hi if type(hi) is int else INFINITY)
        if type(hi) is Size:
            self.env.tell(">=", hi - made)
        self.made.append(made)
        return made


def _only(indices: Any) -> Any:
    """The only tensor of an index, which is a mask."""
    (tensor,) = [i for i in indices if i is not None]
    return tensor


@data_rule(aten.nonzero.default)
def _nonzero(count: Any, x: TensorSpec) -> TensorSpec:
    n = count(hi=x.numel, of=0, shape=x.shape)
    return TensorSpec((n, len(x.shape)), (1, maximum(n.env, n, 1)), torch.int64, x.device)


@data_rule(aten.index.Tensor)
def _masked(count: Any, x: TensorSpec, indices: Any) -> TensorSpec:
    at = [d for d, i in enumerate(indices) if i is not None]
    mask = indices[at[0]]
    require(len(at) == 1 and mask.dtype is torch.bool)
    end = at[0] + len(mask.shape)
    require(equal(mask.shape, x.shape[at[0] : end]))
    require(at[0] == 0 and len(x.shape) - end < 2 or x.is_contiguous)  # else the layout is another one
    n = count(hi=mask.numel, of=1, shape=mask.shape)
    return TensorSpec.dense((*x.shape[: at[0]], n, *x.shape[end:]), x.dtype, x.device)


@data_rule(aten.masked_select.default)
def _masked_select(count: Any, x: TensorSpec, mask: TensorSpec) -> TensorSpec:
    shape = broadcast([x.shape, mask.shape])
    return TensorSpec.dense((count(hi=numel(shape), of=1, shape=shape),), x.dtype, x.device)


@data_rule(aten._unique2.default)
def _unique(
    count: Any, x: TensorSpec, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[TensorSpec, ...]:
    n = count(hi=x.numel)
    places = (n,), x.shape if return_inverse else (0,), (n,) if return_counts else (0,)
    dtypes = x.dtype, torch.int64, torch.int64
    return tuple([TensorSpec.dense(s, d, x.device) for s, d in zip(places, dtypes, strict=True)])


@data_rule(aten.unique_consecutive.default)
def _unique_consecutive(
    count: Any, x: TensorSpec, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> tuple[TensorSpec, ...]:
    require(dim is None)
    return _unique(count, x, True, return_inverse, return_counts)


@data_rule(aten.repeat_interleave.Tensor)
def _repeat_interleave(count: Any, repeats: TensorSpec, *, output_size: Any = None) -> TensorSpec:
    return TensorSpec.dense((count(),), repeats.dtype, repeats.device)


@data_rule(aten.bincount.default)
def _bincount(count: Any, x: TensorSpec, weights: Any = None, minlength: int = 0) -> TensorSpec:
    floats = {None: torch.int64, torch.float32: torch.float32}
    dtype = floats.get(weights and weights.dtype, torch.float64)
    return TensorSpec.dense((count(lo=minlength),), dtype, x.device)


@data_rule(aten._local_scalar_dense.default)
def _item(count: Any, x: TensorSpec) -> Size:
    require(x.dtype in _INTEGERS)  # what else a tensor holds is no size
    limits = torch.iinfo(x.dtype)
    return count(lo=max(limits.min, -INFINITY), hi=min(limits.max, INFINITY), of=0)


def holds(kind: str, value: int, negated: bool) -> None:
    """`torch._check` of a comparison with 0 (a node of graphs). The call is repeated in eager, which raises
    what the user wrote.
    """
    answer = value >= 0 if kind == ">=" else value == 0
    if answer if negated else not answer:
        raise RuntimeError("what torch._check(...) says does not hold")


__all__ = ["DataSizes", "Unknown", "data_rules", "holds"]
