"""Functionalisation: tensors that share memory are aliases of one base value, and a write makes a new base
value.

A `TracedAlias` names a tensor of the traced program: the base of its memory, or a view (a parent and a
replayable view op). Reading gives the fx node of the current value; a view is replayed when its base has been
written since. Writing sends the value back through the inverse of each view up to the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.compat import OpOverload
from ..base.registry import Registry, register_all
from ..graph.result_strides import is_dense, preserved_stride
from ..graph.shapes import UnsupportedOp
from ..graph.sizes import Dims, equal, known
from ..graph.spec import TensorSpec, aten

Emit = Callable[..., torch.fx.Node]

# The effect of a write into a view on its base; `xla/ops_view.py` reads these, too.
# The new value in the base's shape.
RESHAPED = (
    aten.view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
# Views that set a flag on the tensor, and the op that computes their values.
LAZY_FLAGS = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
# The base's value, from the new value and the view's own arguments.
UNDONE_BY = {aten.t.default: aten.t.default, aten.transpose.int: aten.transpose.int, **LAZY_FLAGS}
# The base's value, from the base, the new value and the view's own arguments.
SCATTERED_BY = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


class TracedMemory:
    """The state shared by the aliases of one memory: the base alias and a count of writes. turned: a tensor
    that is a
    view, or has some (`viewed`), got another shape in place. recorded: autograd has recorded a call with it.
    overwritten: it was written after that. uncounted: the writes of which PyTorch counts no version.
    """

    __slots__ = ("base", "version", "input", "viewed", "turned", "recorded", "overwritten", "uncounted")

    def __init__(self, input_node: torch.fx.Node | None = None) -> None:
        self.base: TracedAlias
        self.version = self.uncounted = 0
        self.input = input_node
        self.viewed = self.turned = self.recorded = self.overwritten = False


class TracedAlias:
    """A tensor of the traced program: a base (no parent), or a view of its parent by `func(parent, *args,
    **kwargs)`.

    `grad_mode` is the mode in which the view was made: it is replayed in the same. `get` makes the node on
    the first read, for outputs of multi-output ops that may never be read. `born`: after how many writes it
    was made. `one_of` is the call that such a
    one is replayed by: autograd refuses writes into views that come several at once. `asked`: the view whose
    `as_strided` was called, if the parent is not that: gradients of elements outside of it are lost.
    """

    __slots__ = (
        "memory",
        "spec",
        "node",
        "get",
        "seen",
        "born",
        "parent",
        "func",
        "args",
        "kwargs",
        "grad_mode",
        "one_of",
        "asked",
    )

    def __init__(
        self,
        memory: TracedMemory,
        spec: TensorSpec,
        node: torch.fx.Node | None,
        *,
        parent: TracedAlias | None = None,
        func: OpOverload | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        get: Callable[[], torch.fx.Node] | None = None,
    ) -> None:
        self.memory, self.spec, self.node, self.get, self.seen = memory, spec, node, get, memory.version
        self.born = memory.version
        self.parent, self.func, self.args, self.kwargs = parent, func, args, kwargs or {}
        self.grad_mode = torch.is_grad_enabled()
        self.one_of: tuple[int, OpOverload, tuple[Any, ...], dict[str, Any]] | None = (
            None  # which result, of which call on the parent
        )
        self.asked: TracedAlias | None = None
        if parent is None:
            memory.base = self


def base(
    spec: TensorSpec,
    node: torch.fx.Node | None,
    *,
    get: Callable[[], torch.fx.Node] | None = None,
    input_node: torch.fx.Node | None = None,
) -> TracedAlias:
    """An alias of new memory."""
    return TracedAlias(TracedMemory(input_node), spec, node, get=get)


def read(alias: TracedAlias, emit: Emit) -> torch.fx.Node:
    """The node of the alias's current value."""
    if alias.node is not None and alias.seen == alias.memory.version:
        return alias.node
    if alias.get is not None and alias.seen == alias.memory.version:
        alias.node = alias.get()
        return alias.node
    assert alias.func is not None
    func = LAZY_FLAGS.get(alias.func, alias.func)
    parent = _parent(emit, alias)
    alias.node = emit(func, (parent, *arguments_on(parent, func, alias)), alias.kwargs)
    alias.seen = alias.memory.version
    return alias.node


