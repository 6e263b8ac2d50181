"""Computations on values of a graph: what `xla_op_registry` registers, `call_jax`, and operations by XLA's
names.

>>> call_jax(jnp.hypot, (a, b))
>>> xor.register("slice_and_add", lambda a, b: a.slice_in_dim(0, 1, 0) + b.slice_in_dim(1, 2, 0))(x, y)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from ..device import lane_of
from ..dtypes import jax_dtype, torch_dtype
from ..ir import Meta
from ..jax_call import call_jax, numbers
from ..tensor import Alias, wrap

_JAX_TO_XLA_COMPUTATION_CACHE = numbers  # functions that were recorded, and their gradients


@dataclass(frozen=True)
class Shape:
    """The sizes and the dtype (PyTorch's) of a value."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.sizes)


def mkshape(dtype: torch.dtype, sizes: Sequence[int]) -> Shape:
    """A shape of a dtype and sizes."""
    return Shape(tuple(sizes), dtype)


def tensor_shape(tensor: Any, device: Any = "") -> Any:
    """The `Shape` of a tensor, or of each in a list or tuple. `device` is accepted."""
    return (
        [tensor_shape(t) for t in tensor]
        if isinstance(tensor, (list, tuple))
        else Shape(tuple(tensor.shape), tensor.dtype)
    )


class Type:
    """XLA's names of dtypes."""

    PRED, S8, S16, S32, S64 = torch.bool, torch.int8, torch.int16, torch.int32, torch.int64
    U8, BF16, F16, F32, F64 = torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64
    C64, C128 = torch.complex64, torch.complex128


class Op:
    """A value inside a computation: an array, or a tuple of arrays. Operators and methods give further
    ones.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    __hash__ = object.__hash__

    def shape(self) -> Shape:
        """The value's sizes and dtype."""
        return Shape(tuple(self.value.shape), torch_dtype(self.value.dtype))

    def builder(self) -> None:
        """An argument for functions that take a builder: a computation is traced by calling its function."""

    @staticmethod
    def to_torch_type(dtype: torch.dtype) -> torch.dtype:
        """PyTorch's dtype of a `Type`, which are the same."""
        return dtype

    from_torch_type = to_torch_type

    def slice_in_dim(self, start_index: int, limit_index: int, dimno: int, stride: int = 1) -> Op:
        """Elements `start_index` to `limit_index` of one dimension."""
        return Op(lax.slice_in_dim(self.value, start_index, limit_index, stride, dimno))

    def reduce(self, init_value: Op, computation: Callable[[Op, Op], Op], dimensions: Sequence[int]) -> Op:
        """Combine all elements along dimensions."""
        combined = lambda a, b: plain_value(computation(Op(a), Op(b)))  # noqa: E731
        return Op(lax.reduce(self.value, init_value.value, combined, tuple(dimensions)))

    def mkconditional(
        self, ops: Sequence[Op], true_fn: Callable[..., Op], false_fn: Callable[..., Op], **kwargs: Any
    ) -> Op:
        """`true_fn(*ops)` where this value is true, else `false_fn(*ops)`."""
        branches = [
            lambda *values, fn=fn: plain_value(fn(*map(Op, values), **kwargs)) for fn in (true_fn, false_fn)
        ]
        return Op(lax.cond(self.value, *branches, *[op.value for op in ops]))

    @classmethod
    def mkwhile(
        cls, ops: Sequence[Op], condition_fn: Callable[..., Op], body_fn: Callable[..., Op], **kwargs: Any
    ) -> Op:
        """Values after `ops = body_fn(*ops)` was done while `condition_fn(*ops)` is true."""
        looped = [
            lambda values, fn=fn: plain_value(fn(*map(Op, values), **kwargs))
            for fn in (condition_fn, body_fn)
        ]
        return cls(lax.while_loop(looped[0], looped[1], tuple([op.value for op in ops])))

    @classmethod
    def tuple(cls, ops: Sequence[Op], builder: Any = None) -> Op:
        """Several values as one."""
        return cls(tuple([op.value for op in ops]))

    @classmethod
    def scalar(cls, builder: Any, value: float, dtype: torch.dtype | None = None) -> Op:
        """A number. `builder` is accepted: a computation is traced by calling its function."""
        return cls(jnp.asarray(value, jax_dtype(dtype or torch.float32)))

    @classmethod
    def concat_in_dim(cls, ops: Sequence[Op], dimension: int, builder: Any = None) -> Op:
        """Values one behind the other."""
        return cls(lax.concatenate([op.value for op in ops], dimension))

    @classmethod
    def iota(cls, builder: Any, shape: Shape, iota_dimension: int) -> Op:
        """Positions along a dimension."""
        return cls(lax.broadcasted_iota(jax_dtype(shape.dtype), shape.sizes, iota_dimension))


def plain_value(result: Any) -> Any:
    """What jax functions give for what functions of `Op`s return."""
    return (
        tuple(map(plain_value, result))
        if isinstance(result, (list, tuple))
        else result.value
        if isinstance(result, Op)
        else result
    )


# Method -> function of arrays and plain arguments.
_METHODS: dict[str, Callable[..., Any]] = {
    **{
        f"__{name}__": getattr(operator, name)
        for name in (
            "add",
            "sub",
            "mul",
            "matmul",
            "truediv",
            "pow",
            "mod",
            "neg",
            "invert",
            "lshift",
            "rshift",
            "eq",
            "ne",
            "le",
            "lt",
            "ge",
            "gt",
        )
    },
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    **{
        name: getattr(jnp, name)
        for name in (
            "ceil",
            "cos",
            "cosh",
            "exp",
            "expm1",
            "floor",
            "log",
            "log1p",
            "sqrt",
            "real",
            "imag",
            "conj",
            "sin",
            "sinh",
            "tan",
            "tanh",
            "zeros_like",
            "ones_like",
        )
    },
    **{
        name: getattr(lax, name)
        for name in (
            "acos",
            "asin",
            "atan",
            "atan2",
            "erf",
            "erfc",
            "clz",
            "rsqrt",
            "max",
            "min",
            "rev",
            "transpose",
            "broadcast",
        )
    },
    "erfinv": lax.erf_inv,
    "reshape": lambda x, sizes, dimensions=None, inferred_dimension=None: lax.reshape(x, sizes, dimensions),
    "broadcast_in_dim": lax.broadcast_in_dim,
    "slice": lax.slice,
    "dynamic_slice": lax.dynamic_slice,
    "dynamic_update_slice": lax.dynamic_update_slice,
    "cast": lambda x, to_type: x.astype(jax_dtype(to_type)),
    # Its name in torch_xla.
    "triangualr_solve": lambda a, b, left_side, lower, unit_diagonal, transpose_a: (
        lax.linalg.triangular_solve(
            a, b, left_side=left_side, lower=lower, unit_diagonal=unit_diagonal, transpose_a=transpose_a
        )
    ),
    "select": lambda x, true_value, false_value: lax.select(x, true_value, false_value),
    "clamp": lambda x, min_value, max_value: lax.clamp(min_value, x, max_value),
    "get_tuple_element": lambda x, index: x[index],
    "scalar_like": lambda x, value: jnp.asarray(value, x.dtype),
}


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Op]:
    def method(self: Op, *args: Any, **kwargs: Any) -> Op:
        return Op(
            function(
                self.value, *map(plain_value, args), **{key: plain_value(arg) for key, arg in kwargs.items()}
            )
        )

    method.__name__ = name
    return method


