"""Which strides an xla tensor reports: those that the CPU's kernels and views would give it.

XLA keeps values as it likes; the strides only decide what PyTorch decides by them: whether `reshape` and
`contiguous()` copy, what `view` refuses. They are no part of a trace's key. `None` stands for row-major, so
that programs without views pay nothing.

>>> of_result(aten.add.Tensor, instruction, (x.t(), 1), None)
(1, 3)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynamotor.extension_api import (
    CPU,
    Dim,
    Dims,
    TensorSpec,
    contiguous_stride,
    hint,
    infer_spec,
    preserved_stride,
    sees_twice,
)

from .ir import UNKNOWN, Instruction
from .tensor import Alias, XLATensor

Stride = Dims | None
Strides = Any  # Stride, or for several results a list of them

_results: dict[tuple, Strides] = {}
_views: dict[tuple, tuple[Stride, int]] = {}


def spec_of(alias: Alias, offset: Dim = 0) -> TensorSpec:
    """An alias as the CPU would describe it."""
    shape = alias.meta.shape
    return TensorSpec(shape, alias.stride or contiguous_stride(shape), alias.meta.dtype, CPU, offset)


def short(spec: Any) -> Stride:
    """The strides of a spec; None where they are row-major (or there is no tensor)."""
    return (
        None if type(spec) is not TensorSpec or spec.stride == contiguous_stride(spec.shape) else spec.stride
    )


def of_tensor(tensor: torch.Tensor) -> Stride:
    """The strides of a copy of a CPU tensor: its own, without holes."""
    return None if tensor.is_contiguous() else _preserved(TensorSpec.of(tensor))


def preserved(alias: Alias) -> Stride:
    """The strides of a copy that keeps the order of dimensions."""
    return None if alias.stride is None else _preserved(spec_of(alias))


def _preserved(spec: TensorSpec) -> Stride:
    return short(spec.with_stride(preserved_stride(spec)))


def strided(args: Any) -> bool:
    """Whether an argument is not row-major."""
    for arg in args:
        kind = type(arg)
        if kind is XLATensor:
            if arg._alias.stride is not None:
                return True
        elif (kind is list or kind is tuple) and strided(arg):
            return True
    return False


def of_result(
    func: Callable[..., Any], instruction: Instruction, args: tuple, kwargs: dict[str, Any] | None
) -> Strides:
    """The strides of the new memory that an op gives; None where all results are row-major."""
    values = list(kwargs.values()) if kwargs else []
    memory_format = kwargs.get("memory_format") if kwargs else None
    plain = memory_format is None and not strided(args) and not strided(values)
    if plain and instruction.strides is not UNKNOWN:
        return instruction.strides
    key = (instruction.uid, memory_format, tuple(strides_in((*args, *values))))
    found = _results.get(key, UNKNOWN)
    if found is UNKNOWN:
        found = of_op(func, args, kwargs or {})
        if found is UNKNOWN or type(found) is list and len(found) != len(instruction.metas):
            found = None
        _results[key] = found
    if plain:
        instruction.strides = found
    return found


def strides_in(args: Any) -> list[Stride]:
    """The strides of the tensors in nested arguments."""
    found: list[Stride] = []
    for arg in args:
        if type(arg) is XLATensor:
            found.append(arg._alias.stride)
        elif type(arg) is list or type(arg) is tuple:
            found += strides_in(arg)
    return found


def specs_in(value: Any) -> Any:
    """Arguments with specs of CPU tensors in the place of tensors."""
    if type(value) is XLATensor:
        return spec_of(value._alias)
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if type(value) is list or type(value) is tuple:
        return type(value)([specs_in(item) for item in value])
    if isinstance(value, torch.Generator):
        return None
    return CPU if isinstance(value, torch.device) else value


def of_op(func: Any, args: tuple, kwargs: dict[str, Any]) -> Strides:
    """The strides of a CPU kernel's result, UNKNOWN where no rule tells."""
    try:
        result = infer_spec(func, specs_in(args), {name: specs_in(value) for name, value in kwargs.items()})
    except RuntimeError:  # no shape rule, or one that asks for data: how a CPU would lay this out is unknown
        return UNKNOWN
    if type(result) is not tuple:
        return short(result)
    strides = [short(item) for spec in result for item in (spec if type(spec) is tuple else (spec,))]
    return strides if any(strides) else None


def of_view(
    func: Callable[..., Any],
    instruction: Instruction,
    parent: Alias,
    args: tuple,
    kwargs: dict[str, Any] | None,
) -> tuple[Stride, int]:
    """(strides, storage offset) of a view op's result; raises the CPU's error where strides do not allow
    the view.
    """
    if instruction.metas.dtype is not parent.meta.dtype:  # its offset is counted in other units
        return _infer_view(func, spec_of(parent, parent.offset), args, kwargs)
    key = (instruction.uid, parent.stride)
    found = _views.get(key)
    if found is None:
        found = _views[key] = _infer_view(func, spec_of(parent), args, kwargs)
    return found[0], parent.offset + found[1]


def _infer_view(
    func: Any, spec: TensorSpec, args: tuple, kwargs: dict[str, Any] | None
) -> tuple[Stride, int]:
    result = infer_spec(func, (spec, *args[1:]), kwargs or {})
    return short(result), result.offset


def overlaps_itself(spec: TensorSpec) -> bool:
    """Whether two elements of a view are one place of the memory, exactly."""
    if not sees_twice(spec):  # by sorted strides: quick, and says so of some that are interleaved
        return False
    steps = (np.arange(hint(size)) * hint(step) for size, step in zip(spec.shape, spec.stride))
    places = functools.reduce(np.add.outer, steps)
    return bool(np.unique(places).size < places.size)
