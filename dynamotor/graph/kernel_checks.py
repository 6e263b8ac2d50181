"""Errors that eager's kernels raise and shape rules do not: about dtypes, numbers that do not fit, writes
into shared memory.

The kernels know best, so they are asked, once for each op with arguments of these kinds: on one element where
every element is treated alike, on memory of the right shapes where dtypes are mixed in a way that few ops
take.

>>> check(aten.rsub.Scalar, (mask, 1), {})
RuntimeError: Subtraction, the `-` operator, with a bool tensor is not supported. ...
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..base import compat
from ..base.compat import OpOverload
from .op_definition import checks, questions
from .op_facts import facts
from .private_draws import NotPrivate, PrivateDraws
from .shapes import UnsupportedOp
from .sizes import LARGEST, Dim, Size, hint, is_unbacked, leaves_in, mapped, numbers
from .spec import TensorSpec, aten
from .sym_int import from_torch

Check = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], None]

_NUMBERS = ("value", "fill_value", "s")  # names of an argument that is a number
_INDICES = frozenset(
    (
        "index",
        "indices",
        "mask",
        "attn_mask",
        "offs",
        "offsets",
        "offset2bag",
        "bag_size",
        "maximum_indices",
    )
)
_RANGES = {
    dtype: (int(info.min), int(info.max))
    for kind, dtypes in (
        (torch.iinfo, (torch.uint8, torch.int8, torch.int16, torch.int32)),
        (torch.finfo, (torch.float16,)),
    )
    for dtype in dtypes
    for info in (kind(dtype),)
}  # of numbers beside tensors
_LIMIT = 1 << 16  # elements that a question may cost

_answers: dict[Any, Exception | None] = {}


# Settings choose the kernels of these, and so the source of errors and the layout of results.
CHOOSING = frozenset(
    (aten.convolution.default, aten._fused_sdp_choice.default, aten.mkldnn_rnn_layer.default)
)


# What generated kernels of these compute on a GPU depends on whether TF32 is allowed.
PRODUCTS = frozenset(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)
)


def tf32() -> bool | None:
    """Whether float32 products may be computed in TF32; None where PyTorch's two ways to say so were used and
    differ.
    """
    try:
        return compat.cublas_tf32()
    except RuntimeError:
        return None


def kernel_settings() -> tuple[Any, ...]:
    """PyTorch's settings that choose kernels: attention's, oneDNN, cuDNN, threads."""
    return (
        compat.flash_attention_enabled(),
        compat.mem_efficient_attention_enabled(),
        compat.math_attention_enabled(),
        compat.cudnn_attention_enabled(),
        compat.onednn_enabled(),
        compat.cudnn_enabled(),
        torch.get_num_threads(),
    )


def check(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what eager would raise for these tensors (`ShapeTensor`s or real ones), or UnsupportedOp where
    only running tells.
    """
    if torch.SymInt in map(type, leaves_in((args, kwargs))):
        args, kwargs = _bounded(func, args, kwargs)
    for one in _checks(func):
        one(func, args, kwargs)


