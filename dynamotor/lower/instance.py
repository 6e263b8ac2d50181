"""A program at given sizes: what holds of it there is what checks of plain ints can see.

>>> verify_program(Instance({s0: 64}).program(program))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..graph.sizes import Dim, ShapeEnv, Symbol, evaluate
from ..graph.spec import TensorSpec
from .index_expr import Div, Index, Loaded, Var
from .ir import (
    Expr,
    ExternNode,
    Kernel,
    LoopNode,
    Statement,
    changed,
    index_value,
    make,
)
from .program import Buffer, BufRef, LoopStep, Program, Step

OTHERS = (3, 17, 70)  # sizes at which a program is checked beside those at which it is compiled


def samples(env: ShapeEnv) -> Iterator[dict[Symbol, int]]:
    """Values of the symbols: those at which a program is compiled, and others that it admits."""
    yield env.hints
    for n in range(len(OTHERS)):
        of = {symbol: OTHERS[(n + k) % len(OTHERS)] for k, symbol in enumerate(env.symbols)}
        if env.admits(of):
            yield of


class Instance:
    """Puts the symbols' values in: numbers, or expressions of other symbols."""

    def __init__(self, of: Mapping[Symbol, Dim]) -> None:
        self.of = of
        self._exprs: dict[Expr, Expr] = {}

    def value(self, x: Any) -> Any:
        """Anything that an expression or an argument holds."""
        if isinstance(x, Index):
            return self.index(x)
        if isinstance(x, Expr):
            return self.expr(x)
        if isinstance(x, Var):
            return Var(x.name, evaluate(x.size, self.of))
        if isinstance(x, BufRef):
            shape, stride, offset = (evaluate(n, self.of) for n in (x.shape, x.stride, x.offset))
            return replace(x, shape=shape, stride=stride, offset=offset)
        if isinstance(x, (tuple, list)):
            return type(x)([self.value(item) for item in x])
        return {k: self.value(v) for k, v in x.items()} if isinstance(x, dict) else evaluate(x, self.of)

    def index(self, index: Index) -> Index:
        total = Index({}, evaluate(index.const, self.of))
        for atom, c in index.terms.items():
            if isinstance(atom, Var):
                term = Index.of(self.value(atom))
            elif isinstance(atom, Loaded):
                term = Index.of(Loaded(self.expr(atom.expr), evaluate(atom.size, self.of)))
            else:
                base, n = self.index(atom.base), evaluate(atom.n, self.of)
                term = base // n if isinstance(atom, Div) else base % n
            total = total + term * evaluate(c, self.of)
        return total

    def expr(self, e: Expr) -> Expr:
        found = self._exprs.get(e)
        if found is None:
            found = (
                index_value(self.index(e.args[0]), e.dtype)
                if e.op == "index"
                else make(e.op, self.value(e.args), e.dtype)
            )
            self._exprs[e] = found
        return found

    def statement(self, s: Statement) -> Statement:
        return changed(s, self.expr, self.index)

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel with plain sizes."""
        loops = {part: self.value(getattr(kernel, part)) for part in ("outer", "middle", "inner")}
        return kernel.changed(lambda statements: map(self.statement, statements), symbols=(), **loops)

    def node(self, node: LoopNode) -> LoopNode:
        """The node, its body evaluated."""
        node.evaluate()
        fields = ("shape", "stride", "reduced", "offset", "own", "expr", "place")
        return replace(node, **{field: self.value(getattr(node, field)) for field in fields})

    def program(self, program: Program) -> Program:
        """The program with plain sizes; the symbols are inputs no more."""
        buffers = {name: replace(b, spec=b.spec.at(self.of)) for name, b in program.buffers.items()}
        steps: list[Step] = []
        for step in program.steps:
            if isinstance(step, LoopStep):
                steps.append(replace(step, kernel=self.kernel(step.kernel), symbols=()))
            else:
                steps.append(replace(step, args=self.value(step.args), kwargs=self.value(step.kwargs)))
        inputs = tuple(name for name in program.inputs if name in buffers)
        return replace(
            program,
            inputs=inputs,
            buffers=buffers,
            steps=steps,
            outputs=self.value(program.outputs),
            env=None,
        )


def nodes_at(
    env: ShapeEnv | None, schedule: Sequence[LoopNode | ExternNode], buffers: Mapping[str, Buffer]
) -> Iterator[tuple[Sequence[LoopNode | ExternNode], dict[str, TensorSpec]]]:
    """Loop nodes and their ranges, at several sizes."""
    if env is None:
        yield schedule, {name: b.spec for name, b in buffers.items()}
        return
    for of in samples(env):
        at = Instance(of)
        yield (
            [at.node(n) for n in schedule if isinstance(n, LoopNode)],
            {name: b.spec.at(of) for name, b in buffers.items()},
        )


def instances(program: Program, everywhere: bool) -> Iterator[Program]:
    """The program at the sizes at which it is compiled; everywhere: at others too."""
    if program.env is None:
        yield program
        return
    for n, of in enumerate(samples(program.env)):
        if everywhere or n == 0:
            yield Instance(of).program(program)
