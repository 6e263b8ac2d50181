"""Triton matrix products: the text of one, with whatever the elementwise kernel behind it computes done on
its tile.

    acc = tl.dot(a, b, acc)                          # a tile of the product, float32
    v1 = acc.to(tl.bfloat16).to(tl.float32)          # rounded as the library's result would be
    ...                                              # the epilogue: the kernel's statements over (m, n)

`triton_gemm_sites.py` finds where a program has a product that this could replace, `triton_gemm_choice.py`
whether it should.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from ..graph.spec import numel
from ..lower.index_expr import Index, flatten
from ..lower.ir import F32, Store, load, loads_of, walk
from .triton_body import Axis, Name, TileBody, TileScope
from .triton_computed import multiply_computed
from .triton_conv import multiply_window
from .triton_kernel import TritonFunction
from .triton_ops import MEMORY, POINTER, lines_of, mark, unmarked
from .triton_product import Operand, Product, masked
from .triton_sizes import settle
from .triton_tma import DESCRIPTOR, Plane, planes, qualifies, stored_plane

MULTIPROCESSORS = 132  # of an H100 or H200: programs of a persistent kernel
_WIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: tile sizes, warps of a program, depth of the pipeline, rows of tiles that share
    columns.

    persistent: as many programs as the GPU has multiprocessors, each of which takes tile after tile.
    tma: operands are read through descriptors; tma_store: results are written so too.
    """

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    group: int = 8
    persistent: bool = False
    tma: bool = False
    tma_store: bool = False

    def __str__(self) -> str:
        words = [f"{self.m}x{self.n}x{self.k}", f"{self.warps} warps", f"{self.stages} stages"]
        return " ".join(
            [
                *words,
                *(word for word in ("persistent", "tma", "tma_store") if getattr(self, word)),
            ]
        )

    def row(self) -> dict[str, int]:
        """What differs from the defaults, as the stored table keeps it: `Tiling(**row)` is this one again."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def unaligned(self) -> Tiling:
        """What takes its place where pointers are no multiples of 16: elements move one by one, and large
        tiles spill.
        """
        small = {"m": min(self.m, 64), "n": min(self.n, 64), "k": min(self.k, 64), "warps": 4}
        return replace(self, **small, persistent=False, tma=False, tma_store=False)

    def suited(self, product: Product) -> Tiling:
        """This tiling, reduced to the forms that the product's operands allow; windows are copied ahead
        only by
        programs of one tile.
        """
        found = self if product.window is None else replace(self, persistent=False)
        if found.tma and not qualifies(product, found.persistent, found.k):
            found = replace(found, tma=False, tma_store=False)
        while product.computed and product.size[3] % found.k:  # computed values behind the end are no zeros
            found = replace(found, k=found.k // 2)
        return found


class ProductEmitter:
    """Writes one product under one tiling."""

    def __init__(self, product: Product, tiling: Tiling) -> None:
        self.product, self.tiling = product, tiling
        self.batch, self.m, self.n, self.k = product.size
        self.tiles_m, self.tiles_n = -(-self.m // tiling.m), -(-self.n // tiling.n)
        self.tiles = self.batch * self.tiles_m * self.tiles_n
        self.pointers = {name: f"p{n}" for n, name in enumerate(product.buffers())}
        self.wide = any(
            abs(o.offset) + sum(abs(s) * max(n - 1, 0) for s, n in zip(o.stride, sizes)) >= _WIDE
            for o, sizes in self._operands()
        ) or any(i.bounds[1] >= _WIDE for i in _indices(product))
        self.planes = (planes(product) if tiling.tma else None) or {}
        self.stored = self._stored_planes() if tiling.tma_store else {}

    def _operands(self) -> list[tuple[Operand, tuple[int, int, int]]]:
        p, (batch, m, n, k) = self.product, self.product.size
        found = [(p.out, (batch, m, n))]
        found += [pair for a, b in p.pairs for pair in ((a, (batch, m, k)), (b, (batch, k, n)))]
        found += [(a, (batch, m, k)) for a in (p.beside or ())[:1]]
        if p.window is not None:
            found[1] = (replace(p.a, stride=p.window.step), (m // numel(p.window.result), *p.window.image))
        return found + ([(p.bias, (batch, m, n))] if p.bias else [])

    def _stored_planes(self) -> dict[str, tuple[str, Plane]]:
        """Buffers that are written through descriptors: the descriptor's name, and its tensor."""
        p = self.product
        stores = [*([self._plain_store()] if p.stored else []), *p.epilogue]
        found = [(s.buffer, stored_plane(p, s)) for s in stores]
        return {buffer: (f"o{n}_all", shown) for n, (buffer, shown) in enumerate(found) if shown is not None}

    def _plain_store(self) -> Store:
        """The store of the product itself."""
        p = self.product
        return Store(p.out.buffer, p.result.args[1], p.result, p.out.dtype)

    def function(self, name: str, fallback: TritonFunction | None = None) -> TritonFunction:
        """The whole function."""
        p, t = self.product, self.tiling
        programs = min(self.tiles, MULTIPROCESSORS) if t.persistent else self.tiles
        narrow = "" if self.wide and not self.planes else ".to(tl.int32)"
        head = ["pid = tl.program_id(0)", f"depth = s{len(p.streams)}{narrow}"]
        head.append("tl.assume(depth > 0)")  # or all is written twice, once for an empty sum
        if self.batch == 1:
            head += self._descriptors()
        if t.persistent:
            head.append(f"for turn in tl.range(pid, {self.tiles}, {programs}, flatten=True):")
            lines = [f"    {line}" for line in head] + list(self._tile("turn", 2))
        else:
            lines = [f"    {line}" for line in head] + list(self._tile("pid", 1))
        arguments = [*self.pointers.values(), *(f"s{n}" for n in range(len(p.numbers)))]
        text = "\n".join([f"@triton.jit\ndef {name}({', '.join(arguments)}):", *lines]) + "\n"
        text = text if p.in_parts else unmarked(text)
        signature = (*(POINTER[dtype] for dtype in p.buffers().values()), *("i64" for _ in p.numbers))
        scratch = DESCRIPTOR * text.count("make_tensor_descriptor(")
        return TritonFunction(name, text, signature, programs, t.warps, False, t.stages, scratch, fallback)

    def _descriptors(self) -> Iterator[str]:
        """The descriptors that a program works with."""
        t, z = self.tiling, "z" if self.batch > 1 else ""
        for key, shown in self.planes.items():
            yield shown.descriptor(
                f"{key}_all", self.pointers[shown.buffer], (t.m, t.k) if key == "a" else (t.k, t.n), z
            )
        for name, shown in self.stored.values():
            yield shown.descriptor(name, self.pointers[shown.buffer], (t.m, t.n))

    def _tile(self, number: str, indent: int) -> Iterator[str]:
        """One tile of the result, from its number to its stores."""
        pad = "    " * indent
        made = self._descriptors() if self.batch > 1 else ()
        multiply = self._multiply_through_descriptors if "a" in self.planes else self._multiply
        for line in (*self._place(number), *made, *multiply()):
            yield pad + line
        yield from self._finish(indent)

    def _place(self, number: str) -> Iterator[str]:
        """Which tile it is: neighbours in number share columns of b, so that they meet in the cache."""
        per = self.tiles_m * self.tiles_n
        if self.batch > 1:
            z = f"{number} // {mark(per)}"
            yield f"z = {z}" if not self.wide else f"z = tl.cast({z}, tl.int64)"
            yield f"tile = {number} % {mark(per)}"
        else:
            yield f"tile = {number}"
        if self.tiles_m == 1 or self.tiles_n == 1:
            yield "tm = " + ("tile" if self.tiles_n == 1 else "0")
            yield "tn = " + ("tile" if self.tiles_m == 1 else "0")
            return
        width = self.tiling.group * self.tiles_n
        yield from lines_of(f"""
            first = (tile // {width}) * {self.tiling.group}
            rows = min({self.tiles_m} - first, {self.tiling.group})
            tm = first + (tile % {width}) % rows
            tn = (tile % {width}) // rows
        """)

    def _multiply(self) -> Iterator[str]:
        """The loop over k."""
        p, t = self.product, self.tiling
        if p.computed:
            yield from multiply_computed(p, (t.m, t.n, t.k), self.pointers, self.wide)
            return
        if p.window is not None:
            yield from multiply_window(p, (t.m, t.n, t.k), self.pointers, self.wide, self.planes.get("b"))
            return
        big = ".to(tl.int64)" if self.wide else ""
        inner_k = "" if self.k % t.k == 0 else "k + ak{} < " + str(self.k)
        a_mask = masked(f"am[:, None] < {self.m}" if self.m % t.m else "", inner_k.format("[None, :]"))
        b_mask = masked(inner_k.format("[:, None]"), f"bn[None, :] < {self.n}" if self.n % t.n else "")
        cast_a, cast_b = (o.cast(p.compute) for o in (p.a, p.b))
        precision = ', input_precision="tf32"' if p.compute is F32 else ""
        yield from lines_of(f"""
            am = (tm * {t.m} + tl.arange(0, {t.m})){big}
            bn = (tn * {t.n} + tl.arange(0, {t.n})){big}
            ak = tl.arange(0, {t.k}){big}
        """)
        pairs = [(f"a_at{n or ''}", f"b_at{n or ''}", *pair) for n, pair in enumerate(p.pairs)]
        for a_at, b_at, a, b in pairs:
            yield f"{a_at} = {self._address(a, 'am[:, None]', 'ak[None, :]')}"
            yield f"{b_at} = {self._address(b, 'ak[:, None]', 'bn[None, :]')}"
        yield f"acc = tl.zeros([{t.m}, {t.n}], tl.float32)"
        if p.beside is not None:
            yield from self._multiply_both(p.beside[0], f"{a_mask}){cast_a}", f"{b_mask}){cast_b}", precision)
            return
        yield f"for k in tl.range(0, depth, {t.k}):"
        for a_at, b_at, a, b in pairs:
            loads = f"tl.load({a_at}{a_mask}){cast_a}, tl.load({b_at}{b_mask}){cast_b}"
            yield f"    acc = tl.dot({loads}, acc{precision})"
            yield f"    {a_at} += {t.k * a.stride[2]}"
            yield f"    {b_at} += {t.k * b.stride[1]}"

    def _multiply_both(self, other: Operand, a_end: str, b_end: str, precision: str) -> Iterator[str]:
        """The loop over k of two products that read the same tile of b."""
        p, k = self.product, self.tiling.k
        yield from lines_of(f"""
            other_at = {self._address(other, "am[:, None]", "ak[None, :]")}
            other = acc
            for k in tl.range(0, depth, {k}):
                b = tl.load(b_at{b_end}
                acc = tl.dot(tl.load(a_at{a_end}, b, acc{precision})
                other = tl.dot(tl.load(other_at{a_end}, b, other{precision})
                a_at += {k * p.a.stride[2]}
                other_at += {k * other.stride[2]}
                b_at += {k * p.b.stride[1]}
        """)

    def _multiply_through_descriptors(self) -> Iterator[str]:
        """The loop over k; tiles beyond the ends are zeros."""
        t = self.tiling
        a = self.planes["a"].load("a_all", f"tm * {t.m}", "k")
        b = self.planes["b"].load("b_all", "k", f"tn * {t.n}")
        yield from lines_of(f"""
            acc = tl.zeros([{t.m}, {t.n}], tl.float32)
            for k in tl.range(0, depth, {t.k}):
                acc = tl.dot({a}, {b}, acc)
        """)

    def _address(self, o: Operand, row: str, column: str) -> str:
        """Pointers to a tile of an operand."""
        batch = f" + z * {o.stride[0]}" if self.batch > 1 and o.stride[0] else ""
        return f"{o.start(self.pointers)}{batch} + ({row} * {o.stride[1]} + {column} * {o.stride[2]})"

    def _finish(self, indent: int) -> Iterator[str]:
        """Bias, rounding, and the epilogue's statements on the tile."""
        p, t = self.product, self.tiling
        z, m, n = p.loops
        axes = Axis.of("x", (m,), t.m), Axis.of("r", (n,), t.n)
        exprs = list(walk(*(s.expr for s in p.epilogue), p.result))
        body = TileBody(self.pointers, p.streams, axes, exprs, self.wide)
        top = TileScope(indent=indent)
        rows, row_masks = body.bind(axes[0], f"tm * {t.m}", top)
        columns, column_masks = body.bind(axes[1], f"tn * {t.n}", top)
        bound = {**rows, **columns, z: Name("z" if self.batch > 1 else "0", frozenset())}
        masks = [
            _always(axis, mask, top)
            for axis, found in zip(axes, (row_masks, column_masks), strict=True)
            for mask in found
        ]
        tile = TileScope(top, bound, masks=tuple(masks), indent=indent)
        both = frozenset(("x", "r"))
        if p.bias is not None:
            at = flatten([Index.of(v) for v in p.loops], p.bias.stride, p.bias.offset)
            bias = body.value(load(p.bias.buffer, at, p.bias.dtype), tile)
            tile.line(f"acc = acc + {bias.text}")
        rounded = "acc" if p.out.dtype is F32 else f"acc.to({MEMORY[p.out.dtype]}).to(tl.float32)"
        tile.values[p.result] = body.define(rounded, both, tile)
        if p.beside is not None:
            tile.values[p.element(p.beside[1])] = body.define("other", both, tile)
        for known, s in (
            *([(False, self._plain_store())] if p.stored else []),
            *((True, s) for s in p.epilogue),
        ):
            if s.buffer in self.stored:
                value = body.full_tile(body.value(s.expr, tile))
                tile.line(
                    f"{self.stored[s.buffer][0]}.store([tm * {t.m}, tn * {t.n}], "
                    f"{value}.to({MEMORY[s.memory]}))"
                )
            else:
                body.store(s, tile, known)
        yield from top.lines
        yield from tile.lines


