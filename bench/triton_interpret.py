"""Runs generated Triton functions in Triton's interpreter, on CPU tensors: how kernels are tested without a
GPU.

>>> # TRITON_INTERPRET=1 must be set before triton is imported
>>> kernel = make_interpreted(source, "k0", grid=4)
>>> kernel(x, y)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynamotor.lower.ir import BYTES

_FROM_TORCH = (
    *(
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
    ),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "tanh", "erf", "erfc", "erfinv", "trunc", "lgamma"),
    *("pow", "atan2", "hypot", "fmod", "copysign"),
)


def available() -> bool:
    """Whether triton is there and was imported as an interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return (
        bool(triton.knobs.runtime.interpret)
        and type(triton.language.standard.sum).__name__ == "InterpretedFunction"
    )


# The interpreter runs no inline assembly: helpers that are defined again behind a kernel's text.
_INSTEAD = """
@triton.jit
def float8_bits(x, KIND: tl.constexpr):
    return x.to(tl.float8e4nv if KIND == "e4m3" else tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
"""


@functools.cache  # the interpreter is patched once
def _libdevice() -> types.SimpleNamespace:
    """CUDA's mathematical library by way of torch: the interpreter has none."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterOptions, TensorHandle, interpreter_builder

    interpreter_builder.options = InterpreterOptions(  # assertions are evaluated
        debug=True,
        sanitize_overflow=False,
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"),
    )
    interpreter_builder.create_fp_trunc = _rounded(interpreter_builder.create_fp_trunc)
    interpreter_builder.create_fp_to_fp = _in_float8
    interpreter_builder.create_splat = _splat
    interpreter_builder.create_dot = _dot
    interpreter.ReduceOps.generic_reduce = _in_halves(interpreter.ReduceOps.generic_reduce)
    interpreter.ScanOps.generic_scan = _by_doubling
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _where_unpatched(interpreter._patch_lang)
    # Types are values here, and those of shapes are not read: made anew, they were half of an instruction.
    tl.core._type_for_tuple_values = lambda values, fields=None: None
    tl.block_type.to_ir = lambda block, builder: block
    tl.block_type.with_element_ty = lambda block, to: (
        block if to is block.element_ty else tl.block_type(to, block.shape)
    )

    def wrap(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            data = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) for a in args]
            shape = args[0].handle.data.shape
            result = (
                function(*data)
                .numpy()
                .reshape(np.broadcast_shapes(shape, *(a.handle.data.shape for a in args)))
            )
            handle = TensorHandle(result, args[0].handle.dtype.scalar)
            is_block = any(a.type.is_block() for a in args)
            return tl.tensor(
                handle, tl.block_type(args[0].dtype, list(result.shape)) if is_block else args[0].dtype
            )

        return call

    table = {name: wrap(getattr(torch, name)) for name in _FROM_TORCH}
    return types.SimpleNamespace(**table, rint=wrap(torch.round), div_rn=wrap(torch.div))


def _splat(result: Any, source: Any) -> Any:
    """One number in every place of a tile; the interpreter's own takes a comparison's result for a float."""
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(
        np.full(result.shape, source.data.reshape(-1)[0], dtype=source.data.dtype), source.dtype.scalar
    )


def _in_halves(one_by_one: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions by a function of ours: a half with the other, until one place is left. The interpreter's own
    is slow.
    """

    def in_halves(ops: Any, given: Any) -> Any:
        if len(given) > 1 or ops.axis is None:
            return one_by_one(ops, given)
        data, dtype = given[0].handle.data, given[0].dtype
        while data.shape[ops.axis] > 1:
            halves = (ops.to_tensor(half, dtype) for half in np.split(data, 2, ops.axis))
            data = ops.combine_fn.fn(*halves).handle.data
        return [ops.to_tensor(data if ops.keep_dims else data.squeeze(ops.axis), dtype)]

    return in_halves


