"""The compiler's facts of a tensor without its data: `node.meta["val"]` of every graph holds these.
And the facts of a graph beside its nodes.

>>> TensorSpec.of(torch.ones(2, 3)).stride
(3, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .sizes import (
    Dim,
    Dims,
    Size,
    Symbol,
    contiguous_stride as contiguous_stride,
    hint,
    is_contiguous,
    is_symbolic,
    numbers,
)

aten = torch.ops.aten
Compiled = Callable[..., Any]  # a backend's result for a graph
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Compiled]
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def device_with_index(device: torch.device | str) -> torch.device:
    """The device that a tensor made there reports: "cuda" alone is the current GPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def channels_last_stride(shape: Sequence[Dim]) -> Dims:
    """Strides of an (N, C, ...) shape stored with C innermost, in elements."""
    order = (0, *range(2, len(shape)), 1)
    inner = contiguous_stride([shape[d] for d in order])
    stride: list[Dim] = [0] * len(shape)
    for d, s in zip(order, inner, strict=True):
        stride[d] = s
    return tuple(stride)


def numel(shape: Iterable[Dim]) -> Dim:
    """Number of elements of a shape."""
    count: Dim = 1
    for size in shape:
        count *= size
    return count


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether memory does not hold the tensor's values: lazy conjugates and negatives, zeros without
    memory. Autograd hands all of them on as gradients.
    """
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def storage_number(tensor: Any) -> int:
    """A number for the tensor's storage: two live tensors with equal ones share memory."""
    return (
        tensor._memory_token() if hasattr(type(tensor), "_memory_token") else tensor.untyped_storage()._cdata
    )


def memory_groups(inputs: Sequence[Any]) -> list[int]:
    """For each input, the first one that it shares memory with: bytes from the first to the last element.
    Inputs in one storage of which one requires a gradient are together, as autograd sees them.
    """
    by_storage: dict[int, list[int]] = {}
    first = list(range(len(inputs)))
    for i, tensor in enumerate(inputs):
        if torch.is_tensor(tensor):
            by_storage.setdefault(storage_number(tensor), []).append(i)
    for group in by_storage.values():
        if len(group) < 2:
            continue
        tensors = [inputs[i] for i in group]
        if any(t.requires_grad or hasattr(type(t), "_memory_token") for t in tensors):
            first = [group[0] if i in group else at for i, at in enumerate(first)]
            continue
        end, at = -1, group[0]
        for start, stop, i in sorted((*_bytes(inputs[i]), i) for i in group):
            at = at if start < end else i
            first[i], end = at, max(end, stop)
    return first


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a strided tensor's first byte, and that behind its last."""
    start = tensor.data_ptr()
    return start, start + TensorSpec.of(tensor).extent * tensor.element_size()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (elements), stride (elements), dtype, device and storage offset (elements) of a strided tensor.

    Sizes that differ between calls are `graph.sizes.Size`s.
    """

    shape: Dims
    stride: Dims
    dtype: torch.dtype
    device: torch.device = CPU
    offset: Dim = 0

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of a strided tensor (real, fake, meta or ShapeTensor)."""
        offset: Any = tensor.storage_offset()  # to the checker a SymInt, which it is only under torch.export
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, offset)

    @staticmethod
    def dense(shape: Sequence[Dim], dtype: torch.dtype, device: torch.device = CPU) -> TensorSpec:
        """The spec of a new row-major tensor."""
        return TensorSpec(tuple(shape), contiguous_stride(shape), dtype, device)

    @property
    def numel(self) -> Dim:
        return numel(self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the elements, not counting holes between them."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Row-major without holes, as `Tensor.is_contiguous()` says it (sizes of 1 do not count)."""
        return is_contiguous(self.shape, self.stride)

    @property
    def extent(self) -> Dim:
        """Elements of storage that a tensor with these strides spans, from its first element."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def is_symbolic(self) -> bool:
        """Whether a size, stride or the offset differs between calls."""
        return is_symbolic((*self.shape, *self.stride, self.offset))

    def at(self, values: Mapping[Symbol, Any]) -> TensorSpec:
        """The spec with the symbols' values put in."""

        def number(size: Dim) -> int:
            return size.value(values) if type(size) is Size else size

        return replace(
            self,
            shape=tuple(map(number, self.shape)),
            stride=tuple(map(number, self.stride)),
            offset=number(self.offset),
        )

    def hinted(self) -> TensorSpec:
        """The spec at the call that is being compiled; asks nothing."""
        return (
            replace(
                self,
                shape=tuple(map(hint, self.shape)),
                stride=tuple(map(hint, self.stride)),
                offset=hint(self.offset),
            )
            if self.is_symbolic
            else self
        )

    def with_stride(self, stride: Sequence[Dim]) -> TensorSpec:
        """The same tensor laid out with other strides."""
        return replace(self, stride=tuple(stride))

    def empty(self) -> torch.Tensor:
        """A real tensor with this metadata, at the start of unwritten memory."""
        return torch.empty_strided(
            numbers(self.shape), numbers(self.stride), dtype=self.dtype, device=self.device
        )

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        dense = "" if self.is_contiguous else f" stride{list(self.stride)}"
        return f"{name}{list(self.shape)}{dense}" + ("" if self.device.type == "cpu" else f" {self.device}")


def copy_as(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same numbers in memory of its own with these strides, in elements."""
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return write(made, tensor)


def write(place: torch.Tensor, tensor: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`place.copy_(tensor)`, also where `place` has expanded dimensions, which `copy_` refuses."""
    if 0 in place.stride():
        once = tuple([slice(None if step else 1) for step in place.stride()])
        place[once].copy_(tensor[once], non_blocking)
        return place
    return place.copy_(tensor, non_blocking)


def duplicate(t: torch.Tensor, held: dict[int, torch.UntypedStorage] | None = None) -> torch.Tensor:
    """The same numbers in memory of its own, laid out as here; a leaf. `held`: copies of memory by the
    original, so that tensors share them as the originals do.
    """
    held = {} if held is None else held
    storage = t.untyped_storage()
    if storage._cdata not in held:
        held[storage._cdata] = storage.clone()
    with torch.no_grad():
        empty = torch.empty(0, dtype=t.dtype, device=t.device)
        copy = empty.set_(held[storage._cdata], t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)


def far(got: torch.Tensor, want: torch.Tensor, share: float) -> torch.Tensor:
    """Which elements of two tensors of one dtype differ: numbers that are rounded by more than this share of
    the largest one that is wanted, others at all.
    """
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return got != want
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    a, b = got.to(wide), want.to(wide)
    scale = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    return ~((a - b).abs() <= share * scale + 1e-30) & ~((a == b) | ((a != a) & (b != b)))


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """Facts about one aten graph.

    kind: which half of the program it is. static_inputs: placeholder indices that hold the same tensor object
    (a parameter or buffer) at each call, so that work on them may be done once and checked by `(data_ptr,
    _version)`. n_outputs: for a forward graph, how many leading outputs are the user's; the rest are saved
    for the backward.
    """

    kind: Literal["inference", "forward", "backward"]
    name: str
    static_inputs: frozenset[int] = frozenset()
    n_outputs: int = 0
