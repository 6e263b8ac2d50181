"""The loop IR: hash-consed expressions at an index, the nodes that define buffers, and fused kernels.

Every expression has a compute type: float32 (also for half precisions), float64, int32 (also for narrower
integers), int64 or bool. Conversions to and from memory types happen in `load` and at stores.

>>> x = load("arg0", flat, torch.float32); str(op("mul", x, const(2.0, torch.float32)))
'mul(arg0[64*i + j], 2.0)'
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, TypeVar, final

import torch

from ..base.errors import InternalError
from ..graph.sizes import Dim, Dims, Size, Symbol
from .index_expr import ZERO, Index, Loaded, Var, flatten
from .whole_ranges import range_of

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool

COMPUTE_TYPE: dict[torch.dtype, torch.dtype] = {
    torch.float32: F32,
    torch.float64: F64,
    torch.bfloat16: F32,
    torch.float16: F32,
    torch.int64: I64,
    torch.int32: I32,
    torch.int16: I32,
    torch.int8: I32,
    torch.uint8: I32,
    torch.bool: BOOL,
}

# Complex numbers are stored only, by real parts of these types, beside zeros.
STORED: dict[torch.dtype, torch.dtype] = {
    **COMPUTE_TYPE,
    torch.complex32: F32,
    torch.complex64: F32,
    torch.complex128: F64,
}

# Types whose numbers loops move as bytes: see `float8.py`.
BYTES: dict[torch.dtype, torch.dtype] = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def memory_of(dtype: torch.dtype) -> torch.dtype:
    """The type as which loops read and store numbers of a dtype."""
    return BYTES.get(dtype, dtype)


# The cost of an element of each operation, in additions (vectorised). Operations not named here cost 1.
COST: dict[str, int] = {
    "div": 3,
    "sqrt": 3,
    "rsqrt": 5,
    "exp": 8,
    "log": 10,
    "tanh": 12,
    "erf": 14,
    "sigmoid": 12,
    "normal_cdf": 17,
    "rand": 40,
    "masked": 3,
    "floordiv": 8,
    "rem": 8,
    "fmod": 8,
    "pow": 40,
    "sin": 40,
    "cos": 40,
    "log1p": 40,
    "expm1": 40,
    "erfc": 40,
    "log2": 40,
    "log10": 40,
    "exp2": 40,
    "tan": 40,
    "asin": 40,
    "acos": 40,
    "atan": 40,
    "atan2": 40,
    "hypot": 40,
    "sinh": 40,
    "cosh": 40,
    "asinh": 40,
    "acosh": 40,
    "atanh": 40,
    "lgamma": 60,
    "round": 2,
    "const": 0,
    "index": 1,
    "acc": 0,
    "scratch": 1,
    "cast": 1,
    "float8": 2,
    "wrap_index": 1,
}


@final
class Expr:
    """One operation at one index. Interned: equal expressions are the same object, so `is` compares them."""

    __slots__ = ("op", "args", "dtype", "vars", "cost", "depth", "children", "_loads")

    def __init__(self, op: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.op, self.args, self.dtype = op, args, dtype
        found: frozenset[Var] = frozenset()
        children: list[Expr] = []  # its operands, expressions inside indices included
        for arg in args:
            if type(arg) is Expr:
                found = found | arg.vars if found else arg.vars
                children.append(arg)
            elif type(arg) is Index:
                found = found | arg.vars()
                children += loaded_exprs(arg)
        if op == "acc":  # complete only where the accumulator's loop is over: a pseudo variable bound there
            found = found | {Var(f"@{args[1]}", 0)}
        self.vars: frozenset[Var] = found
        self.cost = COST.get(op, 1)
        self.depth: int = 1 + max([e.depth for e in children], default=0)
        self.children = tuple(children)
        self._loads: list[Expr] | None = None

    def __repr__(self) -> str:
        if self.op == "load":
            return f"{self.args[0]}[{self.args[1]}]"
        if self.op == "const":
            return str(self.args[0])
        return f"{self.op}({', '.join(str(a) for a in self.args)})"

    def indices(self) -> list[Index]:
        """Its own index arguments."""
        return [arg for arg in self.args if type(arg) is Index]

    def subst(self, env: Mapping[Var, Index]) -> Expr:
        """Replace loop variables."""
        free = env.keys().isdisjoint  # expressions without these variables stay as they are
        if free(self.vars):
            return self
        # Fusion substitutes the same variables again for each node and order of loops that it tries.
        memo = _substituted.setdefault(tuple(env.items()), {})
        return rewrite(
            self, lambda e: e if free(e.vars) else None, lambda i: i if free(i.vars()) else i.subst(env), memo
        )


def loaded_exprs(index: Index) -> tuple[Expr, ...]:
    """Expressions inside an index."""
    if index.loaded is None:
        found: list[Expr] = []
        for atom in index.terms:
            if type(atom) is Loaded:
                found.append(atom.expr)
            elif type(atom) is not Var:
                found += loaded_exprs(atom.base)
        index.loaded = tuple(found)
    return index.loaded


_interned: dict[tuple[Any, ...], Expr] = {}
_substituted: dict[tuple[tuple[Var, Index], ...], dict[Expr, Expr]] = {}
# Held while expressions are made: they are interned, and memos are filled, for one graph at a time, and a
# backward is compiled on the thread that runs it first.
lowering_lock = threading.RLock()
# The thread that held it is not in the child.
os.register_at_fork(after_in_child=lowering_lock._at_fork_reinit)  # type: ignore[attr-defined]  # private


def forget_expressions() -> None:
    """Empty the intern table; done before each graph is lowered."""
    _interned.clear()
    _substituted.clear()
    Var.forget()


def make(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> Expr:
    """The interned expression."""
    key: tuple[Any, ...] = (op, dtype, args)
    if float in map(type, args):  # 0.0 and -0.0, and 1.0 and 1, are not the same; a NaN is itself
        key = (op, dtype, *((float, repr(a)) if type(a) is float else a for a in args))
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Expr(op, args, dtype)
    return found


def load(buffer: str, index: Index, memory: torch.dtype) -> Expr:
    """The element of a buffer at a flat index, converted to the compute type of the memory's dtype."""
    memory = memory_of(memory)
    return make("load", (buffer, index, memory), COMPUTE_TYPE[memory])


