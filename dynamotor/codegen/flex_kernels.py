"""The text of attention's kernels with the user's functions of scores inside: no matrix of scores is written.

The forward goes through the keys with a running maximum and sum a row (Milakov and Gimelshein 2018; Dao et
al., FlashAttention, 2022); the backward computes the scores again, once along rows for the queries' gradient
and once along columns for the keys' and values'. Blocks of a `BlockMask` that hold nothing are not visited,
and full ones not masked.

>>> forward(case).source
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.cache import digest
from ..graph.result_strides import preserved_stride
from ..graph.sizes import Dim
from ..graph.spec import TensorSpec
from .flex_body import TRITON, Early, TileFunction
from .triton_kernel import TritonFunction
from .triton_ops import POINTER, lines_of

LOG2E = 1.4426950408889634
# Rows of queries, rows of keys, warps and stages of a kernel's tiles by how wide heads are: the quickest of
# `python -m bench.flex --tune` on an H200 (64 and 128; causal, bfloat16), forwards also of `bench masks`.
TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "forward": {64: (128, 64, 4, 3), 128: (128, 64, 4, 2), 256: (64, 32, 4, 2)},
    # A mask most of whose blocks are masked in part, a score function, a mask that reads tensors, and both.
    "partial": {64: (64, 64, 4, 3), 128: (128, 32, 4, 3), 256: (64, 32, 4, 2)},
    "scored": {64: (128, 128, 4, 2), 128: (128, 64, 4, 2), 256: (64, 32, 4, 2)},
    "reading": {64: (128, 128, 4, 2), 128: (128, 64, 4, 2), 256: (64, 32, 4, 2)},
    "partial reading": {64: (128, 128, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    "queries": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
    "keys": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)},
}
SMALL = (32, 32, 4, 2)


@dataclass(frozen=True)
class Blocks:
    """Where a `BlockMask` says that scores are: how many blocks a row of blocks has, and which."""

    count: TensorSpec
    index: TensorSpec


@dataclass(frozen=True)
class Case:
    """One kind of call. rows, columns: blocks that are masked element by element, and those that are not at
    all, by rows of queries and by rows of keys (None: not known). block: queries and keys of a block. out:
    the output and its gradient (None: row-major). sinks: a score of each head that no value belongs to.
    general: lengths and the strides that follow from them are arguments, so that one function serves all.
    orders: in which order programs take blocks, by rows and by columns.
    Gradients of the operands are laid out as these, if they are dense.
    """

    query: TensorSpec
    key: TensorSpec
    value: TensorSpec
    scale: float
    score: TileFunction | None
    mask: TileFunction | None
    free: tuple[TensorSpec, ...]
    n_score: int  # the first so many of `free` are the score's
    block: tuple[int, int] = (0, 0)
    rows: tuple[Blocks, Blocks | None] | None = None
    columns: tuple[Blocks, Blocks | None] | None = None
    out: TensorSpec | None = None
    sinks: TensorSpec | None = None
    general: bool = False
    orders: tuple[TensorSpec, TensorSpec] | None = None

    @property
    def result(self) -> TensorSpec:
        """The output."""
        if self.out is not None:
            return self.out
        shape = (*self.query.shape[:3], self.value.shape[3])
        return TensorSpec.dense(shape, self.query.dtype, self.query.device)

    @property
    def groups(self) -> int:
        """Heads of queries for each of the keys'."""
        return int(self.query.shape[1]) // int(self.key.shape[1])

    @property
    def plain(self) -> bool:
        """Whether there is no function of scores."""
        return self.score is None or self.score.identity

    @property
    def mask_reads(self) -> bool:
        """Whether the mask reads tensors, as one of documents does."""
        return len(self.free) > self.n_score