for _name, _function in _METHODS.items():
    setattr(Op, _name, _method(_name, _function))


@dataclass(frozen=True, eq=False)
class Computation:
    """A function of `Op`s for arguments of given shapes; called with arrays."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arrays: Any) -> Any:
        return plain_value(self.function(*map(Op, arrays), **self.options))


def create_computation(
    name: str, fn: Callable[..., Any], shapes: Sequence[Shape], **kwargs: Any
) -> Computation:
    """The computation `fn(*ops, **kwargs)` for arguments of these shapes."""
    return Computation(name, fn, tuple(shapes), kwargs)


def get_computation_hlo(computation: Computation) -> str:
    """A computation as XLA's text."""
    shapes = [jax.ShapeDtypeStruct(shape.sizes, jax_dtype(shape.dtype)) for shape in computation.shapes]
    return jax.jit(computation.__call__).lower(*shapes).as_text(dialect="hlo")


def xla_computation_as_func(computation: Computation) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A computation as a function of a list of tensors."""
    called = computation.__call__
    return lambda input_tensors: call_jax(called, tuple(input_tensors))


def create_placeholder_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without a value, for tracing: to read one is DM601."""
    lane = lane_of(torch.device("xla", 0))
    return wrap(Alias(lane.leaf(None, Meta.of(tuple(shape), dtype))))


def _jax_to_xla_computation_cache_elements() -> int:
    return len(numbers)


def dot_general(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    dimension_numbers: tuple[Any, Any],
    precision_config: Any = None,
    preferred_element_type: torch.dtype | None = None,
) -> torch.Tensor:
    """XLA's product over pairs of dimensions: ((summed of lhs, of rhs), (batch of lhs, of rhs)).
    precision_config: jax's `precision`. preferred_element_type: the result's dtype."""
    tensors = (lhs, rhs)
    pairs = [
        tuple(tuple([d % t.dim() for d in dims]) for t, dims in zip(tensors, pair or ((), ())))
        for pair in dimension_numbers
    ]
    wanted = None if preferred_element_type is None else jax_dtype(preferred_element_type)
    options: dict[str, Any] = {"dimension_numbers": tuple(pairs), "preferred_element_type": wanted}
    return call_jax(functools.partial(lax.dot_general, **options, precision=precision_config), tensors)
