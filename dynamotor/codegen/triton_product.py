"""A generated matrix product: its operands, their layouts in memory, and the elementwise kernel
behind it.

>>> product = Product((1, 64, 96, 48), a, b, None, out, torch.bfloat16)
>>> product = over_tile(product, kernel)      # the kernel as its epilogue; None where it does something else
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..lower.index_expr import Index, Var, flatten
from ..lower.ir import Expr, Kernel, Store, load, loads_of, rewrite
from .triton_ops import MEMORY


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a product reads or writes: its buffer and its layout there. stride: of (batch, row,
    column).
    """

    buffer: str
    dtype: torch.dtype
    offset: int
    stride: tuple[int, int, int]

    def start(self, pointers: Mapping[str, str]) -> str:
        """The pointer to its first element, as text."""
        return f"{pointers[self.buffer]} + {self.offset}" if self.offset else pointers[self.buffer]

    def cast(self, compute: torch.dtype) -> str:
        """What turns a tile of it into the type that a product computes in, as text."""
        return f".to({MEMORY[compute]})" if self.dtype != compute else ""


def masked(*conditions: str) -> str:
    """A load's further arguments: elements outside of these conditions (those that are not empty) are
    zero.
    """
    found = " & ".join(f"({c})" for c in conditions if c)
    return f", {found}, 0.0" if found else ""


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """How a product's `a` is read where it is a convolution: row m is a place of a result, column k a place
    under it.

    The images are channels-last: k counts channels within columns of the kernel within its rows. Pairs are
    (down, right); step: elements from one image, row and column to the next.
    """

    channels: int
    image: tuple[int, int]
    result: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    step: tuple[int, int, int]

    def __str__(self) -> str:
        parts = (
            ("of", self.image),
            ("stride", self.stride),
            ("padding", self.padding),
            ("dilation", self.dilation),
        )
        told = [
            f"{name} {pair[0]}x{pair[1]}"
            for name, pair in parts
            if name == "of" or pair != (int(name != "padding"),) * 2
        ]
        return f"window {self.kernel[0]}x{self.kernel[1]} {' '.join(told)}"


@dataclass(frozen=True, slots=True)
class Product:
    """out[z, m, n] = sum over k of a[z, m, k] * b[z, k, n] (+ bias[z, m, n]). window: of a convolution, where
    `a` is no matrix.

    compute: the type that operands have when they meet (those of another type are cast as they are read).
    more: further operands whose product is added. beside: the `a` and the `out` of another product with the
    same `b`, whose elements the epilogue reads too; they are in no memory. computed: the elements (z, m, k)
    of each `a`, where none is in memory. stored: whether `out` is written at all; epilogue: the elementwise
    kernel that reads it, over variables z, m, n.
    """

    size: tuple[int, int, int, int]  # batch, m, n, k
    a: Operand
    b: Operand
    bias: Operand | None
    out: Operand
    compute: torch.dtype
    stored: bool = True
    epilogue: tuple[Store, ...] = ()
    params: tuple[tuple[str, torch.dtype, bool], ...] = ()  # of the epilogue
    streams: tuple[int, ...] = ()
    window: ConvWindow | None = None
    more: tuple[tuple[Operand, Operand], ...] = ()
    computed: tuple[Expr, ...] = ()
    beside: tuple[Operand, Operand] | None = None

    @property
    def pairs(self) -> tuple[tuple[Operand, Operand], ...]:
        """All operands whose products are added."""
        return ((self.a, self.b), *self.more)

    @property
    def inner(self) -> Var:
        """The variable of the sums, beside `loops`."""
        return Var("gk", self.size[3])

    @property
    def in_parts(self) -> bool:
        """Whether its sums are parts of a product of few rows."""
        return self.out.dtype != self.compute

    @property
    def loops(self) -> tuple[Var, Var, Var]:
        """The variables that an epilogue is written over."""
        batch, m, n, _ = self.size
        return Var("gz", batch), Var("gm", m), Var("gn", n)

    @property
    def result(self) -> Expr:
        """The element of the product, as an epilogue reads it."""
        return self.element(self.out)

    def element(self, out: Operand) -> Expr:
        """The element of a result as large as the product."""
        return load(out.buffer, flatten([Index.of(v) for v in self.loops], out.stride), out.dtype)

    @property
    def outs(self) -> dict[str, Operand]:
        """The results that an epilogue reads, by buffer."""
        return {out.buffer: out for out in (self.out, *(self.beside[1:] if self.beside else ()))}

    @property
    def numbers(self) -> tuple[int, ...]:
        """A launch's arguments beside pointers: random streams, and k (a loop of known length is unrolled
        whole, which takes seconds to compile and gains nothing)."""
        return (*self.streams, self.size[3])

    def operands(self) -> tuple[Operand, ...]:
        """Its inputs, without the epilogue's own reads."""
        inputs = [o for a, b in self.pairs for o in ([b] if self.computed else [a, b])]
        return (*inputs, *(self.beside[:1] if self.beside else ()), *([self.bias] if self.bias else []))

    def buffers(self) -> dict[str, torch.dtype]:
        """All buffers in the order of the kernel's pointers, with their types."""
        found = {o.buffer: o.dtype for o in self.operands()}
        found |= {name: dtype for name, dtype, _ in self.params if name not in self.outs}
        if self.stored:
            found[self.out.buffer] = self.out.dtype
        return found


