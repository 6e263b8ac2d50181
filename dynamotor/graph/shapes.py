"""Shape inference: an op's results, from the specs of its arguments.

The op's definition answers (`op_definition.py`), through a memo; PyTorch's meta kernel where the definition
has no rule or leaves the case to it.

>>> a, b = TensorSpec.dense((2, 3), torch.float32), TensorSpec.dense((3, 4), torch.float32)
>>> infer_spec(torch.ops.aten.mm.default, (a, b), {}).shape
(2, 4)
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..base import compat
from ..base.compat import OpOverload
from ..base.errors import DynamotorError
from ..base.events import counters
from .op_definition import PASS, Shape, Unknown, broadcast, definition, operands, require
from .op_facts import facts, is_custom
from .result_strides import (
    dense_in_order,
    iterated_stride,
    preserved_stride,
    suggests_channels_last,
)
from .sizes import DataDependent, Size, hint, is_symbolic, is_unbacked, leaves_in, mapped
from .spec import CPU, TensorSpec, aten, contiguous_stride, device_with_index
from .sym_int import from_torch, to_torch

_META = torch.device("meta")
_onednn_is_on, _function_modes = compat.onednn_enabled, compat.count_function_modes
_MEMO_LIMIT = 20_000
_memo: dict[Any, Any] = {}


class UnsupportedOp(DynamotorError):
    """The op cannot be traced: it swaps or resizes storage, has no shape rule, or cannot be made
    functional.
    """


def infer_spec(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Spec, tuple of specs, number or None that `func` returns; tensors in the arguments are `TensorSpec`s.

    Raises DataDependent, UnsupportedOp, or the op's own error for arguments that do not fit.
    """
    try:
        key = (
            func,
            argument_key(args),
            tuple((name, argument_key(value)) for name, value in kwargs.items()) if kwargs else (),
            settings_of_shapes(),
        )
        found = _memo.get(key, PASS)
        if found is not PASS:
            return found
    except TypeError:  # an argument that cannot be hashed
        key = None
    infer = _infer_as_on_cpu if _on_xla((args, kwargs)) else _infer
    try:
        result = infer(func, args, kwargs)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, AssertionError):
        if not has_symbols((args, kwargs)):
            raise
        result = infer(func, *mapped(_specialised, (args, kwargs)))  # a kernel that takes plain numbers only
        counters["specialised"][str(func)] += 1
    if key is not None and not is_custom(
        func
    ):  # a fake implementation in Python may read something else next time
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        _memo[key] = result
    return result


def at_hints(value: Any) -> Any:
    """Arguments at the sizes of the call that is being compiled; asks nothing."""
    return mapped(lambda leaf: leaf.hinted() if type(leaf) is TensorSpec else hint(leaf), value)


def _specialised(value: Any) -> Any:
    """An argument with plain numbers in the place of sizes: each becomes a guard."""
    if type(value) is TensorSpec:
        return replace(
            value,
            shape=tuple(map(int, value.shape)),
            stride=tuple(map(int, value.stride)),
            offset=int(value.offset),
        )
    return int(value) if type(value) is Size else value


def settings_of_shapes() -> tuple[Any, ...]:
    """What answers depend on besides the arguments: types and devices that are left out, and the library of a
    convolution, which lays its result out."""
    device = torch.get_default_device() if _function_modes() else None  # a default device is such a mode
    return torch.get_default_dtype(), device, _onednn_is_on(), torch.get_num_threads()


def _infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    op = definition(func)
    symbolic = (op.shape or op.requires) is not None and has_symbols((args, kwargs))
    try:
        if op.requires is not None and symbolic:
            op.requires(*args, **kwargs)
        if op.layout is None and facts(func).elementwise:
            return _infer_pointwise(func, args, kwargs)
        if op.shape is not None and symbolic:
            found = op.shape(*args, **kwargs)
            if type(found) is TensorSpec and is_unbacked(*found.shape, found.offset):
                return found  # a view of a part that data decides: at the hints it may be outside
            return _completed(found, infer_spec(func, *at_hints((args, kwargs))))
    except Unknown:
        pass
    result = PASS
    try:
        if op.contiguous is not None and _are_row_major((args, kwargs)):
            result = op.contiguous(*args, **kwargs)
        if result is PASS and op.layout is not None:
            result = op.layout(*args, **kwargs)
    except Unknown:  # the meta kernel raises PyTorch's error
        result = PASS
    return infer_by_meta_kernel(func, args, kwargs) if result is PASS else result