def _always(axis: Axis, mask: Name, scope: TileScope) -> Name:
    """The mask of an axis; that of a single row or column counts for every access, whose index does not show
    the axis.
    """
    if axis.size > 1:
        return mask
    scope.line(f"{axis.name}_only = {mask.text}")
    return Name(f"{axis.name}_only", mask.axes)


def _indices(product: Product) -> Iterator[Index]:
    yield from (s.index for s in product.epilogue)
    for expr in (*product.computed, *(s.expr for s in product.epilogue)):
        yield from (e.args[1] for e in loads_of(expr))


def emit_product(product: Product, tiling: Tiling) -> TritonFunction:
    """The function of a product under a tiling, under a name that hashes its text."""
    if product.in_parts:
        return settle(draft_in_parts(product, tiling))
    tiling = tiling.suited(product)
    emitter = ProductEmitter(product, tiling)
    draft = emitter.function("kernel")
    digest = hashlib.sha256(
        f"{draft.source}{draft.signature}{draft.warps}{draft.stages}".encode()
    ).hexdigest()[:12]
    other = tiling.unaligned()
    return emitter.function(f"g{digest}", emit_product(product, other) if other != tiling else None)


def draft_in_parts(product: Product, tiling: Tiling) -> TritonFunction:
    """The function of a product of few rows with its numbers between marks, for launches with others."""
    tiling = tiling.suited(product)
    other = tiling.unaligned()
    fallback = draft_in_parts(product, other) if other != tiling else None
    return ProductEmitter(product, tiling).function("gparts", fallback)
