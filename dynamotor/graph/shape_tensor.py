"""Tensors without data that run PyTorch code: autograd, autocast and composite ops work above them in C++.

>>> x = ShapeTensor.make(TensorSpec.dense((2, 3), torch.float32), requires_grad=True)
>>> (x.t() @ x).shape
torch.Size([3, 3])
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..base import compat
from ..base.compat import OpOverload, TorchDispatchMode
from . import kernel_checks, ops, products  # noqa: F401  (`ops` and `products` register)
from .data_sizes import DataSizes
from .op_definition import Unknown, definition
from .op_facts import HIDDEN_WRITES, VIEW_FORMS, draws, facts, is_custom, may_raise, written_names
from .shapes import UnsupportedOp, check_supported, infer_spec
from .sizes import DataDependent, leaves_in
from .spec import TensorSpec, aten
from .sym_int import SYMBOLIC, from_torch, to_torch
from .tensor_subclass import WrapperSpec, dispatch, is_wrapper_class

__all__ = ["DataDependent", "Recorder", "ShapeTensor", "UnsupportedOp", "infer", "recording", "shape_mode"]


class Recorder(Protocol):
    """Sees every op that reaches the dispatch level while `recording` is on."""

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result, with ShapeTensors in the place of tensors."""


class Memory:
    """Identity of a ShapeTensor's storage: views share it. `unseen_writes`: how many ops have written it that
    count no version (a batch norm's statistics; all ops on tensors of inference mode)."""

    __slots__ = ("__weakref__", "unseen_writes")

    def __init__(self) -> None:
        self.unseen_writes = 0


def _in_torch(spec: TensorSpec) -> Any:
    """Shape, stride and offset as PyTorch takes them."""
    place = spec.shape, spec.stride, spec.offset
    return to_torch(place) if spec.is_symbolic else place


class ShapeTensor(torch.Tensor):
    """A strided tensor that has a spec and no data. `memory` is shared by views; `note` is a recorder's own.
    `reshaped`: its metadata was changed in place.
    """

    spec: TensorSpec
    memory: Memory
    note: Any
    reshaped = False

    __torch_function__ = compat.disabled_torch_function  # the stub has no `cls`

    @staticmethod
    def make(spec: TensorSpec, requires_grad: bool = False, memory: Memory | None = None) -> ShapeTensor:
        """A new ShapeTensor; `memory` makes it a view of that memory."""
        shape, stride, offset = _in_torch(spec)
        more: Any = {"_extra_dispatch_keys": products.extra_keys()} if spec.is_symbolic else {}
        try:
            tensor = compat.make_wrapper_subclass(
                ShapeTensor,
                shape,
                strides=stride,
                storage_offset=offset,
                dtype=spec.dtype,
                device=spec.device,
                requires_grad=requires_grad,
                **more,
            )
        except AttributeError as error:  # PyTorch's nested sizes have no sums
            raise UnsupportedOp(
                "DM260",
                f"a plain tensor is made with a jagged tensor's size: {list(map(str, spec.shape))}",
                why="no memory is laid out by it",
                cure="keep the part that makes it outside the compiled function",
            ) from error
        tensor.spec = spec
        tensor.memory = Memory() if memory is None else memory
        tensor.note = None
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub is of a function, PyTorch calls a class method
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper_class, types)):
            return dispatch(func, types, args, kwargs or {})
        return infer(func, args, kwargs or {})

    def tolist(self) -> list[int | float | bool]:
        """A vector's numbers, each read from data; PyTorch has none of a tensor without."""
        DataDependent.when(self.dim() != 1, "DM210", "a list of a tensor's numbers")
        return [one.item() for one in self.unbind()]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # the stub: def f(self, *, Any=...)
        return f"ShapeTensor({self.spec}{', requires_grad' if self.requires_grad else ''})"


def spec_of(value: Any) -> Any:
    """Arguments with specs in the place of tensors (ShapeTensors or real ones), lists kept as lists."""
    if isinstance(value, ShapeTensor):
        return value.spec
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([spec_of(v) for v in value])
    if isinstance(value, torch.Tensor):
        return WrapperSpec.of(value) if is_wrapper_class(kind) else TensorSpec.of(value)
    return from_torch(value) if kind in SYMBOLIC else value


_OF_LISTS = ("aten::_foreach_", "aten::_fused_")  # PyTorch counts their writes where it runs their kernels


