"""Refusals of CPU kernels: mixed types when an op is recorded; with `config.xla_debug`, values in the graph
(indices out of range, integer division by zero), which raise at the barrier with the line that recorded the
op.

>>> config.xla_debug = True
>>> torch.ones(2, device="xla")[torch.tensor([5], device="xla")].sum().item()     # XlaError DM676
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dynamotor.extension_api import Registry, UnsupportedOp, XlaError, config, kernel_check

from . import metrics
from .compat import tree_map
from .ir import Meta, Node, record, type_checks
from .lowering import rows
from .tensor import Alias, aten, new_root, value

# -- types ---------------------------------------------------------------------------------------------------

# Of types that are the device's own affair, of kernels that are missing, of the strides of our ones.
_OTHER = re.compile(
    r"not implemented for '(Half|BFloat16|Float8\w*|UInt(16|32|64)|ComplexHalf)'|Could not run|"
    r'"histogram_cpu" not implemented|'  # other devices count integers
    r"stride\(|strides/sizes|is_contiguous"
)


def check_types(func: Any, args: tuple, kwargs: dict[str, Any], inputs: Sequence[Meta]) -> None:
    """Raise the error of the CPU's kernel for tensors of these types and these numbers: it is asked once for
    each combination.

    Types that only some CPU kernels have (float16, bfloat16, ...) are the device's own affair.
    """
    try:
        kernel_check(func, tree_map(_ones, args), tree_map(_ones, kwargs))
    except UnsupportedOp:  # unknown
        return
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # ones may be no positions
        if not _OTHER.search(str(error)):
            raise


def _ones(arg: Any) -> Any:
    if isinstance(arg, Node):
        # Few elements are row-major, as parameters are: some kernels look at that before they look at types.
        made = arg.meta.shape if math.prod(arg.meta.shape) <= 4096 else ()
        return torch.ones(made, dtype=arg.meta.dtype, device="cpu").expand(arg.meta.shape)
    return None if isinstance(arg, torch.Generator) else arg


type_checks.append(check_types)

# -- values --------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A pending value that is nothing but zeros where all is well, and the error that it is of else."""

    bad: Alias
    error: XlaError | Callable[[np.ndarray], XlaError]  # or what makes it of the value


class Unsolvable(XlaError, torch.linalg.LinAlgError):
    """DM678: a matrix is singular, or not positive definite."""


# Overload -> `rule(*args) -> (bad, what) of each thing that can be wrong`, on nodes.
values: Registry[Any, Callable[..., Iterable[tuple[Node, str]]]] = Registry("check of values")


def check_values(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> None:
    """Record the checks of an op, whose lane keeps them."""
    rule = values.get(func) if config.xla_debug else None
    for bad, what in rule(*args, **(kwargs or {})) if rule is not None else ():
        error = XlaError("DM676", what, why="found by config.xla_debug", where=metrics.user_line())
        bad.lane.checks.append(Check(new_root(bad), error))


def raise_failed(checks: Sequence[Check], results: Sequence[Any]) -> None:
    """The error of the first check that came out wrong. `results`: their values."""
    for check, bad in zip(checks, results):
        if (found := np.asarray(bad)).any():
            raise check.error if isinstance(check.error, XlaError) else check.error(found)


def check_count(mask: Any, count: int) -> None:
    """DM680 at the barrier where a mask does not pick so many elements."""
    picked = record(aten.sum.default, (record(aten.ne.Scalar, (value(mask._alias), 0)),))
    what = f"shape mismatch: {count} values, and a mask of shape {list(mask.shape)} picks another number"
    error = XlaError("DM680", what, where=metrics.user_line())
    picked.lane.checks.append(Check(new_root(record(aten.ne.Scalar, (picked, count))), error))


def check_solvers(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any] | None) -> None:
    """`_linalg_check_errors(info, ...)`: DM678 at the barrier, in eager's words."""
    line, info = metrics.user_line(), record(aten.clone.default, (value(args[0]._alias),))  # never an input

    def error(found: np.ndarray) -> XlaError:
        try:
            func(torch.from_numpy(found.copy()), *args[1:], **(kwargs or {}))
        except RuntimeError as said:
            return Unsolvable("DM678", str(said), where=line)
        raise AssertionError("aten accepts it")

    info.lane.checks.append(Check(new_root(info), error))


def _outside(index: Node, size: int, dim: int, low: int) -> tuple[Node, str]:
    below, above = record(aten.lt.Scalar, (index, low)), record(aten.ge.Scalar, (index, size))
    bad = record(aten.any.default, (record(aten.logical_or.default, (below, above)),))
    return bad, f"an index is out of bounds for dimension {dim} with size {size}"


@values.register(aten.index.Tensor, aten.index_put.default, aten._index_put_impl.default)
def _index(x: Node, indices: Sequence[Node | None], *rest: Any, **_: Any) -> Iterator[tuple[Node, str]]:
    dim = 0
    for index in indices:
        masks = index is not None and index.meta.dtype in (torch.bool, torch.uint8)
        if index is not None and not masks:
            yield _outside(index, x.meta.shape[dim], dim, -x.meta.shape[dim])
        dim += len(index.meta.shape) if masks and index is not None else 1


rows(
    values.register,
    {
        (
            *(getattr(aten.scatter, o) for o in ("src", "value", "reduce", "value_reduce")),
            *(
                getattr(aten, n).default
                for n in ["index_select", "gather", "index_add", "index_copy", "scatter_add", "index_reduce"]
            ),
            aten.scatter_reduce.two,
        ): lambda x, dim, index, *rest, **_: [
            _outside(index, (x.meta.shape or (1,))[dim], dim % max(len(x.meta.shape), 1), 0)
        ],
        aten.take.default: lambda x, index: [
            _outside(index, size := torch.Size(x.meta.shape).numel(), 0, -size)
        ],
        aten.embedding.default: lambda weight, indices, *rest, **_: [
            _outside(indices, weight.meta.shape[0], 0, 0)
        ],
    },
)


@values.register(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(
    x: Node, target: Node, weight: Any, reduction: int, ignore_index: int
) -> Iterator[tuple[Node, str]]:
    used = record(aten.masked_fill.Scalar, (target, record(aten.eq.Scalar, (target, ignore_index)), 0))
    classes = 1 if len(x.meta.shape) > 1 else 0
    yield _outside(used, x.meta.shape[classes], classes, 0)


@values.register(
    aten.floor_divide.default,
    aten.remainder.Tensor,
    aten.fmod.Tensor,
    aten.div.Tensor_mode,
    aten.remainder.Scalar_Tensor,
)
def _divide(x: Any, y: Any, *, rounding_mode: str | None = "floor") -> Iterator[tuple[Node, str]]:
    kinds = [v.meta.dtype.is_floating_point or v.meta.dtype.is_complex for v in (x, y) if isinstance(v, Node)]
    if rounding_mode and isinstance(y, Node) and not any(kinds) and not isinstance(x, float):
        yield (
            record(aten.any.default, (record(aten.eq.Scalar, (y, 0)),)),
            "ZeroDivisionError: an integer is divided by zero",
        )
