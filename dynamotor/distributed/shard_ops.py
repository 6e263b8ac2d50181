"""Sharded parameters as ops of a graph: `dynamotor::shard_gather(anchor, group)` starts an all-gather,
`shard_weights(flat, group)` waits for it and gives whole parameters, `shard_reduce(grads, anchor, group,
which, late)` takes their gradients.

>>> flat = Gather(group)(group.anchor)           # in a torch graph: two calls, so that the first may move up
>>> weights = Unshard(group)(flat, group.anchor)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..base import compat
from ..codegen.externs import FAST
from ..graph.op_definition import layout
from ..graph.spec import TensorSpec
from ..lower.lowering import lowerings
from .shard_group import ShardGroup, group_of

_library = torch.library.Library("dynamotor", "FRAGMENT")
_library.define("shard_gather(Tensor anchor, int group) -> Tensor")
_library.define("shard_weights(Tensor flat, int group) -> Tensor[]")
_library.define("shard_reduce(Tensor[] grads, Tensor anchor, int group, int[] which, bool late) -> Tensor")


def _gather(anchor: torch.Tensor, group: int) -> torch.Tensor:
    return group_of(group).start_gather()


def _weights(flat: torch.Tensor, group: int) -> list[torch.Tensor]:
    return group_of(group).finish_gather(flat)


def _reduce(
    grads: Sequence[torch.Tensor], anchor: torch.Tensor, group: int, which: Sequence[int], late: bool
) -> torch.Tensor:
    of = group_of(group)
    of.reduce(which, grads, late)
    return of.no_gradient()


def _seen_in_profiles(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op, called without PyTorch's dispatcher."""

    def call(*args: Any) -> Any:
        if not compat.profiler_enabled():
            return function(*args)
        with compat.RecordFunction(name):
            return function(*args)

    return call


_library.impl("shard_gather", _gather, "CompositeExplicitAutograd")
_library.impl("shard_weights", _weights, "CompositeExplicitAutograd")
_library.impl("shard_reduce", _reduce, "CompositeExplicitAutograd")
shard_gather = torch.ops.dynamotor.shard_gather.default
shard_weights = torch.ops.dynamotor.shard_weights.default
shard_reduce = torch.ops.dynamotor.shard_reduce.default
for _op, _function in ((shard_gather, _gather), (shard_weights, _weights), (shard_reduce, _reduce)):
    lowerings.add(_op, lambda ctx, *args, op=_op: ctx.extern(op, args, {}, agnostic=True))
    FAST[_op] = _seen_in_profiles(_op._schema.name, _function)


@layout(shard_gather)
def _gather_shape(anchor: TensorSpec, group: int) -> TensorSpec:
    of = group_of(group)
    bucket = of.gathered
    return TensorSpec.dense((bucket.numel * of.world,), bucket.dtype, anchor.device)


@layout(shard_weights)
def _weights_shape(flat: TensorSpec, group: int) -> tuple[TensorSpec, ...]:
    return group_of(group).weights


@layout(shard_reduce)
def _reduce_shape(grads: Any, anchor: TensorSpec, group: int, which: Any, late: bool) -> TensorSpec:
    return anchor


class Gather:
    """A node's target: starts to gather a group's parameters; the result is awaited."""

    communicates = True

    def __init__(self, group: ShardGroup) -> None:
        self.number = group.number
        self.__name__ = self.__qualname__ = "gather"

    def __call__(self, anchor: torch.Tensor) -> torch.Tensor:
        return shard_gather(anchor.detach(), self.number)

    def __repr__(self) -> str:
        return f"Gather({group_of(self.number)})"


class Unshard:
    """A node's target: the whole parameters of a group, differentiable through its anchor. late: their
    gradients are reduced when the backward ends, since no input of the module asks for one.
    """

    communicates = True

    def __init__(self, group: ShardGroup, late: bool = False) -> None:
        self.number, self.late = group.number, late
        self.__name__ = self.__qualname__ = "unshard"

    def __call__(self, flat: torch.Tensor, anchor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = _Unshard.apply(flat, anchor, self)
        return tuple(map(_as_before, weights, group_of(self.number).params))

    def __repr__(self) -> str:
        return f"Unshard({group_of(self.number)})"


def _as_before(weight: torch.Tensor, param: Any) -> torch.Tensor:
    """A parameter that was a DTensor before it was sharded is one again."""
    spec = getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)
    if not param.is_dtensor or spec is None:
        return weight
    from torch.distributed.tensor import DTensor  # there, where a parameter is one

    return DTensor.from_local(
        weight, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, anchor: torch.Tensor, of: Unshard) -> tuple[torch.Tensor, ...]:
        weights = tuple(shard_weights(flat, of.number))
        params = group_of(of.number).params
        frozen = [w for w, p in zip(weights, params, strict=True) if not p.sharded_param.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        ctx.set_materialize_grads(False)
        ctx.of = of
        ctx.save_for_backward(anchor)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        which = [i for i, grad in enumerate(grads) if grad is not None]
        (anchor,) = ctx.saved_tensors
        given = [g for g in grads if g is not None]
        empty = shard_reduce(given, anchor.detach(), ctx.of.number, which, ctx.of.late)
        return None, None if type(empty) is torch.Tensor else empty, None  # a trace must lead to the anchor


def without_gradients(
    compiled: Callable[..., Any], anchors: frozenset[int]
) -> Callable[..., tuple[Any, ...]]:
    """The backward without its gradients at these places, which hold nothing: the shards have theirs."""
    call = getattr(compiled, "boxed", None) or (lambda given: compiled(*given))

    def boxed(given: list[torch.Tensor]) -> tuple[Any, ...]:
        return tuple([None if i in anchors else grad for i, grad in enumerate(call(given))])

    def backward(*inputs: torch.Tensor) -> tuple[Any, ...]:
        return boxed(list(inputs))

    backward.__dict__["boxed"] = boxed  # saved values are freed as it goes here too
    return backward
