"""Triton matrix products: the text of one, with whatever the elementwise kernel behind it computes done on its tile.

    acc = tl.dot(a, b, acc)                          # a tile of the product, float32
    v1 = acc.to(tl.bfloat16).to(tl.float32)          # rounded as the library's result would be
    ...                                              # the epilogue: the kernel's statements over (m, n)

`triton_gemm_sites.py` finds where a program has a product that this could replace, `triton_gemm_choice.py` whether it should.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..graph.spec import numel
from ..lower.index import Index, Var, flatten
from ..lower.ir import F32, Expr, Kernel, Store, load, loads_of, rewrite, walk
from .triton_body import Axis, Name, Scope, TileBody
from .triton_kernel import TritonFunction
from .triton_ops import MEMORY, POINTER

MULTIPROCESSORS = 132  # of an H100 or H200: programs of a persistent kernel
_WIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a product reads or writes: its buffer and how it lies there. stride: of (batch, row, column)."""

    buffer: str
    dtype: torch.dtype
    offset: int
    stride: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Product:
    """out[z, m, n] = sum over k of a[z, m, k] * b[z, k, n] (+ bias[z, m, n]).

    compute: the type that operands have when they meet (those of another type are cast as they are read).
    stored: whether `out` is written at all; epilogue: the elementwise kernel that reads it, over variables z, m, n.
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

    @property
    def loops(self) -> tuple[Var, Var, Var]:
        """The variables that an epilogue is written over."""
        batch, m, n, _ = self.size
        return Var("gz", batch), Var("gm", m), Var("gn", n)

    @property
    def result(self) -> Expr:
        """The element of the product, as an epilogue reads it."""
        return load(self.out.buffer, flatten([Index.of(v) for v in self.loops], self.out.stride), self.out.dtype)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a launch is given beside pointers: random streams, and k (a loop of known length is unrolled whole, which takes
        seconds to compile and gains nothing)."""
        return (*self.streams, self.size[3])

    def buffers(self) -> dict[str, torch.dtype]:
        """All buffers in the order of the kernel's pointers, with their types."""
        operands = [self.a, self.b, *([self.bias] if self.bias else [])]
        found = {o.buffer: o.dtype for o in operands}
        found |= {name: dtype for name, dtype, _ in self.params if name != self.out.buffer}
        if self.stored:
            found[self.out.buffer] = self.out.dtype
        return found


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: tile sizes, warps of a program, depth of the pipeline, rows of tiles that share columns.

    persistent: as many programs as the GPU has multiprocessors, each of which takes tile after tile.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class GemmFunction(TritonFunction):
    """A TritonFunction with the depth of its software pipeline."""

    stages: int = 3