def _count_writes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the writes of an op that PyTorch does not count."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    leaves = [t for name in written_names(func) for t in leaves_in(given.get(name))]
    tensors = [t for t in leaves if isinstance(t, ShapeTensor)]
    for tensor in tensors:
        tensor.memory.unseen_writes += tensor.is_inference()
    if func.name().startswith(_OF_LISTS):
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def infer(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on ShapeTensors (real tensors may be mixed in): in-place ops return their argument, views
    share storage.

    Raises DataDependent for results that need data, UnsupportedOp for ops that swap storage, and PyTorch's
    own errors.
    """
    about = facts(func)
    if about.writes and (torch.is_inference_mode_enabled() or func.name().startswith(_OF_LISTS)):
        _count_writes(func, args, kwargs)
    special = _special.get(func)
    if special is not None:
        return special(func, args, kwargs)
    specs = tuple([spec_of(a) for a in args])
    if about.changes_metadata:
        if func not in VIEW_FORMS or not isinstance(args[0], ShapeTensor):
            check_supported(func, specs)
        return set_spec(args[0], infer_spec(VIEW_FORMS[func], specs, kwargs))
    result = infer_spec(func, specs, {name: spec_of(v) for name, v in kwargs.items()} if kwargs else kwargs)
    if func in HIDDEN_WRITES and args[5]:  # in training
        for place in HIDDEN_WRITES[func]:
            if isinstance(args[place], ShapeTensor):
                args[place].memory.unseen_writes += 1
    if about.writes and any(r is not None for r in about.returns):
        return _returned_arguments(about.returns, result, args, kwargs)
    if not about.is_view or not isinstance(args[0], ShapeTensor):
        return materialise(result)
    return _views(result, args[0])


def _views(result: Any, base: ShapeTensor) -> Any:
    """Views of a tensor for the specs of a result: tensors of inference mode if it is one, in any mode."""
    if base.is_inference() is torch.is_inference_mode_enabled():
        return materialise(result, base.memory)
    with torch.inference_mode(base.is_inference()):
        return materialise(result, base.memory)


def set_spec(tensor: ShapeTensor, spec: TensorSpec) -> ShapeTensor:
    """Change the metadata of a ShapeTensor in place, as `unsqueeze_` does; returns it."""
    tensor.data = ShapeTensor.make(spec)
    tensor.spec, tensor.reshaped = spec, True
    return tensor


def is_written_unseen(tensor: Any) -> bool:
    """Whether an op has written it without a version."""
    return type(tensor) is ShapeTensor and tensor.memory.unseen_writes > 0


def materialise(result: Any, memory: Memory | None = None) -> Any:
    """ShapeTensors for the specs of a result; with `memory` they are views of it."""
    if type(result) is TensorSpec:
        return ShapeTensor.make(result, memory=memory)
    if type(result) is tuple:
        return (
            [materialise(r, memory) for r in result]
            if memory is not None
            else tuple([materialise(r) for r in result])
        )
    return to_torch(result)


def _returned_arguments(
    returns: tuple[Any, ...], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    results = result if isinstance(result, tuple) else (result,)
    values = []
    for where, spec in zip(returns, results, strict=True):
        if where is None:
            values.append(materialise(spec))
            continue
        value = args[where] if isinstance(where, int) else kwargs[where]
        UnsupportedOp.when(
            isinstance(where, str) and spec_of(value).shape != spec.shape,
            "DM241",
            f"{where}= has another size than the value written into it",
            why="its shape would change in place",
            cure=f"give a tensor of the right size, or leave {where}= out",
        )
        values.append(value)
    return values[0] if len(values) == 1 else tuple(values)


def _read_scalar(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A value asked of a real tensor is known; of a ShapeTensor it is not."""
    if isinstance(args[0], ShapeTensor):
        check_supported(func, args)
    return func(*args, **kwargs)


_sdp_choices: dict[Any, int] = {}


def _choose_attention(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Which attention kernel PyTorch would take: asked with real, untouched memory of the same metadata."""

    def real(value: Any) -> Any:
        if not isinstance(value, ShapeTensor):
            return value
        return (
            value.spec.hinted().empty().requires_grad_(value.requires_grad)
        )  # each choice is right for all sizes

    def key_of(value: Any) -> Any:
        return (value.spec.hinted(), value.requires_grad) if isinstance(value, ShapeTensor) else value

    named = tuple((name, key_of(value)) for name, value in kwargs.items())
    key = kernel_checks.kernel_settings(), tuple(map(key_of, args)), named
    if key not in _sdp_choices:
        _sdp_choices[key] = func(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
    return _sdp_choices[key]


def _detached(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`detach_` below autograd: `torch.tensor` calls it, and inference mode has none above."""
    return args[0]


_special = {
    aten.detach_.default: _detached,
    aten._local_scalar_dense.default: _read_scalar,
    aten.equal.default: _read_scalar,
    aten._fused_sdp_choice.default: _choose_attention,
}


def is_meta(args: Any, kwargs: Any) -> bool:
    """Whether a call is of tensors on the meta device, or makes one there."""
    given = leaves_in((args, kwargs or {}))
    return any(
        v.device.type == "meta"
        if isinstance(v, torch.Tensor)
        else isinstance(v, torch.device) and v.type == "meta"
        for v in given
    )


class _Mode(TorchDispatchMode):
    """Catches the ops that have no tensor argument (factories), and sends every op to the recorder when there
    is one.
    """

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self.handler = handler
        self.depth = (
            0  # of calls of a wrapper subclass: ops arrive below autograd there, which splits composites
        )

    @contextlib.contextmanager
    def _below_autograd(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else PyTorch wraps the method below in a way that imports torch._dynamo, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper_class, types)):  # its own ops on its inner tensors come here again
            with self, self._below_autograd():
                result = dispatch(func, types, args, kwargs or {})
            self.depth += result is NotImplemented  # PyTorch goes on, and comes here again below autograd
            return result
        if self.depth and is_meta(args, kwargs):  # its own rules for shapes
            return func(*args, **kwargs or {})
        if func.namespace == "_c10d_functional" and func.name().endswith("::_wrap_tensor_autograd"):
            with self:  # a wrapper that waits when it is used first: in a graph the wait is an op
                return torch.ops._c10d_functional.wait_tensor.default(args[0])
        if (self.depth and func.has_kernel_for_dispatch_key(compat.composite_implicit)) or _is_composite(
            func
        ):
            with self:  # autograd has not split it: of a wrapper, in inference mode, of its tensors
                return func.decompose(*args, **kwargs or {})
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):
            func = (
                aten.scalar_tensor.default
            )  # functorch casts a number, which reaches Python without its tensor
        return self.handler(func, args, kwargs or {})


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether PyTorch's kernel is made of other ops (a decomposition in Python is not the kernel)."""
    return bool(compat.has_kernel(func.name(), "CompositeImplicitAutograd"))


