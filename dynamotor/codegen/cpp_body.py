"""Statements inside loops: places each expression in the outermost scope where its variables are known.

A scope is a block of C++ with the loop variables bound in it. In the vector scope expressions that depend on
its variable are vectors, everything else is a scalar computed further out. What has no vector form runs lane
by lane.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..graph.sizes import Dim, Size
from ..lower.index_expr import Div, Index, Loaded, Mod, Var, is_one, is_zero, may_be_negative
from ..lower.ir import BOOL, F32, Expr, const, walk
from .cpp_narrow import NarrowLanes
from .cpp_ops import ADDS_NOTHING, COMPARISONS, TEXT, ctype, literal, operation
from .lane_conditions import comparisons, same_for_all_lanes, stays_in_a_block
from .scopes import Rereads, ValueScope

LOGIC = ("and", "or", "xor", "not")
MOST_COMPARED = 12  # expressions of a condition whose text is written into each of its readers


class CppScope(ValueScope[tuple[str, int]]):
    """One block: its lines, the values computed in it and the C++ names of the variables it binds."""

    parent: CppScope | None

    def __init__(
        self,
        parent: CppScope | None,
        bound: Iterable[tuple[Var, str]] = (),
        width: int = 1,
        vector: Var | None = None,
        closed: bool = False,
    ) -> None:
        super().__init__(parent)
        self.width, self.vector = width, vector
        self.own = dict(bound)
        self.bound: dict[Var, str] = {**(parent.bound if parent else {}), **self.own}
        self.lines: list[str] = []
        self.closed = closed  # nothing may be moved out of this block (it runs under a condition)
        self.alike: bool = parent is not None and parent.alike  # no lane of the vector is behind a boundary
        self.aligned: bool = parent is not None and parent.aligned  # vectors begin at multiples of the width

    @property
    def loop(self) -> Var:
        """The loop whose lanes a vector holds, of a scope with vectors."""
        assert self.vector is not None
        return self.vector


class CppBody:
    """Emits expressions of one function."""

    def __init__(
        self, params: dict[str, str], streams: tuple[int, ...] = (), exprs: Iterable[Expr] = ()
    ) -> None:
        self.streams, self.rereads = streams, Rereads(exprs)
        self.params = params  # buffer -> pointer name
        self.count = 0
        self.random = False
        self.widths: set[int] = set()
        self.prefilled: dict[
            Expr, tuple[str, Index]
        ] = {}  # rand expressions whose numbers are in a row buffer
        self.scratch: dict[int, str] = {}
        self.sizes: dict[Size, str] = {}  # sizes that the function computes first, and their names

    def stream(self, number: int) -> str:
        """A random stream's number, as C++ text."""
        return f"(u32)ints[{self.streams.index(number)}]"

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def number(self, n: Dim) -> str:
        """A size as C++ text."""
        return str(n) if type(n) is not Size else self.sizes.setdefault(n, f"z{len(self.sizes)}")

    # -- indices ---------------------------------------------------------------------------------------------
    def index(self, index: Index, scope: CppScope) -> str:
        """An index as C++ text; loaded indices are computed first (as scalars)."""
        parts: list[str] = []
        for atom, c in index.terms.items():
            if isinstance(atom, Var):
                text = scope.bound[atom]
            elif isinstance(atom, Loaded):
                text = self.value(atom.expr, scope, scalar=True)
            else:
                base, n = self.index(atom.base, scope), self.number(atom.n)
                if may_be_negative(atom):
                    text = (
                        f"(({base})/{n}-(({base})%{n}<0))"
                        if isinstance(atom, Div)
                        else f"((({base})%{n}+{n})%{n})"
                    )
                else:
                    text = f"(({base}){'/' if isinstance(atom, Div) else '%'}{n})"
            parts.append(
                text if is_one(c) else f"{self.number(c)}*{text}" if type(c) is Size else f"{c}l*{text}"
            )
        if not is_zero(index.const) or not parts:
            parts.append(self.number(index.const))
        return "+".join(parts).replace("+-", "-")

    # -- values ----------------------------------------------------------------------------------------------
    def home(self, e: Expr, scope: CppScope) -> CppScope:
        """The outermost scope in which e can be computed."""
        best = scope
        if self.rereads.stays(e):
            return best
        while not best.closed and best.parent is not None and not (e.vars & best.own.keys()):
            best = best.parent
        return best

    def value(self, e: Expr, scope: CppScope, scalar: bool = False) -> str:
        """The name of e as seen from `scope`, in the scope's width when it depends on the vector variable."""
        found = scope.find(e)
        if found is None:
            home = self.home(e, scope)
            found = self._compute(e, home), (home.width if home.vector in e.vars else 1)
            if e.op != "const":
                home.values[e] = found
        return found[0]

    def operand(self, e: Expr, scope: CppScope, width: int) -> str:
        """e in exactly `width` lanes."""
        if type(width) is NarrowLanes and e.op == "const" and e.dtype is F32:
            return f"bc<{ctype(F32, width)}>({width.bits(e.args[0])})"
        name = self.value(e, scope)
        have = scope.find(e)
        have_width = have[1] if have else 1
        if have_width == width:
            return name
        if type(width) is NarrowLanes and e.dtype is F32:  # outside of the loop a half is a float
            name = f"half_bits<{width.element}>({name})"
        return f"bc<{ctype(e.dtype, width)}>({name})"

    def rounded(self, e: Expr, scope: CppScope, width: int) -> str:
        """`operand` for a reader that may add to it: no multiply-add is made of a product."""
        text = self.operand(e, scope, width)
        return f"rounded_({text})" if e.op == "mul" and e.dtype.is_floating_point else text

    def _compute(self, e: Expr, scope: CppScope) -> str:
        """Emit e into its scope; gives its name (or the literal)."""
        width = scope.width if scope.vector is not None and scope.vector in e.vars else 1
        if e.op == "const":
            return literal(e.args[0], e.dtype)
        if width > 1 and self._needs_lanes(e, scope):
            return self._by_lanes(e, scope, width)
        if e.op == "masked":
            return self._masked(e, scope, width)
        result = ctype(e.dtype, width)
        if e.op == "load":
            text = self.load(e, scope, width, result)
        elif e.op == "index":
            text = self._index_value(e, scope, width, result)
        elif e.op == "rand":
            text = self._rand(e, scope, width, result)
        elif e.op == "scratch":
            text = f"ld<{result}>({self.scratch[e.args[0]]}+{self.index(e.args[1], scope)})"
        else:
            text = self._chosen(e, scope, width) or self._operation(e, scope, width, result)
        return self._define(result, text, scope)

    def _operation(self, e: Expr, scope: CppScope, width: int, result: str) -> str:
        read = self.operand if e.op in ADDS_NOTHING else self.rounded
        operands = [read(a, scope, width) for a in e.args if isinstance(a, Expr)]
        return operation(e, operands, result, width, self.number)

    def _chosen(self, e: Expr, scope: CppScope, width: int) -> str | None:
        """A choice by comparisons of values as wide as its own, or the number 1 or 0 for them: the
        processor's mask goes from one to the other. As a value of its own it would be 32 bits a lane.
        """
        if width == 1 or e.op not in ("select", "cast") or e.dtype is BOOL or e.args[0].dtype is not BOOL:
            return None
        if scope.vector not in e.args[0].vars:
            return None
        mask = self._mask(e.args[0], scope, width, e.dtype.itemsize)
        if mask is None:
            return None
        one, zero = const(1, e.dtype), const(0, e.dtype)
        yes, no = (self.rounded(a, scope, width) for a in (e.args[1:] if e.op == "select" else (one, zero)))
        return f"{mask}?{yes}:{no}"

    def _mask(self, condition: Expr, scope: CppScope, width: int, nbytes: int) -> str | None:
        """A condition as C++ text, of as many bytes a lane; None where it is no logic of such comparisons."""
        parts = [a for a in condition.args if isinstance(a, Expr)]
        if condition.op in COMPARISONS:
            if any(a.dtype is BOOL or a.dtype.itemsize != nbytes for a in parts):
                return None
            a, b = (self.operand(part, scope, width) for part in parts)
            return f"({a}{COMPARISONS[condition.op]}{b})"
        if condition.op not in LOGIC or len(walk(condition)) > MOST_COMPARED:
            return None
        masks = [self._mask(part, scope, width, nbytes) for part in parts]
        return None if None in masks else f"({TEXT[condition.op].format(*masks)})"

    def _define(self, result: str, text: str, scope: CppScope) -> str:
        name = self.fresh()
        scope.lines.append(f"const {result} {name}={text};")
        return name

    def load(self, e: Expr, scope: CppScope, width: int, result: str) -> str:
        """A load as C++ text, in vectors along the scope's loop."""
        buffer, index, _ = e.args
        at = f"{self.params[buffer]}+{self.index(index, scope)}"
        step = step_along(index, scope) if width > 1 else 1
        if is_one(step):
            return f"ldb<{result}>({at})" if e.dtype is BOOL else f"ld<{result}>({at})"
        if type(step) is int and step == 0:
            bits = "b" * (e.dtype is BOOL)
            return f"bc<{result}>(ld{bits}<{ctype(e.dtype, 1)}>({at}))"
        if step == -1 and e.dtype is not BOOL:
            return f"ldr<{result}>({at})"
        if type(step) is int and step == 2 and e.dtype is not BOOL:
            return f"ldg2<{result}>({at})"
        assert step is not None  # places that are computed are taken lane by lane
        return f"ld{'b' * (e.dtype is BOOL)}g<{result}>({at},{self.number(step)})"

    def _index_value(self, e: Expr, scope: CppScope, width: int, result: str) -> str:
        text = self.index(e.args[0], scope)
        if width == 1:
            return f"({result})({text})"
        step = step_along(e.args[0], scope)
        if is_one(step):
            return f"iota<{result}>()+bc<{result}>({text})"
        factor = f"bc<{result}>({self.number(step)})" if type(step) is Size else step
        return f"iota<{result}>()*{factor}+bc<{result}>({text})"

    def _rand(self, e: Expr, scope: CppScope, width: int, result: str) -> str:
        filled = self.prefilled.get(e)
        if filled is not None:
            return f"ld<{result}>({filled[0]}+{self.index(filled[1], scope)})"
        self.random = True
        seed, stream, linear = e.args
        return f"philox_one({self.value(seed, scope)},{self.stream(stream)},{self.index(linear, scope)})"

    # -- what has no vector form -----------------------------------------------------------------------------
    def _needs_lanes(self, e: Expr, scope: CppScope) -> bool:
        v = scope.loop
        if e.op == "load" or e.op == "index":
            return step_along(e.args[1 if e.op == "load" else 0], scope) is None
        if e.op == "scratch":
            return not is_one(e.args[1].coefficient(v))
        if e.op == "rand":
            filled = self.prefilled.get(e)
            return filled is None or not is_one(filled[1].coefficient(v))
        if e.op == "masked":
            return (
                not scope.alike and v in e.args[0].vars and not same_for_all_lanes(e.args[0], v, scope.width)
            )
        return False

    def _by_lanes(self, e: Expr, scope: CppScope, width: int) -> str:
        """A loop over the lanes around scalar code; a vector where no boundary separates its lanes."""
        gathered = [
            atom.expr
            for atom in (e.args[1].terms if e.op == "load" else ())
            if isinstance(atom, Loaded) and scope.loop in atom.expr.vars
        ]
        for position in gathered:  # positions from memory are read and checked in vectors
            self.value(position, scope)
        result, name, lane = ctype(e.dtype, width), self.fresh(), self.fresh()
        tests = self._boundaries(e, scope, width) if not scope.alike else None
        alike = ""
        if tests:
            block = _Closed(scope)
            block.alike = True
            value = self._compute(e, block)
            alike = f"if({'&&'.join(dict.fromkeys(tests))}){{{''.join(block.lines)}{name}={value};}}else"
        inner = _LaneScope(scope, scope.loop, f"{lane}i", lane)
        value = self.value(e, inner)
        body = "".join(inner.lines)
        if gathered:  # all lanes in one expression; for positions with divisions a loop compiles faster
            position = f"const i64 {lane}i={scope.bound[scope.loop]}+{lane};"
            made = f"lanes<{result}>([&](int {lane}){{{position}{body}return {value};}})"
            if not alike:
                return self._define(result, made, scope)
            scope.lines.append(f"{result} {name}; {alike} {name}={made};")
            return name
        lanes = (
            f"for(int {lane}=0;{lane}<{width};{lane}++)"
            f"{{const i64 {lane}i={scope.bound[scope.loop]}+{lane};{body}{name}[{lane}]={value};}}"
        )
        scope.lines.append(f"{result} {name}; {alike}{f'{{{lanes}}}' if alike else lanes}")
        return name

    def _boundaries(self, e: Expr, scope: CppScope, width: int) -> list[str] | None:
        """Tests at the call which say together that e has one form in all lanes: divisions of the position do
        not wrap within the vector, comparisons of it give the same in its first and last lane. None: there is
        no such form.
        """
        v, tests = scope.loop, []
        block = _Closed(scope)
        block.alike = True
        ends = [
            _LaneScope(scope, v, scope.bound[v], "0"),
            _LaneScope(scope, v, f"({scope.bound[v]}+{width - 1})", str(width - 1)),
        ]
        for inner in walk(e):
            if v not in inner.vars or not self._needs_lanes(inner, scope) and inner.op != "masked":
                continue
            if self._needs_lanes(inner, block):
                return None
            conditions = comparisons(inner.args[0]) if inner.op == "masked" else []
            indices = [a for a in inner.args if isinstance(a, Index)] + [
                c.args[0].args[0] for c in conditions or ()
            ]
            if conditions is None or any(step_along(i, block) is None for i in indices):
                return None
            tests += [
                f"({self.index(atom.base, scope)})%{self.number(atom.n)}"
                f"+{(atom.base.coefficient(v) or 0) * (width - 1)}<{self.number(atom.n)}"
                for i in indices
                for atom in i.terms
                if isinstance(atom, Div | Mod) and v in atom.base.vars()
            ]
            tests += [
                "==".join(f"({self.value(c, end)})" for end in ends) for c in conditions or () if v in c.vars
            ]
        scope.lines += [line for end in ends for line in end.lines]
        return tests

    def _masked(self, e: Expr, scope: CppScope, width: int) -> str:
        """The body is computed only where the condition (one for all lanes) holds."""
        condition, body, other = e.args
        if scope.vector is not None and scope.vector in condition.vars:  # the first lane speaks for all
            first = _LaneScope(scope, scope.vector, scope.bound[scope.vector], "0")
            test = self.value(condition, first)
            scope.lines += first.lines
        else:
            test = self.value(condition, scope)
        result, name = ctype(e.dtype, width), self.fresh()
        scope.lines.append(f"{result} {name};")
        blocks = []
        for branch in (body, other):
            inner = _Closed(scope)
            value = self.rounded(branch, inner, width)
            blocks.append("".join(inner.lines) + f"{name}={value};")
        scope.lines.append(f"if({test}){{{blocks[0]}}}else{{{blocks[1]}}}")
        return name