def _by_doubling(ops: Any, given: Any) -> Any:
    """Running results by a function of ours: of 2 places, then 4, ... The interpreter's own takes a place at
    a time.
    """
    tiles, dtypes = [x.handle.data for x in given], [x.dtype for x in given]
    place = np.arange(tiles[0].shape[ops.axis]).reshape(
        [-1 if n == ops.axis else 1 for n in range(tiles[0].ndim)]
    )
    for step in (1 << power for power in range((place.size - 1).bit_length())):
        before = [np.roll(tile, step, ops.axis) for tile in tiles]
        both = ops.combine_fn.fn(
            *(ops.to_tensor(x, t) for x, t in zip([*before, *tiles], [*dtypes, *dtypes]))
        )
        joined = [x.handle.data for x in (both if isinstance(both, tuple) else (both,))]
        tiles = [np.where(place >= step, new, old) for new, old in zip(joined, tiles)]
    return [ops.to_tensor(tile, dtype) for tile, dtype in zip(tiles, dtypes)]


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    import triton.language as tl

    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, *rest: Any) -> None:
    """The interpreter's own looks through all members of the language at each launch."""
    from triton.runtime.interpreter import _patch_attr

    for name, member in _builtins(package):
        _patch_attr(package, name, member, *rest)


def _where_unpatched(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Functions that a running kernel calls find the language patched already: once a launch is enough."""
    import triton.language as tl

    def patch_lang(function: Any) -> Any:
        modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if any(tl.core.is_builtin(m.load) for m in modules):
            return patch(function)
        return types.SimpleNamespace(restore=lambda: None)

    return patch_lang


def _program_range(*bounds: Any, **hints: Any) -> range:
    return range(
        *(b if isinstance(b, int) else int(np.asarray(b.handle.data).reshape(-1)[0]) for b in bounds)
    )


def _dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """A product accumulated in float32; the interpreter's own multiplies the bits of bfloat16 as integers."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (_as_float32(x.data, "bf16" in str(x.dtype)) for x in (a, b))
    return TensorHandle(np.matmul(left, right).astype(d.data.dtype) + d.data, d.dtype.scalar)


def _as_float32(data: np.ndarray, is_bfloat16: bool) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else data.astype(np.float32)


def _rounded(truncate: Callable[..., Any]) -> Callable[..., Any]:
    """Conversion to bfloat16 that rounds, as a GPU does; the interpreter's own cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def convert(source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return truncate(source, to)
        shape = source.data.shape
        data = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(data.reshape(shape), tl.bfloat16)

    return convert


def _in_float8(source: Any, to: Any, rounding: Any) -> Any:
    """float32 in float8 as a GPU's instruction gives it: rounded to nearest even, and numbers beyond the largest one,
    infinities too, are that one. The interpreter's own cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    dtype = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}[to.scalar]
    largest = torch.finfo(dtype).max
    data = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-largest, largest).to(dtype)
    return TensorHandle(data.view(torch.uint8).numpy().reshape(source.data.shape), to.scalar)


class Interpreted:
    """One function of the interpreter with its grid; IndexError for a position out of range."""

    def __init__(self, scope: dict[str, Any], name: str, grid: int, numbers: tuple[int, ...]) -> None:
        self._scope, self._function, self._grid, self._numbers = scope, scope[name], grid, numbers

    def __call__(self, *tensors: torch.Tensor) -> None:
        self._scope["ALIGNED"] = all(t.data_ptr() % 16 == 0 for t in tensors)
        given = [t.view(torch.uint8) if t.dtype in BYTES else t for t in tensors]
        try:
            with np.errstate(all="ignore"):
                self._function[(self._grid,)](*given, *self._numbers)
        except Exception as error:
            if "index out of range" in str(error):
                raise IndexError("index out of range in self") from error
            raise


def by_alignment(kernel: Callable[..., None], other: Callable[..., None]) -> Callable[..., None]:
    """A callable that takes `other` where a pointer is no multiple of 16, as a launch does."""

    def call(*tensors: torch.Tensor) -> None:
        (other if any(t.data_ptr() % 16 for t in tensors) else kernel)(*tensors)

    return call


_modules: dict[str, dict[str, Any]] = {}


def make_interpreted(source: str, name: str, grid: int, numbers: tuple[int, ...] = ()) -> Callable[..., None]:
    """A callable of tensors that runs function `name` of `source` once for each program of the grid."""
    if not available():
        raise RuntimeError(
            "Triton's interpreter is not there: install triton, and set TRITON_INTERPRET=1 first"
        )
    if source not in _modules:
        import triton
        import triton.language as tl

        filename = f"<triton {name} {len(_modules)}>"
        text = source.replace("tl.range(", "program_range(")  # the interpreter's takes no numbers of a launch
        text += _INSTEAD
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        scope: dict[str, Any] = {
            "triton": triton,
            "tl": tl,
            "libdevice": _libdevice(),
            "__name__": "dynamotor_kernels",
            "program_range": _program_range,
        }
        exec(compile(text, filename, "exec"), scope)
        _modules[source] = scope
    return Interpreted(_modules[source], name, grid, tuple(numbers))
