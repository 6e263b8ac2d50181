"""Which strides PyTorch's CPU kernels give their results: TensorIterator's rule, and memory formats.

>>> iterated_stride([TensorSpec((2, 3), (1, 2), torch.float32)], (2, 3))
(1, 2)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from .sizes import Dim, Dims, equal, is_unbacked, packed
from .spec import TensorSpec, channels_last_stride, contiguous_stride


def suggests_channels_last(spec: TensorSpec) -> bool:
    """Whether `Tensor.suggest_memory_format()` is channels-last (2d or 3d): strides in the order C, W, H,
    (D,) N.
    """
    rank = len(spec.shape)
    if rank not in (4, 5) or spec.stride[1] == 0:
        return False
    least: Dim = 0
    for d in (1, *range(rank - 1, 1, -1), 0):
        size, stride = spec.shape[d], spec.stride[d]
        if size == 0 or stride < least or (d == 0 and least == spec.stride[1]):
            return False
        least = stride * size if size > 1 else stride
    return True


def suggested_stride(spec: TensorSpec, shape: Sequence[Dim]) -> Dims:
    """Strides of a new tensor of `shape` in the memory format that `spec` suggests."""
    return channels_last_stride(shape) if suggests_channels_last(spec) else contiguous_stride(shape)


def is_channels_last_contiguous(spec: TensorSpec) -> bool:
    """Dense with channels innermost (4-d, 5-d); sizes of 1 do not count."""
    rank = len(spec.shape)
    dims = (1, *range(rank - 1, 1, -1), 0)
    return rank in (4, 5) and packed((spec.shape[d], spec.stride[d]) for d in dims)


def packed_stride(spec: TensorSpec, shape: Sequence[Dim]) -> Dims:
    """As `suggested_stride`, for kernels that ask whether the tensor is contiguous in either format: sizes of
    1 say nothing.
    """
    if spec.is_contiguous:
        return contiguous_stride(shape)
    return channels_last_stride(shape) if is_channels_last_contiguous(spec) else suggested_stride(spec, shape)


def viewed_stride(
    shape: Sequence[Dim],
    stride: Sequence[Dim],
    seen_as: Sequence[Dim],
    same: Callable[[Dim, Dim], bool] = operator.eq,
    divides: Callable[[Dim, Dim], bool] = lambda n, value: value % n == 0,
) -> Dims | None:
    """Strides of a view of as many elements, in memory with holes or in another order; None where it takes a
    copy. Adjacent dimensions are taken together. `same` and `divides` ask of sizes that
    differ between calls, or prove.
    """
    # [elements, innermost stride], from the last on
    runs: list[list[Dim]] = [[1, stride[-1]]] if shape else []
    for d in reversed(range(len(shape))):
        runs[-1][0] = runs[-1][0] * shape[d]
        # A dimension of size 1 joins the one behind it, of which it may decide the stride, as in eager.
        if d and not same(shape[d - 1], 1) and not same(stride[d - 1], runs[-1][0] * runs[-1][1]):
            runs.append([1, stride[d - 1]])
    strides: list[Dim] = []
    at, done = 0, 1
    for n in reversed(seen_as):
        if at < len(runs) and same(done, runs[at][0]) and not same(n, 1):
            at, done = at + 1, 1
        strides.append(done * runs[at][1] if at < len(runs) else 1)
        done = done * n
        if at < len(runs) and not divides(done, runs[at][0]):
            return None
    return tuple(reversed(strides))


def is_dense(spec: TensorSpec) -> bool:
    """Non-overlapping and without holes, in some order of dimensions."""
    if spec.is_contiguous:
        return True
    by_stride = sorted((st, sz) for st, sz in zip(spec.stride, spec.shape, strict=True) if sz != 1)
    return packed((size, stride) for stride, size in by_stride)


def iterated_stride(operands: Sequence[TensorSpec], shape: Dims) -> Dims:
    """Strides that TensorIterator gives a new output of `shape` over these inputs."""
    if is_unbacked(*shape) and _all_descend(operands, shape):
        return contiguous_stride(shape)  # for a size of 0 numbers beside the tensor may give other steps
    # Tuples of other lengths are compared by element, too: their first sizes would be asked for nothing.
    if all(len(op.shape) == len(shape) and op.shape == shape for op in operands):
        if all(op.is_contiguous for op in operands):
            return contiguous_stride(shape)
        if len(shape) == 4 and all(is_channels_last_contiguous(op) for op in operands):
            return channels_last_stride(shape)
        first = operands[0].stride
        if all(op.stride == first for op in operands) and is_dense(operands[0]):
            return preserved_stride(operands[0])
    if is_unbacked(*shape) and all(
        not op.shape or equal(op.shape, shape) and op.is_contiguous for op in operands
    ):
        return contiguous_stride(shape)  # in whatever order sizes of 0 and 1 are looked at
    return dense_in_order(_order([_broadcast_stride(op, shape) for op in operands], shape), shape)


def _all_descend(operands: Sequence[TensorSpec], shape: Dims) -> bool:
    """Whether the operands say row-major for all sizes: those without dimensions say nothing, and neither do
    dimensions of size 1 that are broadcast.
    """
    whole = [_descends(op, shape) for op in operands]
    parts = [op for op, is_whole in zip(operands, whole) if not is_whole and op.shape]
    return (any(whole) or not parts) and all(_descends_broadcast(op, shape) for op in parts)


def _descends_broadcast(op: TensorSpec, shape: Dims) -> bool:
    """The same of an operand that has some of the dimensions, the others with size 1 or not at all."""
    own = list(zip(op.shape, shape[len(shape) - len(op.shape) :], op.stride))
    there = [step for n, full, step in own if not (type(n) is int and n == 1)]
    fits = all((type(n) is int and n == 1) != equal(n, full) for n, full, _ in own)
    return (
        fits
        and all(type(step) is int and step > 0 for step in there)
        and all(a > b for a, b in zip(there, there[1:]))
    )


def _descends(op: TensorSpec, shape: Dims) -> bool:
    """Whether an operand says row-major for all sizes, 0 and 1 among them: columns of a table do."""
    steps = op.stride
    return (
        equal(op.shape, shape)
        and all(type(step) is int and step > 0 for step in steps)
        and all(a > b or a == b and type(n) is int and n == 1 for a, b, n in zip(steps, steps[1:], shape[1:]))
    )


def preserved_stride(spec: TensorSpec) -> Dims:
    """Strides of `torch.empty_like(x)`: the tensor's own when it is dense, else its order of dimensions
    without holes.
    """
    dense = is_dense(spec)
    if dense and (not spec.is_symbolic or is_unbacked(*spec.shape)):
        return spec.stride
    # Symbols that a guard made equal to products of sizes as these products: what follows sees, without
    # asking, that there are no holes.
    found = dense_in_order(_order([spec.stride], spec.shape), spec.shape)
    return tuple([own if dense and n == 1 else new for n, own, new in zip(spec.shape, spec.stride, found)])


def dense_in_order(perm: list[int], shape: Dims) -> Dims:
    """Strides of a dense tensor whose dimensions go from fastest to slowest as `perm` says."""
    if perm == list(range(len(shape) - 1, -1, -1)):
        return contiguous_stride(shape)
    out: list[Dim] = [0] * len(shape)
    step: Dim = 1
    for d in perm:
        out[d] = step
        step *= shape[d]
    return tuple(out)


def _broadcast_stride(op: TensorSpec, shape: Dims) -> list[Dim]:
    missing = len(shape) - len(op.shape)
    own: list[Dim] = [
        0 if size == 1 and shape[missing + i] != 1 else op.stride[i] for i, size in enumerate(op.shape)
    ]
    return [0] * missing + own


def _order(strides: Sequence[Sequence[Dim]], shape: Dims) -> list[int]:
    """Dimensions from fastest to slowest: an insertion sort that swaps only where the operands agree to."""
    perm = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(perm)):
        at = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(strides, shape, perm[j], perm[at])
            if verdict > 0:
                perm[j], perm[at] = perm[at], perm[j]
                at = j
            elif verdict < 0:
                break
    return perm


def _compare(strides: Sequence[Sequence[Dim]], shape: Dims, a: int, b: int) -> int:
    for stride in strides:
        if stride[a] == 0 or stride[b] == 0:
            continue
        if stride[a] != stride[b]:
            return -1 if stride[a] < stride[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0