def step_along(index: Index, scope: CppScope) -> Dim | None:
    """The step of an index from lane to lane; None where it has none. In lanes that are alike a position's
    rest steps as the position does, and its quotient stays.
    """
    step = index.coefficient(scope.loop)
    if step is not None:
        return step
    divided = [a for a in index.terms if isinstance(a, Div | Mod) and scope.loop in a.base.vars()]
    if not scope.alike and not (
        scope.aligned and all(stays_in_a_block(a, scope.loop, scope.width) for a in divided)
    ):
        return None
    step = index.terms.get(scope.loop, 0)
    for atom, c in index.terms.items():
        if isinstance(atom, Loaded) and scope.loop in atom.expr.vars:
            return None
        if isinstance(atom, Div | Mod):
            inside = atom.base.coefficient(scope.loop)
            if type(inside) is not int or inside < 0 or inside and may_be_negative(atom):
                return None
            step += c * inside if isinstance(atom, Mod) else 0
    return step


class _Closed(CppScope):
    """A conditional block inside a scope: sees its values and vector variable, keeps its own to itself."""

    def __init__(self, parent: CppScope) -> None:
        super().__init__(parent, (), parent.width, parent.vector, closed=True)


class _LaneScope(CppScope):
    """Scalar code for one lane of a vector scope; vectors that are already there are read by lane."""

    def __init__(self, parent: CppScope, vector: Var, name: str, lane: str) -> None:
        super().__init__(parent, [(vector, name)], 1, None)
        self.around, self.lane = parent, lane

    def find(self, e: Expr) -> tuple[str, int] | None:
        own = self.values.get(e)
        if own is not None:
            return own
        outer = self.around.find(e)
        return (f"{outer[0]}[{self.lane}]", 1) if outer is not None and outer[1] > 1 else outer