def const(value: float | int | bool | Size, dtype: torch.dtype) -> Expr:
    """A number of a compute type."""
    if type(value) is Size:
        return cast(make("index", (Index({}, value),), I64), dtype)
    if dtype.is_floating_point:
        value = float(value)
    elif dtype is BOOL:
        value = bool(value)
    else:
        value = int(value)
        bits = 32 if dtype is I32 else 64
        value = (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
    return make("const", (value,), dtype)


def index_value(index: Index, dtype: torch.dtype = I64) -> Expr:
    """An index as a number."""
    if not index.terms and type(index.const) is int:
        return const(index.const, dtype)
    return make("index", (index,), dtype)


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """Convert between compute types, as C does (float to int truncates; to bool is `!= 0`)."""
    if x.dtype is dtype:
        return x
    if x.op == "const" and not (isinstance(x.args[0], float) and not dtype.is_floating_point):
        return const(torch.tensor(x.args[0], dtype=F32).item() if x.dtype is F32 else x.args[0], dtype)
    return make("cast", (x,), dtype)


# Operations that give one of their operands or its negative, and the index of the first such operand.
_OPERANDS_THAT_ROUND = {"neg": 0, "abs": 0, "max": 0, "min": 0, "select": 1, "masked": 1}


def fits(x: Expr, memory: torch.dtype) -> bool:
    """Whether rounding x to the half dtype `memory` changes nothing: it only moves, chooses or negates loads
    of that dtype. Ask only after loads of the kernel's own results are replaced by these results, which are
    not rounded yet. A larger expression counts as one that rounding changes.
    """
    todo, budget = [x], 32
    while todo and budget:
        e, budget = todo.pop(), budget - 1
        if e.op in _OPERANDS_THAT_ROUND:
            todo += [a for a in e.args[_OPERANDS_THAT_ROUND[e.op] :] if isinstance(a, Expr)]
        elif e.op == "const":
            if torch.tensor(e.args[0], dtype=e.dtype).to(memory).item() != e.args[0]:
                return False
        elif e.op not in ("load", "round_to") or e.args[-1] is not memory:
            return False
    return not todo


# The integers up to which a half type holds every one.
_WHOLE = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}


def _holds(memory: torch.dtype, x: Expr) -> bool:
    """Whether a memory type holds all numbers that x can be, which are integers."""
    if memory in _WHOLE:
        found = range_of(x.args[0]) if x.op == "cast" else None
        low, high = -_WHOLE[memory], _WHOLE[memory]
    elif memory is BOOL or memory.is_floating_point:
        return False
    else:
        found = range_of(x)
        low, high = torch.iinfo(memory).min, torch.iinfo(memory).max
    return found is not None and low <= found[0] and found[1] <= high