class ProductEmitter:
    """Writes one product under one tiling."""

    def __init__(self, product: Product, tiling: Tiling) -> None:
        self.product, self.tiling = product, tiling
        self.batch, self.m, self.n, self.k = product.size
        self.tiles_m, self.tiles_n = -(-self.m // tiling.m), -(-self.n // tiling.n)
        self.tiles = self.batch * self.tiles_m * self.tiles_n
        self.pointers = {name: f"p{n}" for n, name in enumerate(product.buffers())}
        self.wide = any(
            abs(o.offset) + sum(abs(s) * max(n - 1, 0) for s, n in zip(o.stride, sizes)) >= _WIDE for o, sizes in self._operands()
        ) or any(i.bounds[1] >= _WIDE for s in product.epilogue for i in _indices(s))

    def _operands(self) -> list[tuple[Operand, tuple[int, int, int]]]:
        p, (batch, m, n, k) = self.product, self.product.size
        found = [(p.a, (batch, m, k)), (p.b, (batch, k, n)), (p.out, (batch, m, n))]
        return found + ([(p.bias, (batch, m, n))] if p.bias else [])

    def function(self, name: str) -> GemmFunction:
        """The whole function."""
        p, t = self.product, self.tiling
        programs = min(self.tiles, MULTIPROCESSORS) if t.persistent else self.tiles
        head = ["pid = tl.program_id(0)", f"depth = s{len(p.streams)}" + ("" if self.wide else ".to(tl.int32)")]
        if t.persistent:
            head.append(f"for turn in tl.range(pid, {self.tiles}, {programs}, flatten=True):")
            lines = [f"    {line}" for line in head] + list(self._tile("turn", 2))
        else:
            lines = [f"    {line}" for line in head] + list(self._tile("pid", 1))
        arguments = [*self.pointers.values(), *(f"s{n}" for n in range(len(p.numbers)))]
        text = "\n".join([f"@triton.jit\ndef {name}({', '.join(arguments)}):", *lines]) + "\n"
        signature = (*(POINTER[dtype] for dtype in p.buffers().values()), *("i64" for _ in p.numbers))
        return GemmFunction(name, text, signature, programs, t.warps, False, t.stages)

    def _tile(self, number: str, indent: int) -> Iterator[str]:
        """One tile of the result, from its number to its stores."""
        pad = "    " * indent
        for line in (*self._place(number), *self._multiply()):
            yield pad + line
        yield from self._finish(indent)

    def _place(self, number: str) -> Iterator[str]:
        """Which tile it is: neighbours in number share columns of b, so that they meet in the cache."""
        per = self.tiles_m * self.tiles_n
        if self.batch > 1:
            yield f"z = {number} // {per}" if not self.wide else f"z = ({number} // {per}).to(tl.int64)"
            yield f"tile = {number} % {per}"
        else:
            yield f"tile = {number}"
        if self.tiles_m == 1 or self.tiles_n == 1:
            yield "tm = " + ("tile" if self.tiles_n == 1 else "0")
            yield "tn = " + ("tile" if self.tiles_m == 1 else "0")
            return
        width = self.tiling.group * self.tiles_n
        yield f"first = (tile // {width}) * {self.tiling.group}"
        yield f"rows = min({self.tiles_m} - first, {self.tiling.group})"
        yield f"tm = first + (tile % {width}) % rows"
        yield f"tn = (tile % {width}) // rows"

    def _multiply(self) -> Iterator[str]:
        """The loop over k."""
        p, t = self.product, self.tiling
        big = ".to(tl.int64)" if self.wide else ""
        yield f"am = (tm * {t.m} + tl.arange(0, {t.m})){big}"
        yield f"bn = (tn * {t.n} + tl.arange(0, {t.n})){big}"
        yield f"ak = tl.arange(0, {t.k}){big}"
        yield f"a_at = {self._address(p.a, 'am[:, None]', 'ak[None, :]')}"
        yield f"b_at = {self._address(p.b, 'ak[:, None]', 'bn[None, :]')}"
        yield f"acc = tl.zeros([{t.m}, {t.n}], tl.float32)"
        yield f"for k in tl.range(0, depth, {t.k}):"
        inner_k = "" if self.k % t.k == 0 else "k + ak{} < " + str(self.k)
        a_mask = _both(f"am[:, None] < {self.m}" if self.m % t.m else "", inner_k.format("[None, :]"))
        b_mask = _both(inner_k.format("[:, None]"), f"bn[None, :] < {self.n}" if self.n % t.n else "")
        cast_a, cast_b = (f".to({MEMORY[p.compute]})" if o.dtype != p.compute else "" for o in (p.a, p.b))
        precision = ', input_precision="tf32"' if p.compute is F32 else ""
        yield f"    acc = tl.dot(tl.load(a_at{a_mask}){cast_a}, tl.load(b_at{b_mask}){cast_b}, acc{precision})"
        yield f"    a_at += {t.k * p.a.stride[2]}"
        yield f"    b_at += {t.k * p.b.stride[1]}"

    def _address(self, o: Operand, row: str, column: str) -> str:
        """Pointers to a tile of an operand."""
        start = [self.pointers[o.buffer], str(o.offset) if o.offset else ""]
        start.append(f"z * {o.stride[0]}" if self.batch > 1 and o.stride[0] else "")
        return f"{' + '.join(filter(None, start))} + ({row} * {o.stride[1]} + {column} * {o.stride[2]})"

    def _finish(self, indent: int) -> Iterator[str]:
        """Bias, rounding, and the epilogue's statements on the tile."""
        p, t = self.product, self.tiling
        z, m, n = p.loops
        axes = Axis.of("x", (m,), t.m), Axis.of("r", (n,), t.n)
        exprs = list(walk(*(s.expr for s in p.epilogue), p.result))
        body = TileBody(self.pointers, p.streams, axes, exprs, self.wide)
        top = Scope(indent=indent)
        rows, row_masks = body.bind(axes[0], f"tm * {t.m}", top)
        columns, column_masks = body.bind(axes[1], f"tn * {t.n}", top)
        bound = {**rows, **columns, z: Name("z" if self.batch > 1 else "0", frozenset())}
        masks = [_always(axis, mask, top) for axis, found in zip(axes, (row_masks, column_masks), strict=True) for mask in found]
        tile = Scope(top, bound, masks=tuple(masks), indent=indent)
        both = frozenset(("x", "r"))
        if p.bias is not None:
            at = flatten([Index.of(v) for v in p.loops], p.bias.stride, p.bias.offset)
            bias = body.value(load(p.bias.buffer, at, p.bias.dtype), tile)
            tile.line(f"acc = acc + {bias.text}")
        rounded = "acc" if p.out.dtype is F32 else f"acc.to({MEMORY[p.out.dtype]}).to(tl.float32)"
        tile.values[p.result] = body.define(rounded, both, tile)
        if p.stored:
            body.store(Store(p.out.buffer, p.result.args[1], p.result, p.out.dtype), tile, known=False)
        for s in p.epilogue:
            body.store(s, tile, known=True)
        yield from top.lines
        yield from tile.lines


def _always(axis: Axis, mask: Name, scope: Scope) -> Name:
    """The mask of an axis; that of a single row or column counts for every access, whose index does not show the axis."""
    if axis.size > 1:
        return mask
    scope.line(f"{axis.name}_only = {mask.text}")
    return Name(f"{axis.name}_only", mask.axes)


def _both(a: str, b: str) -> str:
    """A mask of two conditions, as arguments of a load."""
    condition = " & ".join(f"({c})" for c in (a, b) if c)
    return f", {condition}, 0.0" if condition else ""


def _indices(s: Store) -> Iterator[Index]:
    yield s.index
    for e in loads_of(s.expr):
        yield e.args[1]


def emit_product(product: Product, tiling: Tiling) -> GemmFunction:
    """The function of a product under a tiling, under a name that hashes its text."""
    emitter = ProductEmitter(product, tiling)
    draft = emitter.function("kernel")
    digest = hashlib.sha256(f"{draft.source}{draft.signature}{draft.warps}{draft.stages}".encode()).hexdigest()[:12]
    return emitter.function(f"g{digest}")


def over_tile(product: Product, kernel: Kernel) -> Product | None:
    """The product with an elementwise kernel as its epilogue; None where the kernel does not go through it element by element."""
    loops = [v for v in (*kernel.outer, *kernel.middle, *kernel.inner) if v.size > 1]
    batch, m, n, _ = product.size
    if len(kernel.phases) != 1 or kernel.phases[0].row or kernel.final or kernel.final_once:
        return None
    statements = kernel.phases[0].inner
    stores = [s for s in statements if isinstance(s, Store)]
    if product.out.stride != (m * n if batch > 1 else 0, n if m > 1 else 0, 1 if n > 1 else 0):
        return None
    reads = {e.args[1] for s in stores for e in loads_of(s.expr) if e.args[0] == product.out.buffer}
    if any(s.scatters for s in stores) or len(stores) != len(statements):
        return None
    if len(reads) != 1 or numel(v.size for v in loops) != batch * m * n:
        return None
    (read,) = reads
    steps = {v: read.coefficient(v) for v in loops}
    expected = 1
    for v in sorted(loops, key=lambda v: steps[v] or 0):  # the loops are digits of the position in the product
        if steps[v] != expected:
            return None
        expected *= v.size
    if read.const or not read.is_affine:
        return None
    position = flatten([Index.of(v) for v in product.loops], (m * n, n, 1))
    env = {v: (position // steps[v]) % v.size for v in loops if steps[v]}
    result = product.result

    def known(e: Expr) -> Expr | None:
        return result if e.op == "load" and e.args[0] == product.out.buffer else None

    changed = tuple(replace(s, index=s.index.subst(env), expr=rewrite(s.expr, known).subst(env)) for s in stores)
    return replace(product, epilogue=changed, params=kernel.params, streams=kernel.streams())