class _Writer:
    """Lines of one function."""

    def __init__(self, case: Case, what: str, tile: tuple[int, int, int, int]) -> None:
        self.case, self.what = case, what
        self.m, self.n, self.warps, self.stages = tile
        self.lines: list[str] = []
        self.indent = 1
        self.length, self.width = int(case.query.shape[2]), int(case.key.shape[2])
        self.numbers: dict[str, tuple[int, str]] = {}  # arguments of a general case: their values and types
        self.n_q, self.n_k = (self.number(n, "i32") for n in (self.length, self.width))
        self.e, self.f = int(case.query.shape[3]), int(case.value.shape[3])
        self.ep, self.fp = _power(self.e), _power(self.f)
        self.wide = any(fn is not None and fn.wide for fn in (case.score, case.mask))
        self.blocks = case.rows if what != "keys" else case.columns
        self.early = Early(("s", "plain", "qi" if what == "keys" else "ki"))
        self.before_loop = (
            0,
            1,
        )  # where lines go that stand before the loop over tiles, and how far to the right

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def number(self, value: Dim, kind: str = "i64") -> str:
        """The text of a number that lengths decide."""
        if not self.case.general:
            return str(value)
        name = f"i{len(self.numbers)}"
        self.numbers[name] = int(value), kind
        return name

    def stride(self, step: Dim) -> str:
        """The text of a stride between batches or heads of a tensor with rows of whole vectors."""
        return self.number(step, "i64" if int(step) % 16 else "i64:16")

    def text(self, text: str) -> None:
        """The lines of a text that is indented as the code around it."""
        for line in lines_of(text):
            self.line(line)

    def load(
        self, name: str, spec: TensorSpec, rows: str, size: str, width: tuple[int, int], flip: bool
    ) -> str:
        """A tile of a tensor that starts at `name`: `rows` below `size` (if any), by columns; flip: columns
        first.
        """
        columns, mask = f"tl.arange(0, {width[1]})", []
        down, across = ("[None, :]", "[:, None]") if flip else ("[:, None]", "[None, :]")
        far = ".to(tl.int64)" if int(spec.shape[2]) * int(spec.stride[2]) >= 2**31 else ""
        text = f"{name} + ({rows}{far}){down} * {spec.stride[2]} + {columns}{across} * {spec.stride[3]}"
        if size:
            mask.append(f"({rows} < {size}){down}")
        if width[0] != width[1]:
            mask.append(f"({columns} < {width[0]}){across}")
        return f"tl.load({text}, {' & '.join(mask)}, 0.0)" if mask else f"tl.load({text})"

    def tail(self, side: int) -> str:
        """How many queries (side 0) or keys there are, where a tile may hold positions behind them; else "".

        Tiles that a mask's blocks lead to may be behind the end as a whole.
        """
        size, step = (self.length, self.m) if side == 0 else (self.width, self.n)
        if self.blocks is not None and side == (0 if self.what == "keys" else 1):
            step = self.case.block[side]
        return (self.n_q, self.n_k)[side] if self.case.general or size % step else ""

    def positions(self, name: str, start: str, count: int) -> None:
        self.line(f"{name} = {start} + tl.arange(0, {count})")

    def at(self, spec: TensorSpec, batch: str, head: str) -> str:
        """The offset of a tensor's part for a batch and head."""
        return f"{batch} * {self.stride(spec.stride[0])} + {head} * {self.stride(spec.stride[1])}"

    def parts(self) -> None:
        """Lines that lead to the parts of q, k and v that a batch and a head of queries use."""
        self.text(f"""
            q += {self.at(self.case.query, "b", "h")}
            g = h // {self.case.groups}
            k += {self.at(self.case.key, "b", "g")}
            v += {self.at(self.case.value, "b", "g")}
        """)

    # -- the scores of a tile --------------------------------------------------------------------------------
    @property
    def unit(self) -> float:
        """What scores are multiplied by in exponents of 2, in one instruction with the subtraction; positive:
        the largest stays the largest.
        """
        scale = self.case.scale * LOG2E
        return LOG2E if not self.case.plain else scale if scale > 0 else 1.0

    def scores(self, product: str, masked: bool) -> None:
        """Lines for the scores `s` (in `unit`s); those that do not count are -inf."""
        case, by_query = self.case, self.what != "keys"
        self.line(f"raw = {product}")
        scale = case.scale if not self.case.plain else case.scale * LOG2E / self.unit
        self.line("s = raw" if scale == 1 else f"s = raw * {scale!r}")
        if not self.case.plain or masked and case.mask is not None:
            self.position(by_query)
        places = ["b", "h", "qi", "ki"]
        free = [f"f{n}" for n in range(len(case.free))]
        if not self.case.plain:
            assert case.score is not None
            self.line("plain = s")
            self.line(f"s = {self.inline(case.score, ['s', *places, *free[: case.n_score]])}")
        tests = []
        if masked and case.mask is not None:
            tests.append(f"({self.inline(case.mask, [*places, *free[case.n_score :]])})")
        if self.tail(1):
            tests.append(f"({'cols[None, :]' if by_query else 'cols[:, None]'} < {self.n_k})")
        if self.what == "keys" and self.tail(0):
            tests.append(f"(rows[None, :] < {self.n_q})")
        if tests:
            self.line(f's = tl.where({" & ".join(tests)}, s, float("-inf"))')

    def position(self, key: bool) -> None:
        """A line for the positions of the tile's queries or keys."""
        name, of, size = ("ki", "cols", self.n_k) if key else ("qi", "rows", self.n_q)
        kind = "tl.int64" if self.wide else "tl.int32"
        self.line(f"{name} = tl.minimum({of}, {size} - 1).to({kind})")

    def inline(self, fn: TileFunction, given: list[str], tangent: str = "") -> str:
        """Lines for a function's result, those that do not change in the loop before it; gives its text."""
        own: list[str] = []
        before = len(self.early.lines)
        down, across = ("ki", "qi") if self.what == "keys" else ("qi", "ki")
        along = {down: "[:, None]", across: "[None, :]"}
        text = fn.lines(given, own, tangent, self.early, self.number, along)
        place, indent = self.before_loop
        new = ["    " * indent + line for line in self.early.lines[before:]]
        self.lines[place:place] = new
        self.before_loop = place + len(new), indent
        self.lines += ["    " * self.indent + line for line in own]
        return text

    def slope(self, p: str, dp: str, delta: str) -> None:
        """Lines for `ds`, the gradient of the products."""
        self.line(f"ds = {p} * ({dp} - {delta})")
        if self.case.score is not None and not self.case.plain:
            free = [f"f{n}" for n in range(self.case.n_score)]
            text = self.inline(self.case.score, ["plain", "b", "h", "qi", "ki", *free], "ds")
            if text != "ds":
                self.line(f"ds = tl.where({p} > 0, {text}, 0.0)")

    # -- loops -----------------------------------------------------------------------------------------------
    def over(self, body: Any, step: int, size: str, own: str, side: int) -> None:
        """Run `body(start, masked)` for the tiles along one side: all, or those in the blocks of a mask.

        own: the block of the other side that this program is in.
        """
        if not self.case.plain or self.case.mask is not None:
            self.position(self.what == "keys")
        self.before_loop = len(self.lines), self.indent
        if self.blocks is None:
            self.line(f"for start in tl.range(0, {size}, {step}):")
            self.inside(body, "start", True)
            return
        long = self.case.block[side]
        per = long // step
        for k, blocks in enumerate(self.blocks):
            if blocks is None:
                continue
            batch = "b" if blocks.count.shape[0] != 1 else "0"
            head = "h" if blocks.count.shape[1] != 1 else "0"
            count, index = (
                f"{batch} * {self.number(spec.stride[0])} + {head} * {self.number(spec.stride[1])}"
                for spec in (blocks.count, blocks.index)
            )
            self.text(f"""
                n{k} = tl.load(c{k} + {count} + ({own}) * {blocks.count.stride[2]})
                of{k} = x{k} + {index} + ({own}) * {self.number(blocks.index.stride[2])}
                for t in tl.range(0, n{k} * {per}):
            """)
            apart = blocks.index.stride[3]
            at = f"tl.load(of{k} + t // {per} * {apart}) * {long} + t % {per} * {step}"
            self.inside(body, at if per > 1 else f"tl.load(of{k} + t * {apart}) * {long}", k == 0)

    def inside(self, body: Any, start: str, masked: bool) -> None:
        self.indent += 1
        self.line(f"at = {start}")
        body("at", masked)
        self.indent -= 1

    def function(self, tensors: dict[str, str], programs: int) -> TritonFunction:
        """The whole: tensors are the parameters' names and pointer types."""
        case = self.case
        parameters = dict(tensors)
        if self.blocks is not None:
            parameters |= {f"{word}{k}": "*i32" for k, b in enumerate(self.blocks) if b for word in "cx"}
        if self.case.orders is not None:
            parameters["order"] = "*i32"
        parameters |= {f"f{n}": POINTER[spec.dtype] for n, spec in enumerate(case.free)}
        parameters |= {name: kind for name, (_, kind) in self.numbers.items()}
        text = "\n".join(self.lines)
        name = f"dm_flex_{self.what}_{digest(text, repr(parameters))[:12]}"
        source = f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{text}\n"
        checks = any(fn is not None and fn.checks for fn in (case.score, case.mask))
        signature = tuple(parameters.values())
        numbers = tuple(value for value, _ in self.numbers.values())
        return TritonFunction(
            name, source, signature, programs, self.warps, checks, self.stages, numbers=numbers
        )


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def tile(case: Case, what: str) -> tuple[int, int, int, int]:
    """Rows of queries, rows of keys, warps and stages of a kernel's tiles; they divide the mask's blocks."""
    wide = max(_power(int(case.query.shape[3])), _power(int(case.value.shape[3])), 64)
    m, n, warps, stages = SMALL if case.query.dtype == torch.float32 else TILES[what][min(wide, 256)]
    m = min(m, _power(int(case.query.shape[2])), case.block[0] or m)
    n = min(n, _power(int(case.key.shape[2])), case.block[1] or n)
    return m, n, warps, stages