def _are_row_major(value: Any) -> bool:
    """Whether all tensors are row-major, of one device, have elements, and sizes that are numbers."""
    tensors = [leaf for leaf in leaves_in(value) if type(leaf) is TensorSpec]
    plain = all(
        not is_symbolic((*t.shape, *t.stride))
        and t.stride == contiguous_stride(t.shape)
        and not suggests_channels_last(t)
        and 0 not in t.shape
        for t in tensors
    )
    return plain and len({t.device for t in tensors}) == 1


def _completed(shapes: Any, like: Any) -> Any:
    """The specs (and numbers) that a `shape` rule and the answer at the hints give together; Unknown where
    they disagree.
    """
    if isinstance(like, tuple):
        several = isinstance(shapes, list)
        return tuple(
            [
                None if spec is None else _completed(shapes[k] if several else shapes, spec)
                for k, spec in enumerate(like)
            ]
        )
    if type(like) is int:
        require(hint(shapes) == like)
        return shapes
    spec = shapes if type(shapes) is TensorSpec else _laid_out(tuple(shapes), like)
    if spec.hinted() != like:
        raise Unknown
    if any(
        type(n) is Size and n.hint < 2 for n in spec.shape
    ):  # 0 and 1 are programs of their own, computed sizes too
        return replace(spec, shape=tuple([int(n) if hint(n) < 2 else n for n in spec.shape]))
    return spec


def _laid_out(shape: Shape, like: TensorSpec) -> TensorSpec:
    """A new tensor of this shape whose dimensions have `like`'s order in memory."""
    if like.is_contiguous and like.stride == contiguous_stride(like.shape):
        return TensorSpec.dense(shape, like.dtype, like.device)
    order = sorted(range(len(shape)), key=lambda d: (like.stride[d], like.shape[d], -d))
    return TensorSpec(shape, dense_in_order(order, shape), like.dtype, like.device)


def _on_xla(value: Any) -> bool:
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:
        return any(map(_on_xla, value.values() if kind is dict else value))
    device = value.device if kind is TensorSpec else value
    return type(device) is torch.device and device.type == "xla"


