"""Costly checks of the compiler's results, which `config.verify` adds in a checkout (the tests do).

>>> verify_schedule(group, kernel, stored)  # evaluates the group's nodes at elements taken at random
>>> # goes through the text's loops: each element once
>>> verify_loops(kernel, "void k(...){...st<float>(p0+n0,v1);...}")
"""

from __future__ import annotations

import functools
import operator
import random
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from dynamotor.codegen.verify_emitted import wrong as wrong_text
from dynamotor.graph.sizes import hint
from dynamotor.graph.spec import numel
from dynamotor.lower.fusion import Group
from dynamotor.lower.index_expr import Div, Index, Loaded, Mod, Var, row_major
from dynamotor.lower.instance import Instance, samples
from dynamotor.lower.ir import COLS, Expr, Kernel, Reduce, ScanStatement, Store
from dynamotor.lower.verify_program import READS, levels, result_of, wrong

MOST_ELEMENTS = 1 << 20  # stores of a C++ kernel up to which its loops are gone through


# -- from nodes to kernels -----------------------------------------------------------------------------------
class _Meaning:
    """What expressions stand for where each loop variable has one value: numbers that are equal where the
    meanings are.

    A reduction stands for its kind and its operand at that element.
    """

    def __init__(self, values: Mapping[Var, int]) -> None:
        self.values = values
        self.results: dict[
            tuple[str, Any], Any
        ] = {}  # what statements or nodes stand for, by what reads them
        self.known: dict[Expr, Any] = {}

    def of(self, e: Expr) -> Any:
        found = self.known.get(e)
        if found is None:
            found = self.known[e] = self._compute(e)
        return found

    def _compute(self, e: Expr) -> Any:
        if e.op in ("cast", "round_to"):
            return self.of(e.args[0])
        if e.op in READS and (e.op, e.args[0]) in self.results:
            return self.results[e.op, e.args[0]]
        parts = (
            self.of(a) if isinstance(a, Expr) else self.place(a) if isinstance(a, Index) else a
            for a in e.args
        )
        return hash((e.op, *parts))

    def place(self, index: Index) -> Any:
        whole, computed = hint(index.const), []
        for atom, c in ((atom, hint(c)) for atom, c in index.terms.items()):
            value = self.values[atom] if isinstance(atom, Var) else self._atom(atom)
            if isinstance(value, int):
                whole += c * value
            else:
                computed.append((c, value))
        return (whole, frozenset(computed)) if computed else whole

    def _atom(self, atom: Div | Mod | Loaded) -> Any:
        if isinstance(atom, Loaded):
            return "loaded", self.of(atom.expr)
        base, name = self.place(atom.base), type(atom).__name__
        n = hint(atom.n)
        return (name, n, base) if isinstance(base, tuple) else base // n if name == "Div" else base % n

    def take(self, what: tuple[str, Any], kind: str | None, e: Expr) -> Any:
        """Pass a statement or node."""
        found = self.of(e)
        if kind is not None and not (
            isinstance(found, tuple) and found[0] == kind
        ):  # a sum of rows' sums is one sum
            found = (kind, found)
        self.results[what] = found
        self.known.clear()
        return found


