"""Values while a graph is lowered: a shape, a dtype and a rule that gives the element at an index.

A value is computed inside the expression of each reader, until something (an extern call, many readers, an
output) makes it real, that is, gives it a buffer (`realize.py`); from then on its element is a load. A view
is a value whose rule maps the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph.result_strides import viewed_stride
from ..graph.sizes import Dim, Dims, divides, equal, hint, packed
from ..graph.spec import TensorSpec, contiguous_stride
from .index_expr import ZERO, Index, Var, flatten, is_one, is_zero, reindex
from .ir import Body, Expr, load
from .program import BufRef

IndexMap = Callable[[tuple[Index, ...]], tuple[Index, ...]]
RefMap = Callable[[BufRef], BufRef | None]
_UNKNOWN = 1 << 40  # a size that no simplification takes for another


def _itself(x: Any) -> Any:
    return x


class LoopValue:
    """A tensor of the program, defined by exactly one of `ref` (memory), `body` (computed), `base` (view)."""

    __slots__ = (
        "shape",
        "dtype",
        "body",
        "base",
        "index_map",
        "ref_map",
        "recipe",
        "_ref",
        "stride",
        "origin",
        "_memo",
    )

    def __init__(
        self, shape: Sequence[Dim], dtype: torch.dtype, body: Body | None = None, ref: BufRef | None = None
    ) -> None:
        self.shape, self.dtype, self.body, self._ref = tuple(shape), dtype, body, ref
        self.recipe = body  # `body`, also once the value is real: some rules compute an element anew
        self.base: LoopValue | None = None
        self.index_map: IndexMap = _itself  # of a view
        self.ref_map: RefMap = _itself
        self.stride: Dims | None = None  # how it is laid out when it becomes real
        self.origin = ""
        self._memo: dict[tuple[Index, ...], Expr] = {}

    @staticmethod
    def view(
        base: LoopValue, shape: Sequence[Dim], index_map: IndexMap, ref_map: RefMap | None = None
    ) -> LoopValue:
        """A view: element `index` is the base's element `index_map(index)`. Without a `ref_map` that index is
        made of steps, which give the view's place in the memory of its base.
        """
        value = LoopValue(shape, base.dtype)
        value.base, value.index_map = base, index_map
        value.ref_map = ref_map or (lambda ref: _stepped(ref, value.shape, index_map))
        return value

    @property
    def ref(self) -> BufRef | None:
        """The strided memory that holds it, or None when it is not real (or has no strides)."""
        if self._ref is None and self.base is not None:
            inner = self.base.ref
            if inner is not None:
                self._ref = self.ref_map(inner)
        return self._ref

    def at(self, index: tuple[Index, ...]) -> Expr:
        """The element at an index of its shape, in the compute type of its dtype."""
        ref = self.ref
        if ref is not None:
            return load(ref.name, flatten(index, ref.stride, ref.offset), ref.dtype)
        if self.base is not None:
            return self.base.at(self.index_map(index))
        found = self._memo.get(index)
        if found is None:
            assert self.body is not None
            found = self._memo[index] = self.body(index)
        return found

    def base_body(self) -> Body:
        """The rule of a view, bound now: its base may become real later without changing it."""
        base, index_map = self.base, self.index_map
        assert base is not None
        return lambda index: base.at(index_map(index))

    def become(self, ref: BufRef) -> None:
        """From now on it is this memory."""
        self._ref, self.body, self.base = ref, None, None

    def root(self) -> LoopValue:
        """The value that it is a view of, through all views."""
        value = self
        while value._ref is None and value.base is not None:
            value = value.base
        return value


def _stepped(ref: BufRef, shape: Dims, index_map: IndexMap) -> BufRef:
    """The memory of a view, with the step in its base for each of its dimensions."""
    steps = [Var(f"step{d}", _UNKNOWN) for d in range(len(shape))]
    place = flatten(index_map(tuple(map(Index.of, steps))), ref.stride, ref.offset)
    stride = [place.terms.get(v, 0) for v in steps]
    for d in reversed(range(len(shape))):
        if is_one(shape[d]) and is_zero(stride[d]):  # a new dimension encloses those behind it
            stride[d] = shape[d + 1] * stride[d + 1] if d + 1 < len(shape) else 1
    return BufRef(ref.name, shape, tuple(stride), place.const, ref.dtype)


def broadcast_index(index: tuple[Index, ...], shape: Dims) -> tuple[Index, ...]:
    """The index into a value of `shape` that is broadcast (right-aligned) to where `index` counts."""
    lead = len(index) - len(shape)
    return tuple(ZERO if is_one(n) else index[lead + d] for d, n in enumerate(shape))


def broadcast_shape(*shapes: Sequence[Dim]) -> Dims:
    """The shape that aten broadcasts these to."""
    result: list[Dim] = []
    for d in range(-max(map(len, shapes), default=0), 0):
        sizes = [shape[d] for shape in shapes if len(shape) >= -d and not is_one(shape[d])]
        result.append(sizes[0] if sizes else 1)
    return tuple(result)


def expand(x: LoopValue, shape: Sequence[Dim]) -> LoopValue:
    """Right-aligned broadcast view."""
    shape = tuple(shape)
    if equal(x.shape, shape):
        return x
    lead = len(shape) - len(x.shape)

    grown = [is_one(n) and not is_one(shape[lead + d]) for d, n in enumerate(x.shape)]
    return LoopValue.view(
        x, shape, lambda i: tuple([ZERO if g else v for g, v in zip(grown, i[lead:], strict=True)])
    )


def permute(x: LoopValue, dims: Sequence[int]) -> LoopValue:
    """Dimensions in another order."""
    dims = [d % len(x.shape) for d in dims]
    inverse = [dims.index(d) for d in range(len(dims))]
    return LoopValue.view(x, [x.shape[d] for d in dims], lambda i: tuple([i[p] for p in inverse]))


def slice_dim(x: LoopValue, dim: int, start: Dim, step: Dim, length: Dim) -> LoopValue:
    """Elements start, start + step, ... of one dimension."""
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    if equal(shape, x.shape) and is_one(step):
        return x
    return LoopValue.view(x, shape, lambda i: (*i[:dim], i[dim] * step + start, *i[dim + 1 :]))


def select_dim(x: LoopValue, dim: int, at: Dim) -> LoopValue:
    """One index of a dimension, which goes away."""
    position = Index.of(at)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return LoopValue.view(x, shape, lambda i: (*i[:dim], position, *i[dim:]))


def reshape(x: LoopValue, shape: Sequence[Dim]) -> LoopValue:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)
    if equal(shape, x.shape):
        return x

    def to_ref(r: BufRef) -> BufRef | None:
        stride = view_stride(r.shape, r.stride, shape)
        return None if stride is None else BufRef(r.name, shape, stride, r.offset, r.dtype)

    return LoopValue.view(x, shape, lambda i: reindex(i, shape, x.shape), to_ref)


def flip(x: LoopValue, dims: Sequence[int]) -> LoopValue:
    """Dimensions read backwards."""
    turned = {d % max(len(x.shape), 1) for d in dims}
    return LoopValue.view(
        x,
        x.shape,
        lambda i: tuple(-v + (x.shape[d] - 1) if d in turned else v for d, v in enumerate(i)),
        lambda r: None,
    )


def view_stride(shape: Sequence[Dim], stride: Sequence[Dim], new_shape: Sequence[Dim]) -> Dims | None:
    """Strides under which memory of (shape, stride) can be seen as `new_shape` without a copy; None when it
    cannot.
    """
    if any(map(is_zero, shape)):
        return contiguous_stride(new_shape)
    return viewed_stride(shape, stride, new_shape, equal, divides)


def is_dense(spec: TensorSpec) -> bool:
    """Whether the strides provably are a permutation of a gap-free layout."""
    dims = zip(spec.shape, spec.stride, strict=True)
    return packed(sorted(dims, key=lambda dim: (hint(dim[1]), hint(dim[0]))), equal)
