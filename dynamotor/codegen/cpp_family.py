"""C++ functions of a graph that differ in numbers alone become one function that is told them: g++ takes as
long for a kernel of 128 channels as for the next, of 256.

>>> functions, kernels = merged(functions, kernels)         # two tables of `Writer`

The text is the unit: where the texts around the numbers are equal, so are the programs, and a number that
becomes an argument keeps its type. A function that no other is like keeps its numbers as constants.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .cpp import CFunction

Row = tuple[str, int, tuple[int, ...]]  # C name, pointers, ints

# Numbers, and before them what g++ must know: pragmas, sizes of arrays and lanes, arguments of templates, and
# divisors, since it makes products of them, but for those that say which share of the work is a thread's.
_TOKEN = re.compile(
    r"#pragma[^\n]*|\[[^\]]*\]|<\d+>"
    r"|\b(?:block=task%|chunk=task/|lo=task%|o0=\(task/)(?=\d)|(?<=\d)/(?=\d+[,;])"
    r"|[/%]\(?\d+l?"
    r"|(?<![\w.])(?P<number>\d+\.\d*(?:e[+-]?\d+)?f?|\d+e[+-]?\d+f?|\d+l?)(?![\w.])"
)


def merged(
    functions: Mapping[str, CFunction], kernels: Mapping[str, Row]
) -> tuple[dict[str, CFunction], dict[str, Row]]:
    """Both tables with equal functions joined: the rows of their kernels name the joint one, and end with its
    numbers.
    """
    titles = Counter(map(_title, functions))
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, list[str]]] = defaultdict(dict)
    for name, function in functions.items():
        text = function.source.replace(name, "@")
        around, numbers = _apart(text) if titles[_title(name)] > 1 else ((text,), [])
        alike[around, tuple(map(_type, numbers))][name] = numbers
    made, joint = {}, {}
    for (around, types), members in alike.items():
        first = functions[next(iter(members))]
        if len(members) == 1 or first.sizes:
            made.update({name: functions[name] for name in members})
            continue
        (n_ints,) = {len(row[2]) for row in kernels.values() if row[0] in members}  # random streams
        one, extra = _joined(first, around, types, members, n_ints)
        made[one.name] = one
        joint.update({name: (one.name, ints) for name, ints in extra.items()})
    rows = {}
    for kernel, (name, pointers, ints) in kernels.items():
        c_name, more = joint.get(name, (name, ()))
        rows[kernel] = (c_name, pointers, (*ints, *more))
    return made, rows


def _title(name: str) -> str:
    """A function's name without the hash, which says its computation."""
    return name.rpartition("_")[0]


def _apart(text: str) -> tuple[tuple[str, ...], list[str]]:
    """A text's numbers that may be arguments, and the text around them."""
    around, numbers, end = [], [], 0
    for found in _TOKEN.finditer(text):
        if found["number"]:
            around.append(text[end : found.start()])
            numbers.append(found[0])
            end = found.end()
    return (*around, text[end:]), numbers


def _joined(
    like: CFunction,
    around: Sequence[str],
    types: Sequence[str],
    members: Mapping[str, Sequence[str]],
    n_ints: int,
) -> tuple[CFunction, dict[str, tuple[int, ...]]]:
    """One function for all members, and the integers that make it each of them, which follow `n_ints`."""
    names: dict[tuple[str, ...], str] = {}  # numbers that are equal in every member are one argument
    text, head = around[0], ""
    for t, column, after in zip(types, zip(*members.values(), strict=True), around[1:], strict=True):
        if len(set(column)) == 1:
            text += column[0] + after
            continue
        if column not in names:
            names[column] = f"c{len(names)}_"
            given = f"ints[{n_ints + len(names) - 1}]"
            head += f"const {t} {names[column]}={f'*(const {t}*)&' if t in _CODES else ''}{given};"
        text += names[column] + after
    text = text.replace("{", "{" + head, 1)
    name = f"{_title(like.name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    ints = {member: tuple([_bits(column[k]) for column in names]) for k, member in enumerate(members)}
    return replace(like, name=name, source=text.replace("@", name)), ints


_CODES = {"float": ("<f", "<i"), "double": ("<d", "<q")}


def _type(number: str) -> str:
    """The C type of a number."""
    if number.removesuffix("l").isdigit():
        return "i64" if number.endswith("l") or int(number) >= 1 << 31 else "int"
    return "float" if number.endswith("f") else "double"


def _bits(number: str) -> int:
    """The integer that stands for a number."""
    if _type(number) not in _CODES:
        return int(number.removesuffix("l"))
    as_float, as_int = _CODES[_type(number)]
    return int(struct.unpack(as_int, struct.pack(as_float, float(number.removesuffix("f"))))[0])