def verify_schedule(group: Group, kernel: Kernel, stored: Collection[str], tries: int = 3) -> None:
    """At elements taken at random (of the sizes at which it is compiled) the kernel stores the values of the group's
    nodes where these are defined; rows are the reduced dimensions."""
    loops = {v: re.findall(r"t\d+", v.name) for v in (*kernel.outer, *kernel.middle, *kernel.inner)}
    along = {name for v in (kernel.middle if kernel.template == COLS else kernel.inner) for name in loops[v]}
    if group.template and along != {v.name for v in group.loop}:
        wrong("a kernel goes along other loops than its group", f"{group.loop}\n{kernel}")
    draw, by_name = random.Random(len(group.members)), {v.name: v for v in group.vars}
    for _ in range(tries):
        chosen = {v: draw.randrange(hint(v.size)) for v in group.vars}
        merged = {}
        for v, parts in loops.items():
            digits = [by_name[name] for name in parts]
            at = row_major(digits)
            merged[v] = hint(at.const) + sum(hint(at.terms.get(d, 0)) * chosen[d] for d in digits)
        nodes, ours, stores = _Meaning(chosen), _Meaning(merged), {}
        for s in kernel.statements():
            found = ours.take(result_of(s), s.kind if isinstance(s, Reduce | ScanStatement) else None, s.expr)
            if isinstance(s, Store):
                stores[s.buffer] = ours.place(s.index), found
        for m in group.members:
            found = (
                nodes.place(m.store),
                nodes.take(("load", m.node.buffer), m.node.reduce or m.node.scan, m.expr),
            )
            if stores.get(m.node.buffer) != (found if m.node.buffer in stored else None):
                wrong(
                    f"{m.node.buffer}[{m.store}] is not stored as {m.node.origin} computes it",
                    f"{m.expr}\n{kernel}",
                )


# -- from kernels to C++ -------------------------------------------------------------------------------------
_TOKEN = re.compile(r"for\(([^;{}]*);([^;{}]*);([^;{}]*?)\)\{|(if|else)([^;{}]*)\{|([{}])|([^;{}]*);")
_STORE = re.compile(r"st[bec]?(g?)_?(?:<\w+>)?\(p(\d+)\+([^,]*),(?:([^,]*),)?([^,]*)\)")
_COPY = re.compile(r"copy_\(p(\d+)\+([^,]*),p\d+\+[^,]*,([^,]*)\)")
_ADD = re.compile(r"st<\w+>\((\w+),ld<(?:[A-Z](\d+)|\w+)>\(\1\).*")
_NAME = r"[omn]\d+(?:_\d+)?|z\d+|task|row|chunks?|block|flat|from|to|lo|first_|last_?|stop_|until|j_"
_POSITION = re.compile(rf"(?:const )?i64 ((?:,?\w+=(?:{_NAME}|\d+l?|[-+*/%()<?:])+)+)")
_CHOICE = re.compile(r"(.+)<(.+)\?(.+):(.+)")


def _python(text: str) -> str:
    """Integer arithmetic of C++ as Python's."""
    choice = _CHOICE.fullmatch(text)
    if choice:
        a, b, yes, no = map(_python, choice.groups())
        return f"({yes} if {a} < {b} else {no})"
    text = text.replace("&&", " and ").replace("||", " or ").replace("!(", " not (")
    return re.sub(r"\bfrom\b", "from_", re.sub(r"(\d)l\b", r"\1", text).replace("/", "//"))


class _Loops:
    """The loops and stores of a C++ function as Python text, in which `p3(start, step, lanes)` stands for a
    store.
    """

    def __init__(self, text: str, scattered: Collection[int]) -> None:
        self.scattered = scattered
        self.tokens = _TOKEN.finditer(re.sub(r"#pragma.*\n|\n", "", text[text.index("{") + 1 :]))
        self.lanes = {name: int(n) for n, name in re.findall(r"\b[A-Z](\d+) (\w+)[=;]", text)}
        self.places = dict(re.findall(r"\*const (\w+)=p(\d+)\+", text))
        self.lines: list[str] = []

    def block(self, indent: int = 0) -> bool:
        """Write the block up to its closing brace; gives whether it stores anything."""
        stores, pad = False, "    " * indent
        for token in self.tokens:
            start, test, step, branch, condition, brace, statement = token.groups()
            if brace == "}":
                break
            if statement is not None:
                found = self.statement(statement.strip())
                stores |= found.startswith("p")
                self.lines += [pad + found] if found else []
                continue
            before = len(self.lines)
            if branch:
                self.lines.append(pad + (f"if {_python(condition)}:" if branch == "if" else "else:"))
            elif not brace:
                self.lines += [pad + (self.statement(start) or "pass"), f"{pad}while {_python(test)}:"]
            inside = self.block(indent + (not brace))
            stores |= inside
            if not inside:
                del self.lines[before:]
            elif step:
                self.lines.append(f"{pad}    {step.replace('++', '+=1')}")
        return stores

    def statement(self, text: str) -> str:
        """A statement that stores, or gives a position; empty for others."""
        text = text.removeprefix("if(!*outside)")
        patterns = (_STORE, _COPY, _ADD, _POSITION)
        store, copy, add, position = (pattern.fullmatch(text) for pattern in patterns)
        if store:
            gather, pointer, at, step, value = store.groups()
            return self.store(int(pointer), at, step if gather else "1", value)
        if copy:
            return f"p{copy[1]}({_python(copy[2])}, 1, {_python(copy[3])})"
        if add and add[1] in self.places:
            return f"p{self.places[add[1]]}(0, 1, {add[2] or 1})"
        parts = [part.split("=", 1) for part in re.split(r",(?=\w+=)", position[1])] if position else []
        return "; ".join(f"{_python(name)} = {_python(value)}" for name, value in parts)

    def store(self, pointer: int, at: str, step: str, value: str) -> str:
        spread = re.match(r"bc<[A-Z](\d+)>", value)
        lanes = int(spread[1]) if spread else self.lanes.get(value, 1)
        return f"p{pointer}({'0' if pointer in self.scattered else _python(at)}, {_python(step)}, {lanes})"