def source_of(func: OpOverload | None, parent: TracedAlias, emit: Emit) -> torch.fx.Node:
    """The base value of a view. `as_strided` addresses its storage: data written into the parent
    and placed elsewhere in a storage of its own is copied, and a value without its holes is refused.
    """
    node = read(parent, emit)
    have = spec_of_node(node)
    UnsupportedOp.when(
        func is aten.as_strided.default and parent.memory.version > 0 and not is_dense(parent.spec),
        "DM237",
        "as_strided of memory with holes that was written",
        cure="clone it first",
    )
    if func is not aten.as_strided.default or (have.offset, have.stride) == (
        parent.spec.offset,
        parent.spec.stride,
    ):
        return node
    UnsupportedOp.when(
        have.stride != parent.spec.stride,
        "DM237",
        "as_strided of memory with holes that was written",
        cure="clone it first",
    )
    return emit(aten.clone.default, (node,), {})


def arguments_on(node: torch.fx.Node, func: OpOverload, alias: TracedAlias) -> tuple[Any, ...]:
    """The arguments of a view of a node, which may have another offset in its storage than the parent had."""
    return moved(func, alias.args, spec_of_node(node).offset - _viewed(alias).spec.offset)


def moved(func: OpOverload | None, args: Sequence[Any], by: Any) -> tuple[Any, ...]:
    """The arguments of a view of memory that starts so many elements further on."""
    if func is not aten.as_strided.default or len(args) < 3 or args[2] is None or equal(by, 0):
        return tuple(args)
    size, stride, offset = args
    UnsupportedOp.when(
        not known(">=", offset + by),
        "DM237",
        "as_strided of memory before a written tensor",
        cure="use select, slice or view",
    )
    return size, stride, offset + by


def write(alias: TracedAlias, value: torch.fx.Node, emit: Emit) -> None:
    """Make `value` (same shape and dtype) the alias's value, seen by all that share its memory."""
    memory = alias.memory
    if alias.parent is None:
        alias.node = like(value, alias.spec, lambda: read(alias, emit), emit)
        memory.version += 1
        alias.seen = memory.version
        return
    inverse = view_inverses.get(alias.func) if alias.func is not None else None
    if inverse is None:
        raise UnsupportedOp(
            "DM237", f"a write through {alias.func} cannot be made functional", cure="clone the view first"
        )
    write(alias.parent, inverse(emit, alias, value), emit)
    if spec_of_node(value).stride == alias.spec.stride:
        alias.node, alias.seen = value, memory.version


def touch(alias: TracedAlias) -> None:
    """Count a write that leaves everything as it is: of the alias's own value."""
    memory = alias.memory
    memory.version += 1
    for current in (alias, memory.base):
        current.seen = memory.version


def like(
    value: torch.fx.Node, spec: TensorSpec, old: Callable[[], torch.fx.Node], emit: Emit
) -> torch.fx.Node:
    """The value cast, expanded and laid out as `spec` says, the way `copy_` into such a tensor does it.

    Only the order of dimensions counts where `spec` leaves holes between elements: values have none.
    """
    have = spec_of_node(value)
    if not is_dense(spec):
        spec = spec.with_stride(preserved_stride(spec))
    if have.dtype != spec.dtype and have.shape == spec.shape and have.stride == spec.stride:
        return emit(aten._to_copy.default, (value,), {"dtype": spec.dtype})
    if (have.shape, have.stride, have.dtype, have.device) != (
        spec.shape,
        spec.stride,
        spec.dtype,
        spec.device,
    ):
        return emit(aten.copy.default, (old(), value), {})
    return value


def with_holes(value: torch.fx.Node, spec: TensorSpec, emit: Emit) -> torch.fx.Node:
    """The value where `spec` leaves holes between elements, as eager's result does; values that ops have
    written have none.
    """
    have = spec_of_node(value)
    if is_dense(spec) or all(a == b for a, b, n in zip(have.stride, spec.stride, spec.shape) if n != 1):
        return value
    place = list(spec.shape), list(spec.stride), 0
    memory = emit(aten.full.default, ([spec.extent], 0), {"dtype": spec.dtype, "device": spec.device})
    return emit(
        aten.as_strided.default,
        (emit(aten.as_strided_scatter.default, (memory, value, *place), {}), *place),
        {},
    )


def spec_of_node(node: torch.fx.Node) -> TensorSpec:
    """The spec of a node that gives one tensor."""
    return node.meta["val"]


