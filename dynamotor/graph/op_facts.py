"""Facts of an aten op's schema about aliasing and effects, worked out once per overload.

>>> facts(torch.ops.aten.add_.Tensor).writes
(0,)
>>> facts(torch.ops.aten.t.default).is_view
True
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.compat import OpOverload

aten = torch.ops.aten

# Ops whose schema hides a write: position of the arguments written when the op runs in training mode.
HIDDEN_WRITES: dict[OpOverload, tuple[int, ...]] = {aten.native_batch_norm.default: (3, 4)}
# Views in the schema's eyes that allocate, and the reverse.
_NOT_VIEWS = {aten.lift_fresh.default, aten.lift.default}
# Pointwise ops without the tag.
_POINTWISE = {
    getattr(aten, name).default
    for name in (
        "hardswish",
        "hardswish_backward",
        "hardsigmoid_backward",
        "hardtanh_backward",
        "elu_backward",
        "softplus_backward",
        "log_sigmoid_backward",
        "mish_backward",
        "leaky_relu_backward",
        "_prelu_kernel",
        "floor_divide",
    )
} | {aten.rsub.Tensor, aten.rsub.Scalar, aten.lerp.Scalar, aten.lerp.Tensor, aten.clamp.Tensor}
# Ops that only raise, as the data are, and give nothing: what follows the decompositions of solvers.
_ASSERTIONS = {aten._linalg_check_errors.default}
# Ops, and their in-place forms, that raise where their data are out of range: positions, targets, counts,
# probabilities, divisors of integers, matrices without the factors asked for, ranges that are not finite.
_BOUNDED = {
    "index", "index_put", "index_select", "index_add", "index_copy", "index_fill", "index_reduce",
    "gather", "scatter", "scatter_add", "scatter_reduce", "take", "put", "embedding",
    "_embedding_bag", "bincount", "_embedding_bag_forward_only", "nll_loss_forward",
    "nll_loss2d_forward", "masked_scatter", "multinomial", "max_unpool2d", "max_unpool3d",
    "multi_margin_loss", "multilabel_margin_loss_forward", "_ctc_loss", "binary_cross_entropy",
    "poisson", "repeat_interleave", "floor_divide", "remainder", "fmod", "embedding_renorm",
    "_linalg_eigh", "_linalg_svd", "_linalg_eigvals", "linalg_eig", "linalg_eigvals", "linalg_pinv",
    "linalg_lstsq", "linalg_lu_solve", "lu_unpack", "cholesky", "cholesky_inverse", "geqrf", "ormqr",
    "histc", "histogram", "_histogramdd_bin_edges", "_histogramdd_from_bin_cts",
    "_histogramdd_from_bin_tensors",
    "segment_reduce", "_ctc_loss_backward", "linalg_ldl_solve",
    "_pack_padded_sequence", "fake_quantize_per_channel_affine_cachemask",
}  # fmt: skip
# The classes themselves of the errors that they raise then.
DATA_ERRORS = (IndexError, RuntimeError, ValueError, torch.linalg.LinAlgError)
_BOUNDED_FORMS = {
    *(aten.bernoulli.default, aten.bernoulli_.Tensor, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
    *(aten.div.Tensor_mode, aten.div_.Tensor_mode, aten.quantize_per_tensor.tensor_qparams),
}
# Calls that answer about a tensor without reading its data.
_METADATA = {aten.is_same_size.default}


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts of one overload.

    writes: positions (or names, for keyword-only arguments) of the arguments that the op writes. returns: for
    each returned value, the position or name of the argument that it is, or None for a new tensor. is_view:
    the result shares storage with argument 0. changes_metadata: it resizes, restrides or swaps the storage of
    its argument. data_dependent: shape or value of the result depends on the data. random: it draws from a
    generator. pointwise: each element of the result depends on the same element of each argument. asserts: it
    gives nothing and raises or not as the data are. bounded: it gives something, or raises, as the data are
    (an op from outside of PyTorch may, for all that is known).
    """

    writes: tuple[int | str, ...]
    returns: tuple[int | str | None, ...]
    is_view: bool
    changes_metadata: bool
    data_dependent: bool
    random: bool
    pointwise: bool
    elementwise: bool
    asserts: bool
    bounded: bool


# Elementwise ops that PyTorch does not tag.
_UNTAGGED = {
    aten.complex.default,
    aten.polar.default,
    aten.floor_divide.default,
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.mish_.default,
    aten.mish_backward.default,
    aten.hardtanh_backward.default,
}


