"""Tiles that Hopper's tensor memory accelerator copies: what qualifies for it, and the text.

    a_all = tl.make_tensor_descriptor(p0, [4096, 768], [768, 1], [128, 64])
    ... a_all.load([tm * 128, k])                    # zero outside of the tensor
    o0_all.store([tm * 128, tn * 256], v4.to(tl.bfloat16))

A descriptor is in memory that the launch is given, DESCRIPTOR bytes for each of a program's. It needs a
base and rows that are multiples of 16 bytes; the base of a buffer is only known at a call, so that a launch
has a second function without them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..lower.ir import Store, loads_of
from .triton_product import Operand, Product

DESCRIPTOR = 128
_UNIT = 16  # bytes
_MOST_ROW = 1 << 40  # bytes from row to row that a descriptor can say
_LOADED = (torch.bfloat16, torch.float16)
_STORED = (*_LOADED, torch.float32)


@dataclass(frozen=True, slots=True)
class Plane:
    """Part of a buffer as rows of neighbouring elements. turned: the operand's columns are these rows."""

    buffer: str
    offset: int
    batch: int  # elements from one batch to the next
    size: tuple[int, int]
    row: int  # elements from row to row
    turned: bool

    def descriptor(self, name: str, pointer: str, block: tuple[int, int], z: str = "") -> str:
        """The line that makes the descriptor of tiles of an operand."""
        base = " + ".join(
            [pointer, *([str(self.offset)] if self.offset else []), *([f"{z} * {self.batch}"] if z else [])]
        )
        rows, columns = reversed(block) if self.turned else block
        return (
            f"{name} = tl.make_tensor_descriptor({base}, {list(self.size)}, [{self.row}, 1], "
            f"[{rows}, {columns}])"
        )

    def load(self, name: str, row: str, column: str) -> str:
        """The expression that reads a tile of the operand."""
        return f"{name}.load([{column}, {row}]).T" if self.turned else f"{name}.load([{row}, {column}])"


def plane(o: Operand, size: tuple[int, int], compute: torch.dtype) -> Plane | None:
    """An operand of a product for loads through a descriptor, which do not cast; None where it does not
    qualify.
    """
    batch, row, column = o.stride
    turned = column != 1
    if turned:
        row, column = column, row
    if o.dtype not in _LOADED or o.dtype != compute or column != 1 or min(size) == 1:
        return None
    unit = _UNIT // o.dtype.itemsize
    if not 0 < row * o.dtype.itemsize < _MOST_ROW or o.offset % unit or row % unit or batch % unit:
        return None
    rows, columns = reversed(size) if turned else size
    return Plane(o.buffer, o.offset, batch, (rows, columns), row, turned)


def planes(product: Product) -> dict[str, Plane] | None:
    """The operands "a" and "b", where both qualify; of a convolution only the weights."""
    if product.more or product.computed:
        return None
    _, m, n, k = product.size
    found = {"b": plane(product.b, (k, n), product.compute)}
    if product.window is None:
        found["a"] = plane(product.a, (m, k), product.compute)
    return {key: p for key, p in found.items() if p is not None} if None not in found.values() else None


def qualifies(product: Product, persistent: bool, tile_k: int) -> bool:
    """Whether a product can read through descriptors; a persistent kernel makes them once, not for each
    batch.

    A tile of weights must not reach into the next kernel position, whose numbers are no zeros.
    """
    whole = product.window is None or product.window.channels % tile_k == 0
    return whole and planes(product) is not None and not (persistent and product.size[0] > 1)


def stored_plane(product: Product, s: Store) -> Plane | None:
    """Where a store writes every element (m, n) to row m and column n of something that nobody else
    touches.
    """
    _, m, n = product.loops
    row, unit = s.index.coefficient(m), _UNIT // s.memory.itemsize
    if product.size[0] > 1 or min(m.size, n.size) == 1 or s.memory not in _STORED or s.scatters or s.part:
        return None
    if not s.index.is_affine or set(s.index.terms) != {m, n} or s.index.coefficient(n) != 1:
        return None
    if row is None or row <= 0 or row % unit or s.index.const % unit or row * s.memory.itemsize >= _MOST_ROW:
        return None
    others = [t.buffer for t in product.epilogue if t is not s]
    others += [e.args[0] for t in product.epilogue for e in loads_of(t.expr) if e != product.result]
    others += [o.buffer for o in product.operands()]
    if s.buffer in others:
        return None
    return Plane(s.buffer, int(s.index.const), 0, (int(m.size), int(n.size)), int(row), False)