def reshaped(emit: Emit, value: torch.fx.Node, shape: Dims) -> torch.fx.Node:
    """The value with another shape; it is copied first when its strides do not allow a view."""
    spec = spec_of_node(value)
    if spec.shape == tuple(shape):
        return value
    if not spec.is_contiguous:
        value = emit(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
    return emit(aten.view.default, (value, list(shape)), {})


# One row a view op: (emit, alias of the view, its new value) -> new value of its parent.
Inverse = Callable[[Emit, TracedAlias, torch.fx.Node], torch.fx.Node]
view_inverses: Registry[OpOverload, Inverse] = Registry("view inverse")
view_inverse = view_inverses.register


def _viewed(alias: TracedAlias) -> TracedAlias:
    assert alias.parent is not None
    return alias.parent


def _parent(emit: Emit, alias: TracedAlias) -> torch.fx.Node:
    return source_of(alias.func, _viewed(alias), emit)


register_all(
    view_inverse,
    (
        (RESHAPED, lambda emit, alias, value: reshaped(emit, value, _viewed(alias).spec.shape)),
        (UNDONE_BY, lambda emit, alias, value: emit(UNDONE_BY[alias.func], (value, *alias.args), {})),
        (
            SCATTERED_BY,
            lambda emit, alias, value: emit(
                SCATTERED_BY[alias.func], (_parent(emit, alias), value, *alias.args), dict(alias.kwargs)
            ),
        ),
    ),
)


@view_inverse(aten.view.dtype)
def _other_dtype(emit: Emit, alias: TracedAlias, value: torch.fx.Node) -> torch.fx.Node:
    """Bytes of float8 are written as uint8, for which PyTorch has more kernels."""
    dtype = _viewed(alias).spec.dtype
    UnsupportedOp.when(
        dtype.itemsize != alias.spec.dtype.itemsize,
        "DM237",
        "a write through a view with elements of another size",
        cure="clone the view first",
    )
    return emit(aten.view.dtype, (value, dtype), {})


@view_inverse(aten.expand.default)
def _expand(emit: Emit, alias: TracedAlias, value: torch.fx.Node) -> torch.fx.Node:
    UnsupportedOp.when(
        _viewed(alias).spec.numel != alias.spec.numel,
        "DM237",
        "a write into an expanded tensor",
        cure="clone it first",
    )
    return reshaped(emit, value, _viewed(alias).spec.shape)


@view_inverse(aten.permute.default)
def _permute(emit: Emit, alias: TracedAlias, value: torch.fx.Node) -> torch.fx.Node:
    return emit(aten.permute.default, (value, turned_back(*alias.args)), {})


def turned_back(dims: Sequence[int]) -> list[int]:
    """The order of dimensions that undoes a permutation."""
    return sorted(range(len(dims)), key=[dim % len(dims) for dim in dims].__getitem__)


@view_inverse(aten.as_strided.default)
def _as_strided(emit: Emit, alias: TracedAlias, value: torch.fx.Node) -> torch.fx.Node:
    assert alias.parent is not None
    mine, parents = alias.spec, alias.parent.spec
    if mine.is_contiguous and parents.is_contiguous and mine.offset == parents.offset:
        if mine.numel == parents.numel:  # all of it, as autograd writes a slice's gradient into flat memory
            if not spec_of_node(value).is_contiguous:
                value = emit(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
            return emit(aten.view.default, (value, list(parents.shape)), {})
    parent = _parent(emit, alias)
    place = arguments_on(parent, aten.as_strided.default, alias)
    return emit(aten.as_strided_scatter.default, (parent, value, *place), {})


def slices_of(
    func: OpOverload,
    parent: TensorSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parts: tuple[TensorSpec, ...],
) -> list[tuple[OpOverload, tuple[Any, ...]]]:
    """The single-output view op that gives each output of a multi-output view (split, unbind)."""
    named = dict(zip([a.name for a in func._schema.arguments][1:], args, strict=False)) | kwargs
    dim = named.get("dim", 0) % max(len(parent.shape), 1)
    if func is aten.unbind.int:
        return [(aten.select.int, (dim, index)) for index in range(len(parts))]
    if func in (aten.split.Tensor, aten.split_with_sizes.default):
        steps, start = [], 0
        for part in parts:
            steps.append((aten.slice.Tensor, (dim, start, start + part.shape[dim])))
            start += part.shape[dim]
        return steps
    raise UnsupportedOp(
        "DM239", f"{func} returns several views and has no replay rule", cure="use split or unbind"
    )