def over_tile(product: Product, kernel: Kernel) -> Product | None:
    """The product with an elementwise kernel as its epilogue; None where the kernel does not go through it
    element by element.

    Where the kernel reads only the first columns (behind padding), the product has only these: nobody else
    may read it then.
    """
    loops = [v for v in (*kernel.outer, *kernel.middle, *kernel.inner) if v.size > 1]
    batch, m, n, k = product.size
    if len(kernel.phases) != 1 or kernel.phases[0].row or kernel.final or kernel.final_once:
        return None
    statements = kernel.phases[0].inner
    stores = [s for s in statements if isinstance(s, Store)]
    step = m * n if batch > 1 else 0
    turned = product.out.stride == (step, int(m > 1), m if n > 1 else 0)  # its rows are columns in memory
    if not turned and product.out.stride != (step, n if m > 1 else 0, int(n > 1)):
        return None
    reads = {e.args[1] for s in stores for e in loads_of(s.expr) if e.args[0] in product.outs}
    if any(s.scatters or s.part for s in stores) or len(stores) != len(statements):
        return None
    if len(reads) != 1 or not loops:  # a single number has no tile
        return None
    (read,) = reads
    if read.const or not read.is_affine:
        return None
    steps = {v: read.coefficient(v) or 0 for v in loops}
    columns = _columns(steps, batch * n, m) if turned else _columns(steps, batch * m, n)
    if columns is None or turned and columns != m:
        return None
    product = product if turned else replace(product, size=(batch, m, columns, k))
    z, row, column = (Index.of(v) for v in product.loops)
    if turned or columns == n:
        position = flatten([z, row, column], (m * n, 1, m) if turned else (m * n, n, 1))
        env = {v: (position // step) % v.size for v, step in steps.items()}
    else:
        rows = flatten([z, row], (m, 1))
        env = {
            v: (column // step) % v.size if step < n else (rows // (step // n)) % v.size
            for v, step in steps.items()
        }
    results = {name: product.element(out) for name, out in product.outs.items()}

    def known(e: Expr) -> Expr | None:
        return results.get(e.args[0]) if e.op == "load" else None

    changed = tuple(
        replace(s, index=s.index.subst(env), expr=rewrite(s.expr, known).subst(env)) for s in stores
    )
    return replace(product, epilogue=changed, params=kernel.params, streams=kernel.streams())


def _columns(steps: Mapping[Var, int], rows: int, columns: int) -> int | None:
    """How many of a matrix' columns loops go through whose indices are the digits of a position in it; None
    for other loops.
    """
    expected, found = 1, columns
    for v in sorted(steps, key=steps.__getitem__):
        if steps[v] == columns > expected:
            expected, found = columns, expected
        if steps[v] != expected:
            return None
        expected *= v.size
    return found if expected == rows * columns else None


def digits(steps: Mapping[Var, int], count: int) -> bool:
    """Whether loops that step so go through `count` neighbouring places, each once."""
    return _columns(steps, count, 1) is not None
