"""Random Python around tensor code: a tree of statements, printed as a function of the world in `world.py`.

>>> print(write(3).source())
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from . import world

Block = tuple["Statement", ...]


def _rows(text: str) -> list[str]:
    return [row for line in text.strip().splitlines() for row in line.split("|")]


ROWS = {
    "t": _rows(world.TENSORS),
    "n": _rows(world.NUMBERS),
    "c": _rows(world.CONDITIONS),
    "l": _rows(world.LISTS),
}
ACTIONS, CHANGES = _rows(world.ACTIONS), _rows(world.CHANGES)
MORE = {
    "t": _rows(world.MORE_TENSORS),
    "n": _rows(world.MORE_NUMBERS),
    "c": _rows(world.MORE_CONDITIONS),
    "l": ROWS["l"],
}
MORE_ACTIONS, MORE_CHANGES = _rows(world.MORE_ACTIONS), _rows(world.MORE_CHANGES)
RISKS, HANDLERS = _rows(world.RISKS), _rows(world.HANDLERS)


ALIASES = (
    ("A := torch.randn(3, 4)", "A[0]"),
    ("A := torch.randn(3, 4)", "A"),
    ("A := torch.randn(3, 4)", "A.view(-1)[4:8]"),
    ("(A := torch.randn(4, 4))[1:]", "A[1]"),
    ("(A := torch.randn(4, 4))", "A.t()"),
    ("(A := torch.randn(4, 4))[:3]", "A[3]"),
    ("A := torch.randn(3, 4)", "A.detach()[1]"),
    ("A := torch.randn(3, 4, requires_grad=True)", "A"),
    ("(A := torch.randn(3, 4, requires_grad=True)) * 2", "A.detach()[0]"),
    ("(A := torch.randn(1, 4)).expand(3, 4)", "A[0]"),
    ("net.w.expand(3, 4)", "net.w"),
    ("A := torch.randn(3, 4)", "net.mean"),
)


@dataclass(frozen=True)
class Statement:
    """A line, or parts of a compound one: each a head with its block."""

    text: str = ""
    parts: tuple[tuple[str, Block], ...] = ()

    def lines(self, indent: str) -> Iterator[str]:
        if self.text:
            yield indent + self.text
        for head, block in self.parts:
            yield indent + head
            yield from _lines(block, indent + "    ")


def _lines(block: Block, indent: str) -> Iterator[str]:
    for statement in block:
        yield from statement.lines(indent)
    if not block:
        yield indent + "pass"


@dataclass(frozen=True)
class Call:
    """One call: the changes before it, and its arguments."""

    change: str = ""
    arguments: str = "torch.randn(3, 4), torch.randn(4)"


@dataclass(frozen=True)
class PythonProgram:
    """The function's body and its calls, one after another in the same world."""

    helper: Block
    body: Block
    calls: tuple[Call, ...]
    seed: int = 0
    backend: str = "eager"

    def source(self) -> str:
        """The module: the world, a function of its own, and `f`."""
        mine = ["def mine(t, n):", *_lines(self.helper, "    ")] if self.helper else []
        body = ["def f(x, y, n=2):", "    global N, FLAG", *_lines(self.body, "    ")]
        return "\n".join([*mine, *body]) + "\n"


@dataclass
class Names:
    """What may be read where a statement stands, by kind."""

    t: list[str] = field(default_factory=list)
    n: list[str] = field(default_factory=list)
    l: list[str] = field(default_factory=list)  # noqa: E741  (a list's kind in the rows)

    def inner(self) -> Names:
        return Names(list(self.t), list(self.n), list(self.l))


