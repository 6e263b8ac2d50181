"""Which locals are still read after an instruction: a graph break hands on only those.

>>> live_slots(code, offset)      # slots of `localsplus` that some path from here reads before it writes
frozenset({0, 2})
"""

from __future__ import annotations

import types

from .bytecode import decode

_READS = frozenset(
    {
        "LOAD_FAST",
        "LOAD_CLOSURE",
        "LOAD_DEREF",
        "STORE_DEREF",
        "DELETE_DEREF",
        "DELETE_FAST",
        "LOAD_FAST_AND_CLEAR",
        "LOAD_CLASSDEREF",
        "LOAD_FROM_DICT_OR_DEREF",
    }
)
_WRITES = frozenset({"STORE_FAST"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
# Functions that call one of these see all locals.
_OBSERVERS = frozenset({"locals", "vars", "dir", "eval", "exec", "super"})

_memo: dict[int, tuple[types.CodeType, list[frozenset[int]]]] = {}


def live_slots(code: types.CodeType, offset: int) -> frozenset[int]:
    """The live slots right before the instruction at an offset."""
    found = _memo.get(id(code))
    if found is None:
        found = _memo[id(code)] = (code, _analyse(code))
    return found[1][decode(code).index[offset]]


def _analyse(code: types.CodeType) -> list[frozenset[int]]:
    info = decode(code)
    everything = frozenset(range(len(info.localsplus)))
    if _OBSERVERS & set(code.co_names):
        return [everything] * len(info.instrs)
    cells = frozenset(
        i for i, name in enumerate(info.localsplus) if name in code.co_cellvars or name in code.co_freevars
    )
    live: list[frozenset[int]] = [frozenset()] * len(info.instrs)
    changed = True
    while changed:
        changed = False
        for i in range(len(info.instrs) - 1, -1, -1):
            instr = info.instrs[i]
            after: frozenset[int] = frozenset()
            if instr.op not in _ENDS and instr.op != "JUMP" and i + 1 < len(live):
                after = live[i + 1]
            if instr.target is not None:
                after |= live[info.index[instr.target]]
            if instr.op in _WRITES:
                after -= {instr.arg}
            elif instr.op in _READS:
                after |= {instr.arg}
            handler = info.handler(instr.end - 2)
            if handler is not None:
                after |= live[info.index[handler.target]]
            if after != live[i]:
                live[i], changed = after, True
    return [slots | cells for slots in live]
