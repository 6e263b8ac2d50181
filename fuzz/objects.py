"""Random statements over three containers or objects that come to share their contents: made inside the function,
or outside of it. Each statement may raise; the objects afterwards, and their identities, are eager's.

>>> problems(write(3), outside=True)      # what differs from eager: nothing when it is right
[]
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import itertools
import random
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import dynamotor

PRELUDE = """
import collections, copy, dataclasses, functools, itertools, operator, types, torch
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
class Set(set): pass
class Frozen(frozenset): pass
class List(list): pass
class Dict(dict): pass
class Ordered(OrderedDict): pass
class Default(defaultdict): pass
class Tuple(tuple): pass
class Int(int): pass
class Float(float): pass
class Text(str): pass
Named = collections.namedtuple("Named", "p q", defaults=[3])
class Plain:
    def __init__(self, v=1): self.v = v
    def __eq__(self, other): return isinstance(other, Plain) and self.v == other.v
    def __hash__(self): return 7
class Slots:
    __slots__ = ("v", "w")
    def __init__(self, v=1): self.v = v
@dataclasses.dataclass
class Data:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)
@dataclasses.dataclass(frozen=True, order=True)
class Fixed:
    a: int = 1
    b: tuple = ()
"""
MAKERS = """
[1, 2, 3] | [] | {1, 2} | set() | {"a": 1, "b": 2} | {} | (1, 2) | () | Set([1, 5]) | List([1, 2]) | Dict(a=1)
Ordered(a=1, b=2) | OrderedDict(a=1, b=2) | defaultdict(list) | defaultdict(int, a=1) | Default(list) | Counter("aab")
deque([1, 2]) | deque([1, 2, 3], 3) | Named(1, 2) | Plain(2) | Plain([1]) | Slots([2]) | types.SimpleNamespace(v=1)
Data() | Data(2, [3]) | Fixed(1, (2,)) | Tuple([1, 2]) | Int(3) | Float(1.5) | Text("ab") | Frozen([1])
frozenset([1, 2]) | bytearray(b"ab") | "abc" | b"ab" | range(3) | slice(1, 2) | iter([1, 2, 3]) | iter({"a": 1}.items())
(i for i in [1, 2, 3]) | map(str, [1, 2]) | enumerate([4, 5]) | zip([1, 2], "ab") | functools.partial(dict, a=1)
reversed([1, 2]) | itertools.chain([1], [2, 3]) | ChainMap({"a": 1}) | 1 | 2.5 | True | None
types.MappingProxyType({"a": 1}) | lambda z=1: z | [[1], [2]] | {"a": [1]} | Plain | len | str
"""
STATEMENTS = """
A = B | A = [B, C] | A = (B, C) | A = {"k": B} | A += B | A |= B | A &= B | A -= B | A *= 2 | A ^= B | A = B + C
A = B | C | A = B * 2 | A = B - C | A = B == C | A = B in C | A = B is C | A = len(B) | A = list(B) | A = tuple(B)
A = dict(B) | A = set(B) | A = sorted(B) | A = B[0] | A = B["a"] | A = B[1:] | A = B[::-1] | A[0] = B | A["z"] = B
del A[0] | del A["a"] | A.append(B) | A.extend(B) | A.add(B) | A.update(B) | A.pop() | A = B.pop() | A.insert(0, B)
A.remove(B) | A.clear() | A = B.copy() | A = B.keys() | A = B.items() | A = B.values() | A = iter(B) | A = next(B)
A = next(B, C) | A = B.setdefault("q", C) | A = B.get("a", C) | A.reverse() | A.sort() | A = B.v | A.v = B | A = vars(B)
A = B.__dict__ | A = type(B) | A = B.index(C) | A = B.count(C) | A = bool(B) | A = not B
A = hash(B) == hash(C) | A = isinstance(B, dict) | A = isinstance(B, type(C)) | A = B < C | A = B <= C | A, B = C
A, *B = C | A = [*B, *C] | A = {**B} | A = {*B} | A = max(B) | A = sum(B) | A = any(B) | A = list(zip(B, C))
A = [i for i in B] | A = {i: 1 for i in B} | A = B and C | A = B if C else None | A = B.union(C) | A = B.difference(C)
A.rotate() | A.appendleft(B) | A = B.popleft() | A = B.most_common() | A.move_to_end("a") | A = B.popitem()
A = B._asdict() | A = B._replace(p=C) | A = copy.copy(B) | A = copy.deepcopy(B) | A = B() | A = B(C)
A = getattr(B, "v", C) | setattr(A, "v", B) | A = hasattr(B, "v") | A = dataclasses.replace(B) | A = dataclasses.asdict(B)
A = B.a | A = B.b | A.b.append(C) | A = B.keywords | A = B.maps | A = B.default_factory | A = reversed(B)
A = enumerate(B) | A = B.args | A = +B | A = -B | A = B % C | A = B // C | A = B / C | A = B.__len__()
A = B.__contains__(C) | A = B.__eq__(C) | A = operator.itemgetter(0)(B) | A = list(itertools.islice(B, 2))
A = "".join(B) | A = B.upper() | A.discard(B) | A = B.issubset(C) | A = frozenset(B) | A = deque(B) | A = OrderedDict(B)
A = Counter(B) | A = List(B) | A = Dict(B) | A = Set(B) | A = int(B) | A = float(B) | A = x.shape | A = x + 1 | A = x[0]
A = B + x | A = x * B | A = B.partition(C) | A = B.format(C) | A = B.join(C) | A = B.__add__(C) | A = B.__iadd__(C)
A = B.__ror__(C) | A = B.isdisjoint(C) | A.intersection_update(B) | A.symmetric_difference_update(B) | A = B.fromkeys(C)
A = B.extendleft(C) | A = B.elements() | A = B.new_child() | A = B.mapping | A = B.pop("a", C) | A = B.pop(0)
A = type(B)(C) | A = type(B)() | A = type(B).__eq__(B, C) | A = type(B).copy(C) | A = type(B).__len__(C) | A = str.upper(B)
A = dict.get(B, "a") | A = list.count(B, C) | A = object.__new__(type(B)) | A = B.__class__ | A = B.__doc__ is None
A = dict(zip(B, C)) | A = list(map(type, B)) | A = [*filter(None, B)] | A = functools.reduce(operator.add, B) | A = min(B, C)
A[1:] = B | A[:0] = B | del A[1:] | A = B[C] | A[B] = C | A[B] += C | A.v += B | A = {B: C} | A = {B, C} | A = B @ C
A = abs(B) | A = ~B | A = round(B) | A = divmod(B, C) | A = B ** C | A = B << C | A = operator.index(B) | A = B.real
A = isinstance(B, C) | A = issubclass(type(B), type(C)) | A = callable(B) | A = B != C | A = B > C | A = B not in C
A = list(itertools.chain(B, C)) | A = tuple(itertools.accumulate(B)) | A = list(itertools.zip_longest(B, C))
A = operator.attrgetter("v")(B) | A = operator.methodcaller("copy")(B) | A = operator.concat(B, C) | A = operator.ior(B, C)
A = types.SimpleNamespace(**B) | A = Plain(*B) | A = Named(*B) | A = Data(B, C) | A = functools.partial(B, C) | del A.v
A = Tuple(B) | A = Text(B) | A = Int(B) | A = Frozen(B) | A = Default(list, B) | A = Ordered(B) | A = deque(B, 2) | A = slice(B)
for i in A: B = i; break
for i in B: A.append(i); break
for i in B: A.pop()
A = [(i, j) for i, j in B.items()] | A = any(i is B for i in C) | A = all(B) and C
"""


_MADE = [row for line in MAKERS.strip().splitlines() for row in line.split(" | ")]
_DONE = [
    row for line in STATEMENTS.strip().splitlines() for row in line.replace("B | C", "B ¦ C").split(" | ")
]
NAMES = ("a", "b", "c")
_ADDRESS = re.compile("0x[0-9a-f]+", re.IGNORECASE)


def write(seed: int) -> list[str]:
    """A program: what makes `a`, `b` and `c`, then up to six statements."""
    chosen = random.Random(seed)
    lines = [f"{name} = {chosen.choice(_MADE)}" for name in NAMES]
    for _ in range(chosen.randint(1, 6)):
        names = {letter: chosen.choice(NAMES) for letter in "ABC"}
        statement = chosen.choice(_DONE).replace("¦", "|")
        lines.append(re.sub(r"\b[ABC]\b", lambda found, names=names: names[found.group()], statement))
    return lines


def source(lines: list[str], outside: bool) -> str:
    """Two functions: `make` gives the objects of outside, `f` does the rest and reports the exception."""
    first, rest = lines[: len(NAMES)], lines[len(NAMES) :]
    if not outside:
        first, rest = [f"{name} = None" for name in NAMES], lines
    body = ["raised = []"]
    for line in rest:
        body += ["try:", f"    {line}", "except Exception as error: raised.append(type(error).__name__)"]
    body.append("return a, b, c, raised")
    made = "".join(f"    {line}\n" for line in [*first, "return a, b, c"])
    return f"def make():\n{made}def f(a, b, c, x):\n" + "".join(f"    {line}\n" for line in body)


def seen(value: Any, places: dict[int, int], kept: list[Any]) -> Any:
    """A value as plain data in which a number stands for an object that was met before."""
    kind = type(value).__name__
    if isinstance(value, (int, float, str, bytes, range, slice, type(None))) and not hasattr(
        value, "__dict__"
    ):
        return kind, _ADDRESS.sub("", repr(value))
    if isinstance(value, torch.Tensor):
        return kind, value.tolist()
    if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        return kind, value.__qualname__
    if id(value) in places:
        return places[id(value)]
    if not isinstance(value, (tuple, frozenset)):  # identity of equal ones is not compared
        places[id(value)] = len(places)
    kept.append(value)

    def inner(other: Any) -> Any:
        return seen(other, places, kept)

    def parts() -> Any:
        if hasattr(value, "__next__"):
            return "iterator", [inner(item) for item in itertools.islice(value, 20)]
        if isinstance(value, str):
            return kind, _ADDRESS.sub("", str.__repr__(value))
        if isinstance(value, (set, frozenset)):
            return kind, sorted(_ADDRESS.sub("", repr(item)) for item in value)
        if hasattr(value, "keys") and kind != "ChainMap":
            return kind, [(inner(key), inner(value[key])) for key in list(value.keys())]
        if hasattr(value, "__iter__") and kind != "ChainMap":
            return kind, [inner(item) for item in value]
        named = ("v", "w", "args", "keywords", "maps")
        return kind, [inner(getattr(value, name)) for name in named if hasattr(value, name)]

    own = getattr(value, "__dict__", None)
    return (*parts(), [(key, inner(item)) for key, item in own.items()] if own else None)


def outcome(function: Callable[..., Any], make: Callable[[], Any]) -> Any:
    """Results and effects of a call, or the error that ends it."""
    given, classes = make(), _classes()
    try:
        return seen([function(*given, torch.arange(3.0)), given], {}, [])
    except Exception as error:
        return type(error).__name__, str(error)
    finally:  # attributes set on a class are removed for the next program
        for cls, before in classes:
            for name in set(vars(cls)) - before:
                delattr(cls, name)


@functools.cache
def _world() -> dict[str, Any]:
    module = sys.modules["world_of_objects"] = types.ModuleType("world_of_objects")  # dataclasses look there
    exec(compile(PRELUDE, "<objects>", "exec"), module.__dict__)
    return module.__dict__


@functools.cache
def _classes() -> list[tuple[type, set[str]]]:
    """The classes of the world, and the names that they have."""
    own = [value for value in _world().values() if getattr(value, "__module__", "") == "world_of_objects"]
    for cls in own:
        copyreg._slotnames(cls)  # copies leave them on the class
    return [(cls, set(vars(cls))) for cls in own]


def _is_steady(function: Callable[..., Any], make: Callable[[], Any]) -> bool:
    """Whether eager gives one thing every time, at any addresses of its objects: sets of them have no order else."""
    kept: list[Any] = []
    found: list[Any] = []
    for count in range(20):
        with contextlib.suppress(Exception):  # objects at the addresses of the last ones
            for _ in range(count % 3):
                kept.append(make())
                kept.append(function(*kept[-1], torch.arange(3.0)))
        found.append(outcome(function, make))
    return all(one == found[0] for one in found)


def problems(lines: list[str], outside: bool) -> list[str]:
    """How two calls of the compiled program differ from eager's."""
    space = dict(_world())
    exec(compile(source(lines, outside), "<objects>", "exec"), space)
    function, make = space["f"], space["make"]
    want = outcome(function, make)
    if want[0] == "RecursionError" or " at >" in repr(want).lower():  # texts with addresses
        return []
    with contextlib.redirect_stderr(io.StringIO()):
        compiled = dynamotor.compile(function, backend="eager")
        found = [outcome(compiled, make) for _ in range(2)]
    wrong = [n for n, got in enumerate(found) if repr(got) != repr(want)]
    if wrong and not _is_steady(function, make):
        return []
    return [f"call {n}: {found[n]} and not {want}" for n in wrong]


def reduce(lines: list[str], outside: bool) -> list[str]:
    """The program without the statements that it does not take to differ."""
    at = len(NAMES)
    while at < len(lines):
        fewer = lines[:at] + lines[at + 1 :]
        if problems(fewer, outside):
            lines = fewer
        else:
            at += 1
    return lines