def round_to(x: Expr, memory: torch.dtype) -> Expr:
    """The value after a trip through a memory type (half precisions round, narrow integers wrap)."""
    if COMPUTE_TYPE[memory] is memory or (x.op == "round_to" and x.args[1] is memory):
        return x
    if memory is torch.uint8 and x.op == "cast" and x.args[0].dtype is F64:  # aten converts by way of int64
        x = cast(cast(x.args[0], I64), x.dtype)
    if x.op == "const" and memory is not BOOL:
        return const(torch.tensor(x.args[0], dtype=x.dtype).to(memory).item(), x.dtype)
    if _holds(memory, x):
        return x
    choice = _choice(x)
    if choice is not None and memory.is_floating_point:
        return _chosen(choice, lambda n: torch.tensor(n, dtype=x.dtype).to(memory).item(), x.dtype)
    return make("round_to", (x, memory), x.dtype)


_ON_NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def op(name: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
    """An arithmetic operation; the result has the first operand's type unless `dtype` is given.

    One on a boolean (as a number) and a constant is a choice between two constants: `mask / 0.9` divides
    nothing.
    """
    if args[0].dtype is BOOL:  # a target may hold true as -1
        name = {"max": "or", "min": "and"}.get(name, name)
        if name in ("and", "or"):
            for one, rest in (args, args[::-1]):
                if one.op == "const":
                    return rest if one.args[0] is (name == "and") else one
    if name in _ON_NUMBERS and len(args) == 2 and args[1].op == "const" and args[0].dtype.is_floating_point:
        choice = _choice(args[0])
        if choice is not None:
            kind, by = args[0].dtype, args[1].args[0]
            by = torch.tensor(by, dtype=kind)
            return _chosen(choice, lambda n: _ON_NUMBERS[name](torch.tensor(n, dtype=kind), by).item(), kind)
    return make(name, args, dtype or args[0].dtype)


def _choice(x: Expr) -> tuple[Expr, float, float] | None:
    """(condition, value where it holds, value elsewhere) of an expression with two possible values."""
    if x.op == "cast" and x.args[0].dtype is BOOL:
        return x.args[0], 1.0, 0.0
    if x.op == "select" and x.args[1].op == x.args[2].op == "const":
        return x.args[0], x.args[1].args[0], x.args[2].args[0]
    return None


def _chosen(choice: tuple[Expr, float, float], change: Callable[[float], float], dtype: torch.dtype) -> Expr:
    """The two values changed."""
    condition, a, b = choice
    a, b = change(a), change(b)
    is_number = (a, b, math.copysign(1, b)) == (1, 0, 1)
    return cast(condition, dtype) if is_number else select(condition, const(a, dtype), const(b, dtype))


def _alike(name: str, a: Expr, b: Expr) -> None:
    """Operands have one compute type: C++ has no such function of two, and Triton would choose one by
    itself.
    """
    if a.dtype is not b.dtype:
        raise InternalError(
            "DM913",
            f"{name} of {a.dtype} and {b.dtype} in a lowered program",
            why="a wrong rule in dynamotor.lower",
            cure="report the program; backend='aot_eager' runs it without the native compiler",
        )


def compare(name: str, a: Expr, b: Expr) -> Expr:
    """lt, le, gt, ge, eq, ne; of two integers that are known, the answer."""
    _alike(name, a, b)
    if a.op == b.op == "const" and a.dtype in (I32, I64):
        return const(getattr(operator, name)(a.args[0], b.args[0]), BOOL)
    return make(name, (a, b), BOOL)


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a where the condition holds, else b (both are computed)."""
    _alike("select", a, b)
    return a if a is b else make("select", (condition, a, b), a.dtype)


def masked(condition: Expr, body: Expr, other: Expr) -> Expr:
    """As `select`, but reads the memory of each of the two only where that one is chosen."""
    if condition.op == "const":
        return body if condition.args[0] else other
    return make("masked", (condition, body, other), body.dtype)


def rewrite(
    root: Expr,
    leaf: Callable[[Expr], Expr | None],
    on_index: Callable[[Index], Index] | None = None,
    memo: dict[Expr, Expr] | None = None,
) -> Expr:
    """Rebuild a tree: `leaf` may replace an expression (None: go inside), `on_index` replaces whole index
    arguments.
    """
    memo = {} if memo is None else memo

    def visit_index(i: Index) -> Index:
        if on_index is not None:
            return on_index(i)  # loaded indices included
        return _map_loaded(i, visit) if loaded_exprs(i) else i

    def visit(e: Expr) -> Expr:
        done = memo.get(e)
        if done is None:
            done = leaf(e)
            if done is None:
                args = tuple(
                    [
                        visit(a) if type(a) is Expr else visit_index(a) if type(a) is Index else a
                        for a in e.args
                    ]
                )
                done = e if args == e.args else make(e.op, args, e.dtype)
            memo[e] = done
        return done

    return visit(root)


def _map_loaded(index: Index, visit: Callable[[Expr], Expr]) -> Index:
    total = Index({}, index.const)
    for atom, c in index.terms.items():
        if isinstance(atom, Loaded):
            total = total + Index.of(Loaded(visit(atom.expr), atom.size)) * c
        elif isinstance(atom, Var):
            total = total + Index.of(atom) * c
        else:
            base = _map_loaded(atom.base, visit)
            total = total + (base // atom.n if type(atom).__name__ == "Div" else base % atom.n) * c
    return total


def rewrite_index(
    index: Index, leaf: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None
) -> Index:
    """An index with the values inside it rebuilt as `rewrite` does."""
    memo = {} if memo is None else memo
    return _map_loaded(index, lambda e: rewrite(e, leaf, memo=memo))


def walk(*roots: Expr) -> list[Expr]:
    """Every distinct expression under the roots, operands first."""
    found: dict[Expr, None] = {}

    def visit(e: Expr) -> None:
        for child in e.children:
            if child not in found:
                visit(child)
        found[e] = None

    for root in roots:
        if root not in found:
            visit(root)
    return list(found)


def total_cost(root: Expr) -> int:
    """Cost of computing it once, each distinct part counted once."""
    return sum(e.cost for e in walk(root))


def loads_of(root: Expr) -> list[Expr]:
    """The distinct loads under an expression."""
    if root._loads is None:
        root._loads = [e for e in walk(root) if e.op == "load"]
    return root._loads


def neutral(kind: str, dtype: torch.dtype) -> float | int | bool:
    """The initial value of a reduction of a compute type."""
    if kind in ("sum", "any", "exp_sum"):
        return 0
    if kind in ("prod", "all"):
        return 1
    low = kind in ("max", "argmax", "logaddexp")
    if dtype is BOOL:
        return not low
    if dtype.is_floating_point:
        return -math.inf if low else math.inf
    return torch.iinfo(dtype).min if low else torch.iinfo(dtype).max


ReduceKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin"]
ScanKind = Literal["sum", "prod", "max", "min", "argmax", "argmin", "logaddexp"]


class Template(StrEnum):
    """The shape of a kernel's loops; see `Kernel`."""

    ROWS = "rows"
    COLS = "cols"
    SCAN = "scan"


ROWS, COLS, SCAN = Template


class Level(StrEnum):
    """How often something of a nest is done: for every element, once a row, for each kept element after all
    rows, or once.
    """

    FULL = "full"
    ROW = "row"
    FINAL = "final"
    ONCE = "once"


FULL, ROW, FINAL, ONCE = Level
Body = Callable[[tuple[Index, ...]], Expr]


@dataclass(eq=False, slots=True)
class LoopNode:
    """Defines one buffer by a loop over `shape` (and, for a reduction, over `reduced` too).

    `body(index)` gives the value at an index of `shape + reduced`. `stride`/`offset` place the result in the
    buffer. scan: the result is the running sum (or ...) of the values along dimension `along`. scatter: where
    in the buffer the value at an index goes, instead of stride and offset; `add`: it is added to the value
    there. in_order: as a loop over the indices in row-major order does it (else in any order, sums by
    atomics). `after`: names of nodes that must run before although this one does not read them (writes into
    inputs). part: the buffer holds values already; those at stride and offset are replaced. serial: a scan
    whose kernel computes one element at a time, without vectors (C++).

    phase: "backward" for nodes of the backward in a whole step that rematerialises values.
    """

    buffer: str
    shape: Dims
    body: Body
    stride: Dims
    memory: torch.dtype
    reduce: ReduceKind | None = None
    reduced: Dims = ()
    scan: ScanKind | None = None
    along: int = 0
    scatter: Callable[[tuple[Index, ...]], Index] | None = None
    add: bool = False
    in_order: bool = True
    serial: bool = False
    offset: Dim = 0
    after: frozenset[str] = frozenset()
    origin: str = ""
    part: bool = False
    phase: str = ""
    own: tuple[Var, ...] = ()
    expr: Expr | None = None
    place: Index = ZERO  # filled in by `evaluate`, with `reads`
    reads: frozenset[str] = frozenset()

    @property
    def gives_position(self) -> bool:
        """Whether it reduces to a position (argmax, argmin), not to a value."""
        return self.reduce in ("argmax", "argmin")

    @property
    def domain(self) -> Dims:
        return self.shape + self.reduced

    def evaluate(self) -> Expr:
        """The body over the node's own variables `own`; also fills `place` and `reads`."""
        if self.expr is None:
            self.own = tuple(
                Var(f"{'i' if d < len(self.shape) else 'r'}{d}", n) for d, n in enumerate(self.domain)
            )
            index = tuple(Index.of(v) for v in self.own)
            self.expr = self.body(index)
            kept = index[: len(self.shape)]
            self.place = self.scatter(kept) if self.scatter else flatten(kept, self.stride, self.offset)
            self.reads = frozenset(
                e.args[0] for root in (self.expr, *loaded_exprs(self.place)) for e in loads_of(root)
            )
        return self.expr


@dataclass(eq=False, slots=True)
class ExternNode:
    """An aten call in the schedule: which buffers it reads, makes and writes in place; `step` is filled in by
    lowering.
    """

    step: Any
    reads: frozenset[str]
    makes: tuple[str, ...]
    mutates: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Store:
    """`buffer[index] = expr`, converted to the memory type. add: `buffer[index] += expr`, by other programs
    too. over: the buffer holds values already, and some of them are replaced. part: so does it,
    and each of these is replaced once, in any order.

    An index with loaded positions in it is a scatter: several elements may go to one place.
    """

    buffer: str
    index: Index
    expr: Expr
    memory: torch.dtype
    add: bool = False
    over: bool = False
    part: bool = False

    @property
    def scatters(self) -> bool:
        """Whether places are computed, or some of those that hold a value already."""
        return self.add or self.over or bool(loaded_exprs(self.index))


@dataclass(frozen=True, slots=True)
class Reduce:
    """`acc = kind(acc, expr)` over the loops it stands in; read back as the expression acc(id).

    across: the accumulator lives through all rows (template rows) or all of `middle` (template cols), one an
    index of `inner` when it stands among a phase's inner statements, one number when it stands among its row
    statements. top: for the kind "exp_sum", the sum of exp(expr - maximum): the id of that maximum, gathered
    in the same pass.
    """

    id: int
    kind: str
    expr: Expr
    position: Index | None = None  # argmax, argmin: the number that is reported
    across: bool = False
    top: int | None = None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Keep a value of the current row for later phases; read back as scratch(id)."""

    id: int
    expr: Expr


@dataclass(frozen=True, slots=True)
class ScanStatement:
    """The running `kind` of expr along the inner loops, this element included; read back as the expression
    scan(id).

    Positions (argmax, argmin) are those of the last of equal values, as cummax and cummin report them.
    """

    id: int
    kind: str
    expr: Expr
    position: Index | None = None


Statement = Store | Reduce | Scratch | ScanStatement


Kind = TypeVar("Kind", Store, Reduce, Scratch, ScanStatement)


def of_kind(s: Statement, kind: type[Kind]) -> Kind:
    """The statement, which must be of this kind where it stands; InternalError when it is not."""
    if isinstance(s, kind):
        return s
    raise InternalError(
        "DM915",
        f"the statement {s} where only a {kind.__name__} may stand",
        cure="this is a bug in dynamotor: please report it",
    )


def roots(*statements: Statement) -> Iterator[Expr]:
    """Everything that statements compute: their expressions, and the values in the places that they store
    to.
    """
    for s in statements:
        yield s.expr
        if isinstance(s, Store):
            yield from loaded_exprs(s.index)


def changed(
    s: Statement, expr: Callable[[Expr], Expr], index: Callable[[Index], Index] | None = None
) -> Statement:
    """A statement with another expression and, if `index` is given, other indices: the one of a store, the
    position that a reduction or scan records.
    """
    fields: dict[str, Any] = {"expr": expr(s.expr)}
    if index is not None:
        fields |= {name: index(place) for name, place in places(s).items()}
    return replace(s, **fields)


def places(s: Statement) -> dict[str, Index]:
    """The indices of a statement beside those in its expression, by field."""
    if isinstance(s, Store):
        return {"index": s.index}
    position = s.position if isinstance(s, Reduce | ScanStatement) else None
    return {} if position is None else {"position": position}


def rebuild(s: Statement, leaf: Callable[[Expr], Expr | None], memo: dict[Expr, Expr]) -> Statement:
    """A statement with its expressions rebuilt as `rewrite` does, those in the place that it stores to
    too.
    """
    s = replace(s, expr=rewrite(s.expr, leaf, memo=memo))
    return replace(s, index=rewrite_index(s.index, leaf, memo)) if isinstance(s, Store) and s.scatters else s


@dataclass(frozen=True, slots=True)
class Phase:
    """One pass of the inner loops over a row, then statements done once a row."""

    inner: tuple[Statement, ...]
    row: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fused loop nest.

    template "rows": for each index of `outer` (in parallel) the phases, each a pass over `inner`. template
    "cols": for each index of `outer` and `inner` (in vectors) one pass over `middle`. template "scan": for
    each index of `outer` one pass over `inner` in order; its statements are scans and stores. `final`:
    statements over the kept loops once the across accumulators are complete (rows: `inner`; cols: `outer` and
    `inner`); `final_once`: statements done once, after that. params: (buffer, memory type, written) in the
    order of `ptrs`. symbols: those that its sizes and indices are made of.
    """

    template: Template
    outer: tuple[Var, ...]
    middle: tuple[Var, ...]
    inner: tuple[Var, ...]
    phases: tuple[Phase, ...]
    final: tuple[Statement, ...] = ()
    final_once: tuple[Statement, ...] = ()
    params: tuple[tuple[str, torch.dtype, bool], ...] = ()
    symbols: tuple[Symbol, ...] = ()

    def statements(self) -> Iterator[Statement]:
        """All statements in order."""
        for phase in self.phases:
            yield from phase.inner
            yield from phase.row
        yield from self.final
        yield from self.final_once

    def changed(
        self, change: Callable[[tuple[Statement, ...]], Iterable[Statement]], **fields: Any
    ) -> Kernel:
        """The kernel with each of its lists of statements changed, and further fields replaced."""
        phases = tuple(Phase(tuple(change(p.inner)), tuple(change(p.row))) for p in self.phases)
        final, once = tuple(change(self.final)), tuple(change(self.final_once))
        return replace(self, phases=phases, final=final, final_once=once, **fields)

    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads."""
        exprs = walk(*roots(*self.statements()))
        return tuple(dict.fromkeys(e.args[0] for e in exprs if e.op == "load"))

    def with_params(self, partial: Iterable[tuple[str, torch.dtype]] = ()) -> Kernel:
        """The kernel with its parameters in the order of their first use: loads and stores, then
        partial results.
        """
        found: dict[str, tuple[str, torch.dtype, bool]] = {}
        for e in walk(*roots(*self.statements())):
            if e.op == "load":
                found.setdefault(e.args[0], (e.args[0], e.args[2], False))
        stored = [(s.buffer, s.memory) for s in self.statements() if isinstance(s, Store)]
        found |= {name: (name, memory, True) for name, memory in (*stored, *partial)}
        return replace(self, params=tuple(found.values()))

    def streams(self) -> tuple[int, ...]:
        """Streams of its random numbers in order: the kernel gets them as numbers, so that layers share one
        function.
        """
        found = (e.args[1] for e in walk(*roots(*self.statements())) if e.op == "rand")
        return tuple(dict.fromkeys(found))

    def sizes(self) -> Iterator[Size]:
        """Every expression of sizes in it."""
        for v in (*self.outer, *self.middle, *self.inner):
            yield from _sizes_in(v.size)
        for s in self.statements():
            for place in places(s).values():
                yield from _sizes_in(place)
        for e in walk(*roots(*self.statements())):
            for arg in e.args:
                yield from _sizes_in(arg)


def _sizes_in(value: Any) -> Iterator[Size]:
    if type(value) is Size:
        yield value
    elif isinstance(value, Index):
        yield from _sizes_in(value.const)
        for atom, c in value.terms.items():
            yield from _sizes_in(c)
            if isinstance(atom, Var | Loaded):
                yield from _sizes_in(atom.size)
            else:
                yield from _sizes_in(atom.n)
                yield from _sizes_in(atom.base)