def _infer_as_on_cpu(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """XLA tensors report the shapes, strides and types that CPU tensors would."""
    result = _infer(func, *mapped(functools.partial(_moved, CPU), (args, kwargs)))
    return mapped(functools.partial(_moved, device_of_result(args, kwargs)), result)


def _moved(device: torch.device, value: Any) -> Any:
    if type(value) is TensorSpec:
        return replace(value, device=device)
    return device if type(value) is torch.device else value


def infer_by_meta_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The meta kernel's results, pointwise ones laid out as the CPU kernels do it."""
    check_supported(func, args)
    result = _run_meta_kernel(func, args, kwargs)
    if type(result) is TensorSpec and facts(func).pointwise:
        return result.with_stride(iterated_stride(iterated_operands(func, args, result.dtype), result.shape))
    if (
        type(result) is TensorSpec
        and "_scatter" in func.__name__  # of an expanded tensor, before PyTorch 2.13
        and not is_symbolic((*result.shape, *result.stride))
        and any(stride == 0 and size > 1 for size, stride in zip(result.shape, result.stride, strict=True))
    ):
        return TensorSpec.dense(result.shape, result.dtype, result.device)
    return result


# Pointwise ops that write into `empty_like(x)`, which keeps strides where sizes are 1.
_MADE_LIKE_THEIR_OPERAND = {
    aten.hardtanh.default, aten.nan_to_num.default, aten.deg2rad.default, aten.rad2deg.default,
    aten.xlogy.Scalar_Other,
}  # fmt: skip


def _infer_pointwise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TensorSpec:
    """Shape and strides as TensorIterator finds them; the op itself, run on no elements, tells the dtype. In
    place: the first argument's, when the others fit into it.

    The meta kernels of pointwise ops are Python (torch 2.13), and import sympy and torch._dynamo: over a
    second.
    """
    shape = broadcast(operands(args))
    out = run_small(func, 0, args, kwargs)
    if not isinstance(out, torch.Tensor):
        raise Unknown
    if facts(func).writes:
        require(
            facts(func).writes == (0,)
            and len(shape) == len(args[0].shape)
            and all(a == b for a, b in zip(shape, args[0].shape))
        )
        return args[0]
    over = iterated_operands(func, args, out.dtype)
    stride = preserved_stride(over[0]) if func in _MADE_LIKE_THEIR_OPERAND else iterated_stride(over, shape)
    return TensorSpec(shape, stride, out.dtype, device_of_result(args, kwargs))


def run_small(func: OpOverload, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's results for real tensors of these types on the CPU with so many elements a dimension (those
    without dimensions keep their one element: they promote otherwise).
    """
    try:
        with torch.no_grad(), compat.DisableAutocast():
            args, kwargs = mapped(functools.partial(_small, size), (args, kwargs))
            return func(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise Unknown from error  # the meta kernel raises PyTorch's error, or has an answer


def _small(size: int, value: Any) -> Any:
    if type(value) is TensorSpec:
        return torch.ones([size] * len(value.shape), dtype=value.dtype, device="cpu")
    return CPU if type(value) is torch.device else hint(value)


def specs_in(value: Any) -> Any:
    """A node's arguments as `infer_spec` takes them: what nodes hold, in plain lists (fx keeps lists of a
    class of its own).
    """
    if isinstance(value, fx.Node):
        return value.meta["val"]
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)([specs_in(v) for v in value])
    return {name: specs_in(v) for name, v in value.items()} if isinstance(value, dict) else value


def call(graph: fx.Graph, target: Any, *args: Any, spec: Any = None, **kwargs: Any) -> fx.Node:
    """A new call_function node at the graph's insertion point; its spec is inferred unless given."""
    if spec is None:
        spec = infer_spec(target, specs_in(args), specs_in(kwargs))
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = spec
    return node


# Overloads whose number PyTorch wraps as a 0-d tensor.
_OF_NUMBERS = frozenset(
    (
        "Scalar",
        "Scalar_mode",
        "Scalar_Other",
        "Scalar_Self",
        "Scalar_Tensor",
        "n_scalar",
        "x_scalar",
        "other_scalar",
        "self_scalar",
    )
)
_WRAPPING = frozenset((aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_right_shift.Tensor_Scalar))


def iterated_operands(func: OpOverload, args: tuple[Any, ...], result: torch.dtype) -> list[TensorSpec]:
    """What TensorIterator iterates over: the tensors, and the numbers that PyTorch wraps as 0-d tensors.

    An operand of another type than the one computed in is copied first, which fills the holes of its layout.
    """
    operands = [arg for arg in args if type(arg) is TensorSpec]
    mask = operands[:1] if func is aten.where.self else []
    rest = operands[len(mask) :]
    if {o.dtype for o in rest} != {result}:
        common = functools.reduce(torch.promote_types, [o.dtype for o in rest if o.shape] or [torch.bool])
        common = result if result.is_floating_point and not common.is_floating_point else common
        if {o.dtype for o in rest} != {common} and not all(o.is_contiguous for o in rest):
            rest = [o if o.dtype is common else o.with_stride(preserved_stride(o)) for o in rest]
    return [*mask, *rest, TensorSpec((), (), torch.float32)] if _wraps(func, args) else [*mask, *rest]


