"""Checks of emitted kernels against their IR: InternalError DM914 where a store is missing, misplaced,
unmasked or repeated.

>>> verify_places(kernel, emitter.stores)  # each store was emitted, in the loops that it belongs to
>>> # goes through the text's loops: each element once
>>> verify_cpp(kernel, "void k(...){...st<float>(p0+n0,v1);...}")
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

from ..base.errors import InternalError
from ..graph.spec import numel
from ..lower.index import Var
from ..lower.instance import Instance, samples
from ..lower.ir import Kernel, Store
from ..lower.verify import levels

MOST_ELEMENTS = 1 << 20  # stores of a C++ kernel up to which its loops are gone through


def _wrong(what: str, text: object) -> NoReturn:
    cure = "this is a bug in dynamotor: please report it"
    raise InternalError("DM914", f"an emitted kernel is wrong: {what}", why=str(text), cure=cure)


def verify_places(
    kernel: Kernel, emitted: Iterable[tuple[Store, Collection[Var]]], around: Collection[Var] = ()
) -> None:
    """The stores that were emitted, each with the variables bound where it stands, are the kernel's in their
    loops.

    around: variables that may be bound where a store does not depend on them, because no loop runs over them.
    """
    left = {
        s: {v for v in loops if not v.single}
        for loops, found in levels(kernel)
        for s in found
        if isinstance(s, Store)
    }
    missing = set(left)
    for s, bound in emitted:
        have = {v for v in bound if not v.single}
        if left.get(s) not in (have, have - set(around)):
            _wrong(f"{s} stands in the loops {have}, not {left.get(s)}", kernel)
        missing.discard(s)
    if missing:
        _wrong(f"there is no {missing}", kernel)


# -- C++ -----------------------------------------------------------------------------------------------------
_TOKEN = re.compile(r"for\(([^;{}]*);([^;{}]*);([^;{}]*?)\)\{|(if|else)([^;{}]*)\{|([{}])|([^;{}]*);")
_STORED = re.compile(r"(?:\bst[bg]*(?:<\w+>)?\(|\*const \w+=)p(\d+)\+")
_STORE = re.compile(r"stb?(g?)(?:<\w+>)?\(p(\d+)\+([^,]*),(?:([^,]*),)?([^,]*)\)")
_ADD = re.compile(r"st<\w+>\((\w+),ld<(?:[A-Z](\d+)|\w+)>\(\1\).*")
_NAME = r"[omn]\d+(?:_\d+)?|z\d+|task|row|chunks?|block|flat|from|to|lo|first_|last_?|stop_|until"
_POSITION = re.compile(rf"(?:const )?i64 ((?:,?\w+=(?:{_NAME}|\d+l?|[-+*/%()<?:])+)+)")
_CHOICE = re.compile(r"(.+)<(.+)\?(.+):(.+)")


def _python(text: str) -> str:
    """Integer arithmetic of C++ as Python's."""
    choice = _CHOICE.fullmatch(text)
    if choice:
        a, b, yes, no = map(_python, choice.groups())
        return f"({yes} if {a} < {b} else {no})"
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
        store, add, position = _STORE.fullmatch(text), _ADD.fullmatch(text), _POSITION.fullmatch(text)
        if store:
            gather, pointer, at, step, value = store.groups()
            return self.store(int(pointer), at, step if gather else "1", value)
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


def verify_cpp(kernel: Kernel, text: str, complete: bool) -> None:
    """Each written pointer of the function is stored to; complete: each of its elements once, as its loops
    run.
    """
    if complete and kernel.symbols:
        for of in samples(kernel.symbols[0].env):
            _verify_cpp(
                Instance(of).kernel(kernel),
                text,
                True,
                _numbers(text, {s.name: of[s] for s in kernel.symbols}),
            )
    else:
        _verify_cpp(kernel, text, complete, {})


def _verify_cpp(kernel: Kernel, text: str, complete: bool, known: dict[str, int]) -> None:
    numbers = {p[0]: n for n, p in enumerate(kernel.params)}
    stores = {
        numbers[s.buffer]: (s, loops)
        for loops, found in levels(kernel)
        for s in found
        if isinstance(s, Store)
    }
    named = set(map(int, _STORED.findall(text)))
    if named != stores.keys():
        _wrong(f"it stores to pointers {sorted(named)}, not {sorted(stores)}", text)
    counts = (
        Counter({n: numel(v.size for v in loops) for n, (_, loops) in stores.items()})
        if complete
        else Counter()
    )
    if not complete or counts.total() > MOST_ELEMENTS:
        return
    scattered = {n for n, (s, _) in stores.items() if s.scatters}
    met = {n: bytearray(s.index.bounds[1] + 1) for n, (s, _) in stores.items() if n not in scattered}
    times: Counter[int] = Counter()

    def mark(n: int, start: int, step: int, lanes: int) -> None:
        times[n] += lanes
        if n in met:
            place = slice(start, start + (lanes - 1) * step + 1, step)
            if start < 0 or met[n][place] != bytes(lanes):
                _wrong(f"position {start} of p{n} is stored twice or does not exist", text)
            met[n][place] = b"\1" * lanes

    loops = _Loops(text, scattered)
    loops.block()
    exec("\n".join(loops.lines), {**known, **{f"p{n}": functools.partial(mark, n) for n in stores}})
    if times != counts:
        _wrong(f"it stores {dict(times)} elements, not {dict(counts)}", text)


# -- Triton --------------------------------------------------------------------------------------------------
def verify_triton(stored: Collection[int], text: str) -> None:
    """The function stores to these pointers, and where positions of an axis may lie behind its end, under its
    mask.
    """
    axes: dict[str, set[str]] = {"x": {"x"}, "r": {"r"}}
    masks: dict[str, int] = {}  # those that hold here, with the indentation at which they were made
    named = set()
    for line in text.splitlines():
        code = line.strip()
        indent = len(line) - len(code)
        masks = {mask: depth for mask, depth in masks.items() if depth <= indent}
        name, _, value = code.partition(" = ")
        if name.isidentifier():
            axes[name] = set().union(*(axes.get(word, ()) for word in re.findall(r"\w+", value))) | axes.get(
                name, set()
            )
            masks |= {name: indent} if name in ("x_in", "r_in") else {}
        elif code.startswith(("tl.store(p", "tl.atomic_add(p")):
            call: Any = ast.parse(code, mode="eval").body
            place, _, *mask = call.args
            words = {node.id for node in ast.walk(place) if isinstance(node, ast.Name)}
            spans = set().union(*(axes.get(word, ()) for word in words))
            under = {
                node.id.replace("r_all", "r_in")
                for m in mask
                for node in ast.walk(m)
                if isinstance(node, ast.Name)
            }
            missing = {f"{axis}_in" for axis in spans} & masks.keys() - under
            if missing:
                _wrong(f"`{code}` lacks the mask {missing}", text)
            named |= {int(word[1:]) for word in words if re.fullmatch(r"p\d+", word)}
    if named != set(stored):
        _wrong(f"it stores to pointers {sorted(named)}, not {sorted(stored)}", text)