@functools.cache
def facts(func: OpOverload) -> OpFacts:
    """The facts of an overload (memoised)."""
    schema = func._schema
    written: list[int | str] = []
    writers: dict[str, int | str] = {}  # by the alias that a result has; a list of tensors has none
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            where: int | str = argument.name if argument.kwarg_only else position
            written.append(where)
            for name in argument.alias_info.before_set:
                writers[name] = where
    returns: list[int | str | None] = []
    for value in schema.returns:
        alias = value.alias_info
        returns.append(
            next((writers[n] for n in alias.before_set if n in writers), None) if alias is not None else None
        )
    tags = set(func.tags)
    is_view = (
        not written
        and func not in _NOT_VIEWS
        and bool(schema.returns)
        and any(r.alias_info is not None for r in schema.returns)
    )
    return OpFacts(
        writes=tuple(written) or HIDDEN_WRITES.get(func, ()),
        returns=tuple(returns),
        is_view=is_view,
        changes_metadata=torch.Tag.inplace_view in tags or func is aten.set_.source_Storage,
        data_dependent=bool(tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
        and func not in _METADATA,
        random=torch.Tag.nondeterministic_seeded in tags,
        pointwise=(torch.Tag.pointwise in tags or func in _POINTWISE) and not written,
        elementwise=(torch.Tag.pointwise in tags or func in _UNTAGGED)
        and torch.Tag.nondeterministic_seeded not in tags
        and written in ([], [0])
        and len(schema.returns) == 1
        and func.namespace == "aten",
        asserts=func in _ASSERTIONS,
        bounded=is_custom(func)
        or func.overloadpacket.__name__.rstrip("_") in _BOUNDED
        or func in _BOUNDED_FORMS,
    )


def written_names(func: OpOverload) -> list[str]:
    """The names of the arguments that an op writes."""
    arguments = func._schema.arguments
    return [place if isinstance(place, str) else arguments[place].name for place in facts(func).writes]


def is_custom(target: object) -> bool:
    """Whether the op (and its shape rule) comes from outside of PyTorch."""
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prims", "mkldnn", "dynamotor")


# Ops that address memory, or go through it in its order: their results depend on their operands' strides.
_ADDRESS_MEMORY = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten._reshape_alias.default,
}


def sees_strides(target: object) -> bool:
    """Whether a call may tell two tensors of equal elements and other strides apart: a pass that lays values
    out otherwise than eager gives such a call eager's strides back.

    Attention draws by index; foreign code may do anything with memory.
    """
    if not isinstance(target, OpOverload):
        return target is not operator.getitem
    draws = facts(target).random and "attention" not in target._schema.name
    return draws or target in _ADDRESS_MEMORY or is_custom(target)


def draws(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an op draws random numbers: attention does for dropout alone."""
    if not facts(target).random or "attention" not in target._schema.name:
        return facts(target).random
    given = dict(zip((argument.name for argument in target._schema.arguments), args)) | dict(kwargs)
    return given.get("dropout_p", 0.0) != 0.0


def may_raise(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call gives something, or raises, as the data are."""
    name = target.overloadpacket.__name__
    if name == "searchsorted":  # an order that names no element
        return kwargs.get("sorter") is not None
    if target in (aten.masked_fill.Tensor, aten.masked_fill_.Tensor):
        value = args[2] if len(args) > 2 else kwargs["value"]
        return may_overflow(value.dtype, args[0].dtype)
    return facts(target).bounded


def may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers of one dtype are beyond the range of another: `item` and fills raise for these."""
    if source is target or torch.bool in (source, target):
        return False
    limits = [
        torch.finfo(t) if t.is_floating_point or t.is_complex else torch.iinfo(t) for t in (source, target)
    ]
    return limits[0].max > limits[1].max or limits[0].min < limits[1].min


def is_collective(target: object) -> bool:
    """Whether a call is part of a collective: every rank makes it, in the same order, whether or not anybody
    uses the result.
    """
    if not isinstance(target, OpOverload):
        return False
    return target.namespace == "_c10d_functional" or target.name().startswith("dynamotor::shard_")


def meets_ranks(target: object) -> bool:
    """Whether a call takes part in communication, our own ops for gradient buckets (`distributed/ops.py`)
    among them.
    """
    return (
        is_collective(target)
        or isinstance(target, OpOverload)
        and target.name().startswith("dynamotor::bucket_")
    )


# In-place ops that only look at the same memory another way, and the view op that says how.
VIEW_FORMS: dict[OpOverload, OpOverload] = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}