def _wraps(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether PyTorch wraps a number among the arguments as a 0-d tensor: an operand of TensorIterator."""
    if func is aten.lerp.Scalar:
        return False
    return (
        func in _WRAPPING
        or func._overloadname in _OF_NUMBERS
        or any(
            isinstance(arg, (int, float, complex)) and str(taken.type) == "Tensor"
            for arg, taken in zip(args, func._schema.arguments)
        )
    )


def argument_key(value: Any) -> Any:
    kind = type(value)
    if kind is TensorSpec:
        return value
    if kind is tuple or kind is list:
        return tuple([argument_key(v) for v in value])
    if kind is int or kind is float or kind is bool or kind is complex:
        return kind, value  # 1, 1.0 and True are equal and not the same argument
    return value


def check_supported(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Raise DataDependent or UnsupportedOp for an op that no shape rule can answer."""
    about = facts(func)
    if about.data_dependent and not _shape_is_known(func, args):
        raise DataDependent(
            "DM210",
            f"{func} reads tensor data that a trace does not have",
            cure="keep the value in tensors (torch.where, masks), or let the graph break here",
        )
    if about.changes_metadata:
        raise UnsupportedOp(
            "DM241",
            f"{func} changes a tensor's shape, strides or storage in place",
            cure="use the out-of-place op",
        )


def _shape_is_known(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Ops tagged as data dependent that are only so for boolean masks."""
    if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return not any(isinstance(i, TensorSpec) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return False


def _run_meta_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = device_of_result(args, kwargs)
    try:
        with torch.no_grad():
            out = func(*mapped(_to_meta, args), **mapped(_to_meta, kwargs))
    except NotImplementedError as error:
        raise UnsupportedOp(
            "DM243",
            f"{func} has no shape rule",
            why=str(error).split("\n")[0],
            cure="register one with dynamotor.graph.op_definition.layout, or a meta kernel",
        ) from error
    if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
        raise UnsupportedOp(
            "DM230",
            f"{func} makes a tensor of layout {str(out.layout).removeprefix('torch.')}",
            why="a graph holds tensors with strides only",
        )
    return _from_meta(out, device)


def has_symbols(value: Any) -> bool:
    """Whether a size that differs between calls is among the arguments, or in a spec among them."""
    kind = type(value)
    if kind is TensorSpec:
        return value.is_symbolic
    if kind is tuple or kind is list:
        return any(map(has_symbols, value))
    return any(map(has_symbols, value.values())) if kind is dict else kind is Size


def meta_tensor(spec: TensorSpec) -> torch.Tensor:
    """A tensor on the meta device with the spec's shape, strides, dtype and offset."""
    shape, stride, offset = to_torch(spec.shape), to_torch(spec.stride), to_torch(spec.offset)
    if type(offset) is int and offset == 0:
        return torch.empty_strided(shape, stride, dtype=spec.dtype, device=_META)
    base = torch.empty(to_torch(spec.offset + spec.extent), dtype=spec.dtype, device=_META)
    return base.as_strided(shape, stride, offset)


def _to_meta(value: Any) -> Any:
    kind = type(value)
    if kind is TensorSpec:
        return meta_tensor(value)
    if kind is torch.device:
        return _META
    return None if kind is torch.Generator else to_torch(value)


def _from_meta(out: Any, device: torch.device) -> Any:
    if isinstance(out, torch.Tensor):
        sizes = from_torch((tuple(out.shape), tuple(out.stride()), out.storage_offset()))
        return TensorSpec(sizes[0], sizes[1], out.dtype, device, sizes[2])
    return tuple([_from_meta(o, device) for o in out]) if isinstance(out, (tuple, list)) else from_torch(out)


def device_of_result(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device asked for, else the first tensor's with dimensions, else the first tensor's, else the
    default.
    """
    asked = kwargs.get("device")
    if asked is not None:
        return device_with_index(asked)
    fallback = None
    stack = list(reversed([*args, *kwargs.values()]))
    while stack:
        value = stack.pop()
        if type(value) is TensorSpec:
            if value.shape or value.device != CPU:
                return value.device
            fallback = fallback or value.device
        elif isinstance(value, (tuple, list)):
            stack.extend(reversed(value))
    return fallback or device_with_index(torch.get_default_device())