def _bounded(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with plain numbers in the place of those that differ between calls (sizes stay). Each is
    guarded to stay within the range of the tensors' dtypes, or is a constant where it does not: what a kernel
    answers about one it answers about all.
    """
    dtypes: set[Any] = {kwargs.get("dtype"), *(t.dtype for t in tensors_in((args, tuple(kwargs.values()))))}
    lows, highs = zip((-LARGEST, LARGEST), *[_RANGES[dtype] for dtype in dtypes & _RANGES.keys()])
    types = {a.name: str(a.type) for a in func._schema.arguments}

    def plain(name: str, value: Any) -> Any:
        expr = from_torch(value) if type(value) is torch.SymInt and "int" not in types[name] else None
        if type(expr) is not Size or is_unbacked(expr):  # asked when its part is compiled
            return value
        within = expr.env.ask(">=", min(highs) - expr) and expr.env.ask(">=", expr - max(lows))
        return hint(expr) if within else int(expr)

    return (
        tuple([plain(name, value) for name, value in zip(types, args)]),
        {name: plain(name, value) for name, value in kwargs.items()},
    )


@functools.cache
def _checks(func: OpOverload) -> tuple[Check, ...]:
    about, name = facts(func), func.overloadpacket.__name__
    if func.namespace != "aten" or about.is_view or about.changes_metadata:
        return ()
    found: list[Check] = []
    if not func._schema.returns and not about.writes and not about.asserts:
        found.append(_refuse_assertion)
    if about.writes:
        found.append(_check_memory)
    if name in checks:
        found.append(checks[name])
    if name in questions:
        ask_kernel = questions[name]
    elif torch.Tag.pointwise in func.tags or about.pointwise:
        ask_kernel = ask_element
    elif about.random and about.writes:
        ask_kernel = ask_nothing
    else:
        ask_kernel = ask_positions if about.data_dependent else ask_dtypes
    return (*found, ask_kernel) if ask_kernel else tuple(found)


def _refuse_assertion(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise UnsupportedOp("DM213", f"{func} returns nothing: it raises or not as the data are")


# Kernels that are asked -------------------------------------------------------------------------------------
def ask_nothing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A draw like a tensor: without elements it looks at its numbers and leaves the generator alone."""
    ask(func, args, kwargs, lambda t: t.dtype, lambda dtype: torch.empty(0, dtype=dtype, device="cpu"))


def ask_element(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A map: one element says what all would."""

    def element(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.device, tensor.dim()

    def make(kind: Any) -> torch.Tensor:
        dtype, device, rank = kind
        return torch.ones((1,) * rank, dtype=dtype, device=device)

    ask(func, args, kwargs, element, make)


def ask_dtypes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Anything else, unless its tensors are of one floating-point dtype, but for masks and indices of 64
    bits.
    """
    tensors = list(tensors_in((args, tuple(kwargs.values()))))
    names = argument_names(func)
    named = dict(zip(names, args)) | kwargs
    usual = not _has_float_indices(named)
    found = {t.dtype for t in tensors}
    if usual and "dim" not in names and len(found) == 1 and found.pop().is_floating_point:
        return
    dim, rank = named.get("dim"), max([1, *[t.dim() for t in tensors[:1]]])
    if type(dim) is int and not -rank <= dim < rank:
        ask_element(func, args, kwargs)
    dtypes = {t.dtype for t in tensors_in([value for name, value in named.items() if name not in _INDICES])}
    # Nor where LAPACK swaps the rows that numbers name, wherever those are.
    unasked = {"pivots", "LU_pivots"} & named.keys() or (
        usual
        and len(dtypes) == 1
        and next(iter(dtypes)).is_floating_point
        and {t.dtype for t in tensors} - dtypes <= {torch.int64, torch.bool}
    )
    if unasked or not tensors or sum(spec_at_hints(t).extent for t in tensors) > _LIMIT:
        return

    def make(spec: TensorSpec) -> torch.Tensor:
        as_number = spec.dtype.is_floating_point or spec.dtype.is_complex
        memory = torch.full(
            (int(spec.extent),), 1 if as_number else 0, dtype=spec.dtype, device=spec.device
        )  # an index may be 0
        if spec.dtype is torch.bool and len(memory):  # a mask picks one element, which suits its operands
            memory = memory.new_zeros(int(spec.numel))
            memory[0], spec = True, TensorSpec.dense(spec.shape, spec.dtype)
        return memory.as_strided(numbers(spec.shape), numbers(spec.stride))

    ask(func, args, kwargs, spec_at_hints, make)


def ask_positions(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An op whose kernel looks at the values of positions: asked only about those that are no integers."""
    if _has_float_indices(dict(zip(argument_names(func), args)) | kwargs):
        ask_dtypes(func, args, kwargs)


def _has_float_indices(named: dict[str, Any]) -> bool:
    return any(t.dtype.is_floating_point for t in tensors_in([named.get(name) for name in _INDICES]))


@functools.cache
def argument_names(func: OpOverload) -> tuple[str, ...]:
    return tuple([a.name for a in func._schema.arguments])


def ask_fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether the number fits into the dtype."""
    named = dict(zip(argument_names(func), args)) | kwargs
    number = next(
        (named[name] for name in _NUMBERS if type(named.get(name)) in (int, float, bool, complex)), None
    )
    dtype = named.get("dtype") or next((t.dtype for t in tensors_in(args)), None)
    if dtype is None and type(number) in (int, float):
        whole = type(number) is int and func is aten.full.default
        dtype = torch.int64 if whole else torch.get_default_dtype()
    if number is None:  # a symbol
        return
    if func is aten.scalar_tensor.default:  # which takes what other fills refuse
        ask(func, (number,), {"dtype": dtype}, lambda t: t, lambda t: t)
    elif dtype is not None:
        ask(
            aten.fill_.Scalar,
            (torch.empty(2, dtype=dtype, device="cpu"), number),
            {},
            lambda t: t.dtype,
            lambda d: torch.empty(2, dtype=d, device="cpu"),
        )


def ask(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind_of: Callable[[torch.Tensor], Any],
    make: Callable[[Any], torch.Tensor],
) -> None:
    """Run the kernel on tensors made of the arguments' kinds, once for equal kinds, and raise the errors
    that it
    raises.
    """
    try:
        key = func, _kinds((args, tuple(kwargs.items())), kind_of)
        known = key in _answers
    except (TypeError, _NotAsked):  # an argument without a hash, or a size that differs between calls
        return
    if not known:
        made = mapped(
            lambda leaf: make(kind_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        _answers[key] = run_kernel(func, *made)
    answer = _answers[key]
    if answer is not None:
        raise type(answer)(*answer.args)


def run_kernel(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Exception | None:
    """The error that eager's kernel raises; the program's generators stay as they are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PrivateDraws() if facts(func).random else contextlib.nullcontext():
                func(*args, **kwargs)
    except NotPrivate:  # the kernel is not asked
        return None
    except Exception as error:  # its error is the answer
        return error
    return None


class _NotAsked(Exception):
    pass


def _kinds(value: Any, kind_of: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type not in ("cpu", "cuda") or value.layout is not torch.strided:
            raise _NotAsked
        return "tensor", kind_of(value)
    if isinstance(value, list | tuple):
        return tuple([_kinds(item, kind_of) for item in value])
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise _NotAsked
    return (type(value), value) if isinstance(value, int | float | complex) else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, torch.Tensor))


def spec_at_hints(tensor: torch.Tensor) -> TensorSpec:
    return tensor.spec.hinted() if hasattr(tensor, "spec") else TensorSpec.of(tensor)


# Memory -----------------------------------------------------------------------------------------------------
def _check_memory(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a write into memory that the tensor sees twice, or that another argument sees from another
    place: eager raises, or the order in which its kernel goes decides."""
    for where in facts(func).writes:
        target = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        for written in tensors_in(target):
            if not hasattr(written, "memory"):
                continue
            spec = spec_at_hints(written)
            UnsupportedOp.when(
                sees_twice(spec), "DM229", f"{func} writes into memory that the tensor sees more than once"
            )
            for other in tensors_in((args, tuple(kwargs.values()))):
                if (
                    other is not written
                    and getattr(other, "memory", None) is written.memory
                    # asked of symbols too, the answer is a guard
                    and (meet(spec, spec_at_hints(other)) or meet(written.spec, other.spec))  # type: ignore[attr-defined]
                ):
                    raise UnsupportedOp("DM229", f"{func} writes into memory that another argument sees")


def sees_twice(spec: TensorSpec) -> bool:
    """Whether some places of the memory are several elements. Of symbols it asks, which makes guards."""
    inner: Dim = 0
    for step, size in sorted(zip(spec.stride, spec.shape), key=lambda dim: tuple(map(hint, dim))):
        if hint(size) > 1 and not step > inner:
            return hint(spec.numel) > 0
        inner += (size - 1) * step
    return False


def meet(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two views of one memory may share elements without being the same view; exact for slices of one
    tensor.

    >>> meet(TensorSpec((4,), (2,), torch.float32), TensorSpec((4,), (2,), torch.float32, offset=1))
    False
    """
    if (
        (a.offset, a.shape, a.stride) == (b.offset, b.shape, b.stride)
        or a.offset + a.extent <= b.offset
        or b.offset + b.extent <= a.offset
    ):
        return False
    if a.stride != b.stride:
        return a.numel + b.numel > _LIMIT or not _places(a).isdisjoint(_places(b))
    return _reach(b.offset - a.offset, sorted(zip(a.stride, a.shape, b.shape), reverse=True))


def _reach(distance: Dim, dims: list[tuple[Dim, Dim, Dim]]) -> bool:
    """Whether an element of one view is `distance` before one of the other; (stride, size, other size), the
    longest first.
    """
    if not dims:
        return distance == 0
    step, size, other = dims[0]
    inner = sum((max(n, m) - 1) * s for s, n, m in dims[1:])
    if step <= inner:  # a place has several indices
        return True
    return any(
        -other < steps < size and _reach(distance - steps * step, dims[1:])
        for steps in {distance // step, distance // step + 1}
    )


def _places(spec: TensorSpec) -> set[int]:
    return {
        spec.offset + sum(i * s for i, s in zip(index, spec.stride))
        for index in itertools.product(*map(range, spec.shape))
    }
