"""Rows of intermediate tensors that matrix products read start at multiples of 16 bytes: cuBLAS's fast
kernels need that.

    dlogits: 2048 rows of 50257, 50257 apart   →   50257 wide still, 50264 apart

Only intermediates: what the user sees, and what one graph leaves for another, keeps its strides. Nobody reads
or writes the gaps.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ..graph.spec import aten, contiguous_stride
from ..lower.index import Index, Var
from ..lower.ir import Expr, Kernel, Phase, Reduce, Statement, Store, load, loaded_exprs, loads_of, rebuild
from ..lower.lowering import Decline, decline_if
from ..lower.program import Buffer, BufRef, ExternStep, Program, Step, refs

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
ALIGNMENT = 16  # bytes
LEAST_WIDTH, LEAST_ELEMENTS = (
    128,
    1 << 16,
)  # rows of 49: cuBLAS takes the same slow kernels, and they move more


def pad_rows(program: Program, width: int = LEAST_WIDTH, elements: int = LEAST_ELEMENTS) -> Program:
    """The program with the rows of such tensors moved apart, where every step that touches them can
    follow. width, elements: of the smallest tensors for which it pays.
    """
    for name in _candidates(program, width, elements):
        with contextlib.suppress(Decline):
            program = _padded(program, name)
    return program


def _candidates(program: Program, width: int, elements: int) -> list[str]:
    """Intermediates that a product reads or makes and whose rows do not start at multiples of 16 bytes."""
    products = [
        s
        for s in program.steps
        if isinstance(s, ExternStep) and s.target in _PRODUCTS and s.out_variant is not None
    ]
    named = dict.fromkeys(
        n for s in products for n in (*(r.name for r in refs((s.args, s.kwargs))), *filter(None, s.outs))
    )
    visible = {ref.name for ref in refs(program.outputs)} | set(program.mutations) | set(program.inputs)
    return [
        name
        for name in named
        if name not in visible and _is_misaligned(program.buffers[name], width, elements)
    ]


def _is_misaligned(buffer: Buffer, least_width: int, least: int) -> bool:
    spec = buffer.spec
    if buffer.kind != "temp" or len(spec.shape) < 2 or spec.stride != contiguous_stride(spec.shape):
        return False
    width, count = spec.shape[-1], spec.extent
    return width >= least_width and count >= least and width * spec.dtype.itemsize % ALIGNMENT != 0


def _padded(program: Program, name: str) -> Program:
    """The program with one buffer's rows moved apart; Decline when a step cannot follow."""
    buffer = program.buffers[name]
    width, unit = buffer.spec.shape[-1], ALIGNMENT // buffer.spec.dtype.itemsize
    rows = _Rows(name, int(width), int(-(-width // unit) * unit))
    steps = [rows.step(step) for step in program.steps]
    stride = tuple(1 if s == 1 else s // width * rows.row_stride for s in buffer.spec.stride)
    buffers = {**program.buffers, name: replace(buffer, spec=replace(buffer.spec, stride=stride))}
    return Program(program.name, program.inputs, buffers, steps, program.outputs, program.mutations)


class _Rows:
    """A buffer whose rows of `width` elements are to start `row_stride` elements from each other."""

    def __init__(self, name: str, width: int, row_stride: int) -> None:
        self.name, self.width, self.row_stride = name, width, row_stride

    def step(self, step: Step) -> Step:
        """The step with its accesses moved."""
        if isinstance(step, ExternStep):
            return self._extern(step)
        if self.name not in step.args:
            return step
        inplace = tuple(pair for pair in step.inplace if self.name not in pair)  # other memory has other gaps
        return replace(step, kernel=self._kernel(step.kernel), inplace=inplace)

    def _extern(self, step: ExternStep) -> ExternStep:
        touched = any(ref.name == self.name for ref in refs((step.args, step.kwargs)))
        if not touched and self.name not in step.outs:
            return step
        decline_if(step.target not in _PRODUCTS or step.out_variant is None, "a call that is no product")
        args = tuple(self._ref(a) if isinstance(a, BufRef) and a.name == self.name else a for a in step.args)
        return replace(step, args=args)

    def _ref(self, ref: BufRef) -> BufRef:
        """A view with its steps from row to row made longer."""
        row, start = divmod(ref.offset, self.width)
        stride = []
        for size, s in zip(ref.shape, ref.stride, strict=True):
            decline_if(size > 1 and s != 1 and s % self.width, "a view that does not step from row to row")
            decline_if(s == 1 and start + size > self.width, "a view that leaves a row")
            stride.append(s // self.width * self.row_stride if s % self.width == 0 else s)
        return replace(ref, stride=tuple(stride), offset=row * self.row_stride + start)

    def _kernel(self, kernel: Kernel) -> Kernel:
        try:
            return self._moved(kernel)
        except Decline:
            return self._moved(self._in_rows(kernel))

    def _moved(self, kernel: Kernel) -> Kernel:
        memo: dict[Expr, Expr] = {}

        def swap(statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
            moved = []
            for s in statements:
                if isinstance(s, Store) and s.buffer == self.name:
                    s = replace(s, index=self._index(s.index))
                moved.append(rebuild(s, self._load, memo))
            return tuple(moved)

        return kernel.changed(swap)

    def _load(self, e: Expr) -> Expr | None:
        if e.op != "load" or e.args[0] != self.name:
            return None
        inner = (found for x in loaded_exprs(e.args[1]) for found in loads_of(x))
        decline_if(any(found.args[0] == self.name for found in inner), "positions that are its own elements")
        return load(self.name, self._index(e.args[1]), e.args[2])

    def _index(self, index: Index) -> Index:
        """A position among the rows as they lay, as one among the rows moved apart."""
        row, column = index // self.width, index % self.width
        decline_if(not {*row.terms, *column.terms} <= index.terms.keys(), "places that take a division")
        return row * self.row_stride + column

    def _in_rows(self, kernel: Kernel) -> Kernel:
        """A map over one long loop as a map over rows and columns."""
        loops = [v for v in (*kernel.outer, *kernel.middle, *kernel.inner) if v.size > 1]
        reduces = any(isinstance(s, Reduce) for s in kernel.statements())
        decline_if(len(loops) != 1 or loops[0].size % self.width or reduces, "loops that are no rows")
        decline_if(len(kernel.phases) != 1 or kernel.final, "loops that are no rows")
        (long,) = loops
        row, column = Var(f"{long.name}r", long.size // self.width), Var(f"{long.name}c", self.width)
        env = {long: Index({row: self.width, column: 1})}
        inner = []
        for s in kernel.phases[0].inner:
            if not isinstance(s, Store):
                raise Decline("more than stores")
            inner.append(replace(s, index=s.index.subst(env), expr=s.expr.subst(env)))
        return replace(kernel, outer=(row,), middle=(), inner=(column,), phases=(Phase(tuple(inner)),))