def _parts(pays: bool, n: int, least: int, nbytes: int) -> int:
    """As in the text that every unit with symbols starts with."""
    count = min(n, least if pays else 1)
    while count > 1 and count * nbytes > 1 << 22:
        count //= 2
    return max(count, 1)


def _numbers(text: str, values: dict[str, int]) -> dict[str, int]:
    """The symbols' values, and the numbers that a function computes from them first."""
    names: dict[str, Any] = {
        **values,
        "parts": _parts,
        "up": lambda a, b: -(-a // b),
        "floordiv": operator.floordiv,
        "mod": operator.mod,
    }
    for name, expression in re.findall(r"const i64 (z\d+|chunks)=([^;]*);", text):
        names[name] = eval(expression, {}, names)
    return names


def verify_loops(kernel: Kernel, text: str) -> None:
    """Each element of each written pointer of a C++ function is stored once, as its loops run."""
    for stays in (0, 1) if "stays_" in text else (0,):  # a scan's results, in a vector
        if not kernel.symbols:
            _go_through(kernel, text, {"stays_": stays})
        for of in samples(kernel.symbols[0].env) if kernel.symbols else ():
            known = _numbers(text, {s.name: of[s] for s in kernel.symbols})
            _go_through(Instance(of).kernel(kernel), text, {**known, "stays_": stays})


def _go_through(kernel: Kernel, text: str, known: dict[str, int]) -> None:
    numbers = {p[0]: n for n, p in enumerate(kernel.params)}
    stores = {
        numbers[s.buffer]: (s, loops)
        for loops, found in levels(kernel)
        for s in found
        if isinstance(s, Store)
    }
    counts = Counter({n: numel(v.size for v in loops) for n, (_, loops) in stores.items()})
    if counts.total() > MOST_ELEMENTS:
        return
    scattered = {n for n, (s, _) in stores.items() if s.scatters}
    met = {n: bytearray(s.index.bounds[1] + 1) for n, (s, _) in stores.items() if n not in scattered}
    times: Counter[int] = Counter()

    def mark(n: int, start: int, step: int, lanes: int) -> None:
        times[n] += lanes
        if n in met:
            place = slice(start, start + (lanes - 1) * step + 1, step)
            if start < 0 or met[n][place] != bytes(lanes):
                wrong_text(f"position {start} of p{n} is stored twice or does not exist", text)
            met[n][place] = b"\1" * lanes

    loops = _Loops(text, scattered)
    loops.block()
    exec("\n".join(loops.lines), {**known, **{f"p{n}": functools.partial(mark, n) for n in stores}})
    if times != counts:
        wrong_text(f"it stores {dict(times)} elements, not {dict(counts)}", text)