def _start(w: _Writer, side: int) -> int:
    """Which tile of a side (0: queries, 1: keys), batch and head a program is for; how many there are."""
    size, step, spec = (w.length, w.m, w.case.query) if side == 0 else (w.width, w.n, w.case.key)
    heads, count, batches = int(spec.shape[1]), -(-size // step), int(spec.shape[0])
    w.line("pid = tl.program_id(0)")
    if w.case.orders is not None:
        count = _start_in_order(w, side, size, step, heads)
    else:
        tiles = f"tl.cdiv({(w.n_q, w.n_k)[side]}, {step})" if w.case.general else str(count)
        w.text(f"""
            of = pid // {tiles}
            b = (of // {heads}).to(tl.int64)
            h = (of % {heads}).to(tl.int64)
            first = pid % {tiles} * {step}
        """)
    w.positions("cols" if side else "rows", "first", step)
    return count * heads * batches


def _start_in_order(w: _Writer, side: int, size: int, step: int, heads: int) -> int:
    """`_start` where blocks have an order: all heads of one, then those of the next. How many tiles."""
    assert w.case.orders is not None
    block, batches = w.case.block[side], int(w.case.query.shape[0])
    blocks, per = -(-size // block), block // step
    text = f"tl.cdiv({(w.n_q, w.n_k)[side]}, {block})" if w.case.general else str(blocks)
    is_shared = int(w.case.orders[side].shape[0]) == blocks  # by all batches
    inside = heads * batches if is_shared else heads
    w.text(f"""
        tile = pid // {inside}
        item = tl.load(order + tile // {per})
        b = ({f"pid % {inside} // {heads}" if is_shared else f"item // {text}"}).to(tl.int64)
        h = (pid % {heads}).to(tl.int64)
        of = b * {heads} + h
        first = item % {text} * {block} + tile % {per} * {step}
    """)
    if size % step == 0 and size % block and not w.case.general:  # no tests of the end: the last tile again
        w.line(f"first = tl.minimum(first, {size - step})")
    return blocks * per


def _dot(w: _Writer, a: str, b: str) -> str:
    exact = ', input_precision="ieee"' if w.case.query.dtype == torch.float32 else ""
    return f"tl.dot({a}, {b}{exact})"


def partial(case: Case) -> TritonFunction:
    """`forward`, for masks of places most of whose blocks are masked in part."""
    return forward(case, "partial reading" if case.mask_reads else "partial")


def forward(case: Case, tiles: str = "") -> TritonFunction:
    """Of q, k, v, out and lse: the output in the queries' type, and the logarithm of each row's sum."""
    kind = "reading" if case.mask_reads else "forward" if case.plain else "scored"
    w = _Writer(case, "forward", tile(case, tiles or kind))
    programs = _start(w, 0)
    w.parts()
    w.text(f"""
        qt = {w.load("q", case.query, "rows", w.tail(0), (w.e, w.ep), False)}
        top = tl.full([{w.m}], {_first(w)}, tl.float32)
        total = tl.full([{w.m}], {0.0 if case.sinks is None else 1.0}, tl.float32)
        acc = tl.full([{w.m}, {w.fp}], 0.0, tl.float32)
    """)

    def body(at: str, masked: bool) -> None:
        w.positions("cols", at, w.n)
        end = w.tail(1)
        w.line(f"kt = {w.load('k', case.key, 'cols', end, (w.e, w.ep), True)}")
        w.scores(_dot(w, "qt", "kt"), masked)
        w.text(f"""
            high = tl.maximum(top, tl.max(s, 1))
            base = tl.where(high == float("-inf"), 0.0, high * {w.unit!r})
            p = libdevice.exp2(s * {w.unit!r} - base[:, None])
            shrink = libdevice.exp2(top * {w.unit!r} - base)
            total = total * shrink + tl.sum(p, 1)
            vt = {w.load("v", case.value, "cols", end, (w.f, w.fp), False)}
        """)
        kind = TRITON[case.value.dtype]
        w.line(f"acc = acc * shrink[:, None] + {_dot(w, f'p.to({kind})', 'vt')}")
        w.line("top = high")

    w.over(body, w.n, w.n_k, f"first // {case.block[0] or 1}", 1)
    w.line("acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]")
    w.line(f"at = of.to(tl.int64) * {w.n_q} + rows")
    end = f", rows < {w.n_q}" if w.tail(0) else ""
    w.line(f"tl.store(lse + at, (top * {w.unit!r} + tl.log2(total)) * {1 / LOG2E!r}{end})")
    _store(w, "out", case.result, "rows", w.tail(0), (w.f, w.fp), "acc")
    kinds = {
        name: POINTER[spec.dtype] for name, spec in (("q", case.query), ("k", case.key), ("v", case.value))
    }
    kinds |= {"out": POINTER[case.query.dtype], "lse": "*fp32"}
    if case.sinks is not None:
        kinds["sinks"] = POINTER[case.sinks.dtype]
    return w.function(kinds, programs)


def _first(w: _Writer) -> str:
    """The score (in `unit`s) that rows begin with."""
    sinks = w.case.sinks
    if sinks is None:
        return 'float("-inf")'
    return f"tl.load(sinks + h * {sinks.stride[0]}).to(tl.float32) * {LOG2E / w.unit!r}"


def delta(case: Case) -> TritonFunction:
    """Of out, its gradient (laid out alike), the sums' gradient and the result: the subtrahend of each row's
    slope.
    """
    w = _Writer(
        replace(case, rows=None, score=None, mask=None, free=(), n_score=0, orders=None),
        "delta",
        (64, 16, 4, 1),
    )
    programs = _start(w, 0)
    end = w.tail(0)
    below, otherwise = (f", rows < {w.n_q}", ", 0.0") if end else ("", "")
    for name in ("out", "grad"):
        w.line(f"{name} += {w.at(case.result, 'b', 'h')}")
    w.text(f"""
        a = {w.load("out", case.result, "rows", end, (w.f, w.fp), False)}.to(tl.float32)
        g = {w.load("grad", case.result, "rows", end, (w.f, w.fp), False)}.to(tl.float32)
        at = of.to(tl.int64) * {w.n_q} + rows
        less = tl.load(grad_lse + at{below}{otherwise})
        tl.store(delta + at, tl.sum(a * g, 1) - less{below})
    """)
    kind = POINTER[case.query.dtype]
    return w.function({"out": kind, "grad": kind, "grad_lse": "*fp32", "delta": "*fp32"}, programs)


def _sums(w: _Writer, at: str) -> None:
    """Lines that load a row's logarithm of its sum (to base 2), and what its slope is less by."""
    end = f", rows < {w.n_q}, 0.0" if w.tail(0) else ""
    w.text(f"""
        sum = tl.load(lse + {at}{end})
        sum = tl.where(sum == float("-inf"), 0.0, sum * {LOG2E!r})
        less = tl.load(delta + {at}{end})
    """)


def queries(case: Case) -> TritonFunction:
    """Of q, k, v, the output's gradient, lse, delta and dq: the queries' gradient."""
    w = _Writer(case, "queries", tile(case, "queries"))
    programs = _start(w, 0)
    w.parts()
    end = w.tail(0)
    w.text(f"""
        qt = {w.load("q", case.query, "rows", end, (w.e, w.ep), False)}
        grad += {w.at(case.result, "b", "h")}
        gt = {w.load("grad", case.result, "rows", end, (w.f, w.fp), False)}
    """)
    _sums(w, f"of.to(tl.int64) * {w.n_q} + rows")
    w.line(f"acc = tl.full([{w.m}, {w.ep}], 0.0, tl.float32)")

    def body(at: str, masked: bool) -> None:
        w.positions("cols", at, w.n)
        tail = w.tail(1)
        w.line(f"kt = {w.load('k', case.key, 'cols', tail, (w.e, w.ep), True)}")
        w.line(f"vt = {w.load('v', case.value, 'cols', tail, (w.f, w.fp), True)}")
        w.scores(_dot(w, "qt", "kt"), masked)
        w.line(f"p = libdevice.exp2(s * {w.unit!r} - sum[:, None])")
        w.slope("p", _dot(w, "gt", "vt"), "less[:, None]")
        w.line(f"acc += {_dot(w, f'ds.to({TRITON[case.key.dtype]})', 'tl.trans(kt)')}")

    w.over(body, w.n, w.n_k, f"first // {case.block[0] or 1}", 1)
    like = gradient_of(case.query)
    _store(w, "dq", like, "rows", end, (w.e, w.ep), f"acc * {case.scale!r}")
    return w.function({**_operands(case), "dq": POINTER[case.query.dtype]}, programs)


def keys(case: Case) -> TritonFunction:
    """Of q, k, v, the output's gradient, lse, delta, dk and dv: the keys' and values' gradients."""
    w = _Writer(case, "keys", tile(case, "keys"))
    programs = _start(w, 1)
    w.line("g = h")
    for name, spec in (("k", case.key), ("v", case.value)):
        w.line(f"{name} += {w.at(spec, 'b', 'g')}")
    end = w.tail(1)
    w.text(f"""
        kt = {w.load("k", case.key, "cols", end, (w.e, w.ep), False)}
        vt = {w.load("v", case.value, "cols", end, (w.f, w.fp), False)}
        dkt = tl.full([{w.n}, {w.ep}], 0.0, tl.float32)
        dvt = tl.full([{w.n}, {w.fp}], 0.0, tl.float32)
        for member in tl.range(0, {case.groups}):
    """)
    w.indent += 1
    w.text(f"""
        h = g * {case.groups} + member
        qh = q + {w.at(case.query, "b", "h")}
        row0 = (b * {int(case.query.shape[1])} + h).to(tl.int64) * {w.n_q}
        gh = grad + {w.at(case.result, "b", "h")}
    """)

    def body(at: str, masked: bool) -> None:
        w.positions("rows", at, w.m)
        tail = w.tail(0)
        w.line(f"qt = {w.load('qh', case.query, 'rows', tail, (w.e, w.ep), True)}")
        w.line(f"gt = {w.load('gh', case.result, 'rows', tail, (w.f, w.fp), False)}")
        _sums(w, "row0 + rows")
        w.scores(_dot(w, "kt", "qt"), masked)
        w.line(f"p = libdevice.exp2(s * {w.unit!r} - sum[None, :])")
        w.line(f"dvt += {_dot(w, f'p.to({TRITON[case.query.dtype]})', 'gt')}")
        w.slope("p", _dot(w, "vt", "tl.trans(gt)"), "less[None, :]")
        w.line(f"dkt += {_dot(w, f'ds.to({TRITON[case.query.dtype]})', 'tl.trans(qt)')}")

    w.over(body, w.m, w.n_q, f"first // {case.block[1] or 1}", 0)
    w.indent -= 1
    w.line("h = g")
    _store(w, "dk", gradient_of(case.key), "cols", end, (w.e, w.ep), f"dkt * {case.scale!r}")
    _store(w, "dv", gradient_of(case.value), "cols", end, (w.f, w.fp), "dvt")
    outs = {"dk": POINTER[case.key.dtype], "dv": POINTER[case.value.dtype]}
    return w.function({**_operands(case), **outs}, programs)


def gradient_of(of: TensorSpec) -> TensorSpec:
    """Where the gradient of an operand is: as the operand, if that is dense."""
    return replace(of, stride=preserved_stride(of), offset=0)


def _operands(case: Case) -> dict[str, str]:
    given = (("q", case.query), ("k", case.key), ("v", case.value), ("grad", case.query))
    return {name: POINTER[spec.dtype] for name, spec in given} | {"lse": "*fp32", "delta": "*fp32"}


def _store(
    w: _Writer, name: str, spec: TensorSpec, rows: str, size: str, width: tuple[int, int], value: str
) -> None:
    """Write a tile to rows of batch `b` and head `h` of a tensor; size: their end, if they may pass it."""
    across = f"tl.arange(0, {width[1]})"
    tests = [f"({rows} < {size})[:, None]"] if size else []
    tests += [f"({across} < {width[0]})[None, :]"] if width[0] != width[1] else []
    mask = f", {' & '.join(tests)}" if tests else ""
    down = f"{rows}.to(tl.int64)[:, None] * {spec.stride[2]}"
    where = f"{name} + ({w.at(spec, 'b', 'h')}) + {down} + {across}[None, :] * {spec.stride[3]}"
    w.line(f"tl.store({where}, ({value}).to({TRITON[spec.dtype]}){mask})")