def _is_on_cpu(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


class shape_mode(_Mode):  # noqa: N801  (a context manager)
    """While on, factories give ShapeTensors too, real tensors turn into ShapeTensors when an op touches them,
    and an op raises what eager's kernel would. data_sizes: the sizes that depend on data; without
    it such ops raise DataDependent. `reads_settings`: an op was met for which settings choose the
    kernel; `reads_tf32`: a product on a GPU; `draws`: random numbers; `asserts`: a test of data
    that only raises; `may_raise`: an op was met that may raise as the data are, when it is called (on a GPU
    such errors come later, and end the process); `runs_custom`: such an op from outside of PyTorch."""

    def __init__(self, data_sizes: DataSizes | None = None) -> None:
        super().__init__(self._checked)
        self.reads_settings = self.reads_tf32 = self.draws = self.asserts = False
        self.may_raise = self.runs_custom = False
        self.data_sizes = data_sizes

    def _checked(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel_checks.check(func, args, kwargs)
        if func in kernel_checks.CHOOSING:
            self.reads_settings = True
        if func in kernel_checks.PRODUCTS and args[0].device.type == "cuda":
            self.reads_tf32 = True
        about = facts(func)
        self.draws = self.draws or draws(func, args, kwargs)
        self.asserts = self.asserts or about.asserts
        if may_raise(func, args, kwargs) and (is_custom(func) or all(map(_is_on_cpu, leaves_in(args)))):
            self.may_raise = True
            self.runs_custom = self.runs_custom or is_custom(func)
        if self.data_sizes is not None and about.data_dependent and definition(func).sizes_from_data:
            try:
                specs, named = spec_of(args), {name: spec_of(v) for name, v in kwargs.items()}
                return materialise(self.data_sizes.infer(func, args, specs, named))
            except Unknown:
                pass
        return infer(func, args, kwargs)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While on, each op calls `recorder.record(func, args, kwargs)` for its result."""
    with _Mode(recorder.record):
        yield


@contextlib.contextmanager
def unseen_by_hooks() -> Iterator[None]:
    """No saved-tensor hooks inside: a user's (checkpointing counts, save_on_cpu copies) see what runs, not
    the compiled graph.
    """
    hooks = []
    while (top := compat.top_saved_hooks(True)) is not None:
        hooks.append(top)
        compat.pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            compat.push_saved_hooks(pack, unpack)