class Author:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.budget = self.rng.choice([3, 5, 8, 12, 18])
        self.own = False  # whether `mine` is there
        self.odd = self.rng.choice([0.0, 0.2, 0.5])  # how much is of the odder rows

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def expression(self, kind: str, names: Names, depth: int = 2) -> str:
        """A random expression of a kind: a tensor, a number, a condition or a list of tensors."""
        known = getattr(names, kind, None)
        if known and (depth <= 0 or self.rng.random() < 0.6):
            return self.rng.choice(known)
        if depth <= 0 and kind != "t":
            return {"n": str(self.rng.randrange(5)), "c": "FLAG", "l": f"[{self.rng.choice(names.t)}]"}[kind]
        if kind == "n" and self.rng.random() < 0.2:
            return str(self.rng.randrange(-1, 6))
        text = self.rng.choice((MORE if self.rng.random() < self.odd else ROWS)[kind])
        if self.own and kind == "t" and self.rng.random() < 0.15:
            text = "mine({t}, {n})"
        return self.fill(text, names, depth)

    def fill(self, text: str, names: Names, depth: int = 2) -> str:
        """The row with its places filled in."""
        for kind in "tncl":
            while "{" + kind + "}" in text:
                value = self.expression(kind, names, depth - 1)
                text = text.replace("{" + kind + "}", value if value.isidentifier() else f"({value})", 1)
        return text

    def block(self, names: Names, depth: int, loop: bool = False) -> Block:
        """Some statements; the last may leave the loop, the function or the block by an error."""
        names, made = names.inner(), []
        for _ in range(self.rng.choice([1, 1, 2, 2, 3])):
            if self.budget <= 0:
                break
            self.budget -= 1
            made.append(self.statement(names, depth))
        ways = [f"return {self.result(names)}", "raise Failure({n}, {t})", "raise ValueError('value')"]
        if depth and self.rng.random() < 0.2:
            ways += ["break", "continue"] * 3 if loop else []
            made.append(Statement(self.fill(self.rng.choice(ways), names)))
        return tuple(made)

    def statement(self, names: Names, depth: int) -> Statement:
        kinds = [self.assign] * 8 + [self.act] * 5
        if depth < 3:
            kinds += [
                self.branch,
                self.branch,
                self.loop,
                self.loop,
                self.attempt,
                self.context,
                self.inner_function,
                self.iterate,
            ]
            kinds += [self.match]
        return self.rng.choice(kinds)(names, depth)

    def assign(self, names: Names, depth: int) -> Statement:
        kind = self.rng.choice("tttttnnl")
        value = self.expression(kind, names, 3)
        known: list[str] = getattr(names, kind)
        if known and self.rng.random() < 0.3 and known != ["x"]:
            target = self.rng.choice(known)
        else:
            target = self.name(kind)
        if kind != "l" and target in known and self.rng.random() < 0.3:
            return Statement(f"{target} {self.rng.choice(['+=', '*=', '-='])} {value}")
        if target not in known:
            known.append(target)
        return Statement(f"{target} = {value}")

    def act(self, names: Names, depth: int) -> Statement:
        rows = RISKS if self.rng.random() < 0.05 else [*ACTIONS, "N += 1", "N = {n}", "FLAG = {c}"]
        rows = MORE_ACTIONS if self.rng.random() < self.odd else rows
        text = self.rng.choice(rows)
        if self.rng.random() < 0.03:
            gone = self.rng.choice([name for name in [*names.t, *names.n] if name.isidentifier()])
            return Statement(f"del {gone}")  # what reads it afterwards fails
        return Statement(self.fill(text, names))

    def branch(self, names: Names, depth: int) -> Statement:
        parts = [(f"if {self.expression('c', names)}:", self.block(names, depth + 1))]
        if self.rng.random() < 0.3:
            parts.append((f"elif {self.expression('c', names)}:", self.block(names, depth + 1)))
        if self.rng.random() < 0.5:
            parts.append(("else:", self.block(names, depth + 1)))
        return Statement(parts=tuple(parts))

    def loop(self, names: Names, depth: int) -> Statement:
        inside, i, v = names.inner(), self.name("n"), self.name("t")
        kind = self.rng.randrange(7)
        if kind == 0:
            head, inside.n = f"for {i} in range({self.expression('n', names)} % 4):", [*inside.n, i]
        elif kind == 1:
            head, inside.t = f"for {v} in {self.expression('l', names)}:", [*inside.t, v]
        elif kind == 2:
            head = f"for {i}, {v} in enumerate({self.expression('l', names)}):"
            inside.n, inside.t = [*inside.n, i], [*inside.t, v]
        elif kind == 3:
            head, inside.n = f"for {i} in box:", [*inside.n, i]
        elif kind == 4:
            head, inside.n = f"for {i} in chained({self.expression('n', names)} % 3):", [*inside.n, i]
        elif kind == 5:
            head = f"for k, {i} in list(D.items()):"
            inside.n = [*inside.n, i]
        else:
            block = (Statement(f"{i} -= 1"), *self.block(inside, depth + 1, loop=True))
            start = f"{i} = {self.expression('n', names)} % 4"
            return Statement(
                parts=(("if True:", (Statement(start), Statement(parts=((f"while {i} > 0:", block),)))),)
            )
        parts = [(head, self.block(inside, depth + 1, loop=True))]
        if self.rng.random() < 0.15:
            parts.append(("else:", self.block(names, depth + 1)))
        return Statement(parts=tuple(parts))

    def attempt(self, names: Names, depth: int) -> Statement:
        caught = self.rng.choice(
            ["Failure as e", "(ValueError, Failure) as e", "KeyError", "LookupError as e", "AssertionError"]
            + ["Exception as e"] * 4
        )
        risk = Statement(self.fill(self.rng.choice(RISKS), names))
        tried = [*self.block(names, depth + 1), *self.block(names, depth + 1)]
        tried.insert(self.rng.randrange(len(tried) + 1), risk)
        parts = [("try:", tuple(tried))]
        after = list(self.block(names, depth + 1))
        if " as e" in caught:
            for _ in range(self.rng.choice([0, 1, 1, 2, 3])):
                text = self.fill(self.rng.choice(HANDLERS), names)
                after.insert(self.rng.randrange(len(after) + 1), Statement(text))
        parts.append((f"except {caught}:", tuple(after)))
        if self.rng.random() < 0.2:
            parts.append(("else:", self.block(names, depth + 1)))
        if self.rng.random() < 0.3:
            parts.append(("finally:", (Statement("LOG.append('finally')"),)))
        return Statement(parts=tuple(parts))

    def context(self, names: Names, depth: int) -> Statement:
        head = self.rng.choice(
            [
                "with torch.no_grad():",
                "with torch.enable_grad():",
                "with box as b:",
                "with recorded('r') as r:",
                "with sub, recorded('s'):",
                "with contextlib.suppress(Failure, KeyError):",
                f"with torch.set_grad_enabled({self.expression('c', names)}):",
                f"with contextlib.nullcontext({self.expression('t', names)}) as v:",
                "with contextlib.ExitStack() as stack, stack.enter_context(recorded('e')) or box:",
                f"with contextlib.closing(failing({self.expression('n', names)})) as g:",
            ]
        )
        return Statement(parts=((head, self.block(names, depth + 1)),))

    def inner_function(self, names: Names, depth: int) -> Statement:
        function, inside = self.name("g"), Names(list(names.t), list(names.n), list(names.l))
        inside.t.append("a")
        body = (*self.block(inside, depth + 1), Statement(f"return {self.expression('t', inside)}"))
        changed = [n for n in names.n if n.isidentifier()]
        if changed and self.rng.random() < 0.5:
            n = self.rng.choice(changed)
            body = (Statement(f"nonlocal {n}"), Statement(f"{n} += 1"), *body)
        target = self.name("t")
        call = Statement(f"{target} = {function}({self.expression('t', names)})")
        names.t.append(target)
        defined = Statement(parts=((f"def {function}(a, b={self.expression('n', names)}):", body),))
        return Statement(parts=(("if True:", (defined, call)),))

    def iterate(self, names: Names, depth: int) -> Statement:
        """An iterator that is used in several places, with other statements between."""
        it, n, items = self.name("i"), self.expression("n", names), self.expression("l", names)
        made = self.rng.choice(
            [
                "iter(box)", f"count({n} % 5)", f"chained({n} % 4)", f"failing({n})", "zip(box, IT)", f"enumerate({items})",
                f"map(lambda v: LOG.append('m') or v, {items})", f"(v * 2 for v in {items})", "filter(None, box)",
                f"(LOG.append(v) or v for v in range({n} % 5))", "reversed(box.items)", f"growing(box.items, {n} % 3)",
                "itertools.chain(box, Q)", "iter(D)", "itertools.count(1)", f"itertools.accumulate({items})", "IT",
            ]
        )  # fmt: skip
        uses = [
            "LOG.append(next({i}))",
            "LOG.append(next({i}, 'end'))",
            "LOG.append(list(itertools.islice({i}, 2)))",
        ]
        uses += [
            "box.t = {i}",
            "LOG.append(1 in itertools.islice({i}, 4))",
            "{i}.close()",
            "LOG.append({i}.send(None))",
            "a, *b = itertools.islice({i}, 3)",
        ]
        body = [Statement(f"{it} = {made}")]
        for _ in range(self.rng.choice([1, 2, 3])):
            body += [Statement(self.rng.choice(uses).replace("{i}", it)), *self.block(names, depth + 1)]
        if self.rng.random() < 0.6:
            inside = self.block(names, depth + 1, loop=True)
            body.append(Statement(parts=((f"for v in itertools.islice({it}, 6):", inside),)))
        return Statement(parts=(("if True:", tuple(body)),))

    def match(self, names: Names, depth: int) -> Statement:
        subject = self.rng.choice(["{n}", "({n}, FLAG)", "box", "[1, {n}]", "D"])
        patterns = [
            "0",
            "1 | 2",
            "(a, True)",
            "[1, *rest]",
            "Sub(a=v)",
            "Box()",
            "{'k': v}",
            "int() as whole",
            "[a, b]",
        ]
        cases = tuple((f"case {p}:", self.block(names, depth + 2)) for p in self.rng.sample(patterns, 2))
        inside = tuple(
            Statement(parts=((head, block),))
            for head, block in (*cases, ("case _:", self.block(names, depth + 2)))
        )
        return Statement(parts=((f"match {self.fill(subject, names)}:", inside),))

    def result(self, names: Names) -> str:
        """The return value: a structure of known values."""
        t, n, some = self.rng.choice(names.t), self.rng.choice(names.n), self.rng.choice(names.t[-3:])
        shapes = [
            t,
            f"({t}, {some})",
            f"[{t}, {n}]",
            f"{{'t': {t}, 'n': {n}}}",
            f"({t}, [{some}], {{'a': {some}}})",
            f"({some}, LOG)",
            f"Pair({t}, {n})",
            f"({t}, x)",
            f"({some}, {some})",
            f"{some}.sum()",
            n,
            "None",
        ]
        return self.rng.choice(shapes)

    def call(self) -> Call:
        rows = MORE_CHANGES if self.rng.random() < self.odd else CHANGES
        change = self.fill(self.rng.choice(rows), Names(["W"], [], [])) if self.rng.random() < 0.6 else ""
        x = self.rng.choice(
            ["torch.randn(3, 4)"] * 6
            + [
                "torch.randn(4, 3).t()",
                "torch.randn(3, 4, requires_grad=True)",
                "torch.randn(3, 4, requires_grad=True)",
                "torch.randn(2, 4)",
                "torch.randn(3, 4).double()",
                "torch.randn(6, 4)[::2]",
            ]
        )
        y = self.rng.choice(["torch.randn(4)"] * 4 + ["torch.randn(4, requires_grad=True)", "torch.zeros(4)"])
        if self.rng.random() < self.odd:  # they share memory
            x, y = self.rng.choice(ALIASES)
        n = self.rng.choice(["", "", ", 3", ", n=1", ", 0", ", True", ", 5"])
        return Call(change, f"{x}, {y}{n}")


def write(seed: int) -> PythonProgram:
    """The program of a seed."""
    author = Author(seed)
    names = Names(["x", "y"], ["n"], [])
    helper: Block = ()
    if author.rng.random() < 0.4:
        inside = Names(["t"], ["n"], [])
        helper = (*author.block(inside, 0), Statement(f"return {author.expression('t', inside)}"))
        author.own, author.budget = True, author.budget + 4
    body: list[Statement] = []
    while author.budget > 0:
        author.budget -= 1
        body.append(author.statement(names, 0))
    body.append(Statement(f"return {author.result(names)}"))
    calls = tuple(author.call() for _ in range(author.rng.choice([2, 3, 4, 5])))
    calls = (replace(calls[0], change=""), *calls[1:])
    backend = author.rng.choice(
        ["eager"] * 60 + ["aot_eager"] * 30 + ["native"]
    )  # kernels are other fuzzers' business
    return PythonProgram(helper, tuple(body), calls, seed, backend)
