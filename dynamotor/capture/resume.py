"""Graph breaks: run one instruction of a user's frame natively, and go on in the middle of its code.

A frame between two instructions is a `Boundary` (the static part) and a flat tuple of values
(`Boundary.flat`). Both kinds of function made here are the user's code, unchanged, behind a prefix that
rebuilds the frame from that tuple, so the user's own jumps, handlers and `with` blocks do the rest.

>>> at = Boundary(code, offset, n_stack)
>>> after = successors(at)                       # one boundary, or two after a conditional jump or FOR_ITER
>>> step = break_function(at, [resume_function(b, globals()) for b in after], globals())
>>> step(*at.flat(slots, stack))                 # the frame's result
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .assembler import Assembler, can_move_slots, put_before
from .bytecode import Instr, by_code, decode
from .opcode_tables import NEEDS_BEFORE, VERSION


class _Sentinel:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


UNBOUND = _Sentinel("unbound local")
NULL = _Sentinel("NULL on the stack")


@dataclass(frozen=True)
class Boundary:
    """A frame that is about to run the instruction at `offset` with `n_stack` values on its stack.

    nulls: stack positions (0 is the bottom) that hold NULL. unbound: slots of `localsplus` without a value. A
    cell's slot holds the cell object, not its contents.
    """

    code: types.CodeType
    offset: int
    n_stack: int
    nulls: frozenset[int] = frozenset()
    unbound: frozenset[int] = frozenset()

    @staticmethod
    def of(code: types.CodeType, offset: int, slots: Sequence[Any], stack: Sequence[Any]) -> Boundary:
        """The boundary of a frame whose slots and stack are given with `UNBOUND` and `NULL` in their
        places.
        """
        return Boundary(
            code,
            offset,
            len(stack),
            frozenset(i for i, v in enumerate(stack) if v is NULL),
            frozenset(i for i, v in enumerate(slots) if v is UNBOUND),
        )

    @property
    def instr(self) -> Instr:
        return decode(self.code).at(self.offset)

    @property
    def bound_slots(self) -> list[int]:
        """Slots that the flat tuple carries, in its order; they come before the stack."""
        return [i for i in range(len(decode(self.code).localsplus)) if i not in self.unbound]

    @property
    def full_stack(self) -> list[int]:
        """Stack positions that the flat tuple carries, in its order."""
        return [i for i in range(self.n_stack) if i not in self.nulls]

    def flat(self, slots: Sequence[Any], stack: Sequence[Any]) -> tuple[Any, ...]:
        """The values that the functions made for this boundary take as arguments."""
        return tuple([slots[i] for i in self.bound_slots] + [stack[i] for i in self.full_stack])

    def unflat(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Slots and stack (with `UNBOUND` and `NULL`) from a flat tuple."""
        slots, stack = [UNBOUND] * len(decode(self.code).localsplus), [NULL] * self.n_stack
        values = iter(flat)
        for i in self.bound_slots:
            slots[i] = next(values)
        for i in self.full_stack:
            stack[i] = next(values)
        return slots, stack

    @property
    def exception_slots(self) -> tuple[int, ...]:
        """Stack positions where CPython keeps the exception handled before the one being handled now,
        innermost last.

        In a flat tuple these positions carry the exception that is being handled at that level instead.
        """
        return exception_slots(self.code).get(self.offset, ())


_LOCALS_AS_DICT = frozenset({"locals", "vars", "dir", "eval", "exec"})


def why_not_resumable(code: types.CodeType) -> str | None:
    """Why a frame of this code cannot be cut in two, or None when it can."""
    if decode(code).is_generator_like:
        return "a generator or coroutine cannot be resumed"
    return why_not_rebuilt(code)


def why_not_rebuilt(code: types.CodeType) -> str | None:
    """Why no other frame can go on in the middle of this code, or None."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return "a module or class body cannot be resumed"
    if not code.co_nlocals and not can_move_slots(code):
        return "it has too many cells to put a local in front of them"
    loads = [i.op for i in decode(code).instrs if i.op == "LOAD_GLOBAL" and i.argval in _LOCALS_AS_DICT]
    if len(loads) > 1:
        return "it may read its dict of locals later: the rest would have another dict"
    return None


# ---- effects of an instruction on a boundary ----

_ENDS = frozenset({"RETURN_VALUE", "RAISE_VARARGS", "RERAISE"})
JUMPS_WITH_TEST = frozenset(
    {
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_IF_TRUE",
        "POP_JUMP_IF_NONE",
        "POP_JUMP_IF_NOT_NONE",
        "JUMP_IF_FALSE_OR_POP",
        "JUMP_IF_TRUE_OR_POP",
        "FOR_ITER",
    }
)


def _depth_after(instr: Instr, depth: int, jump: bool) -> int:
    """Stack depth after an instruction, taken as CPython's compiler counts it."""
    if (
        instr.op == "FOR_ITER"
    ):  # CPython counts the pop at the end of the loop; here the iterator is gone by then
        return depth - 1 if jump else depth + 1
    return depth + instr.stack_effect(jump)


@by_code
def exception_slots(code: types.CodeType) -> dict[int, tuple[int, ...]]:
    """For the instructions inside exception handlers: the stack positions that PUSH_EXC_INFO filled (see
    `Boundary`).
    """
    info = decode(code)
    known: dict[int, tuple[int, ...]] = {}
    todo: list[tuple[int, int, tuple[int, ...]]] = [(info.instrs[0].offset, 0, ())]
    while todo:
        offset, depth, slots = todo.pop()
        offset = info.at(offset).offset
        if offset in known:
            continue
        known[offset] = slots
        instr = info.at(offset)
        handler = info.handler(instr.offset)
        if handler is not None:
            outer = tuple(s for s in slots if s < handler.depth)
            todo.append((handler.target, handler.depth + handler.lasti + 1, outer))
        if instr.op in _ENDS:
            continue
        if instr.op == "PUSH_EXC_INFO":
            slots = (*slots, depth - 1)
        elif instr.op == "POP_EXCEPT":
            slots = slots[:-1]
        elif instr.op == "SWAP":
            moved = {depth - 1: depth - instr.arg, depth - instr.arg: depth - 1}
            slots = tuple(moved.get(s, s) for s in slots)
        if instr.target is not None:
            todo.append((instr.target, _depth_after(instr, depth, True), slots))
        if instr.op != "JUMP":
            todo.append((instr.end, _depth_after(instr, depth, False), slots))
    return {offset: slots for offset, slots in known.items() if slots}


def _nulls_after(at: Boundary, instr: Instr, depth: int) -> frozenset[int]:
    """Which positions hold NULL after an instruction; break copies of LOAD_METHOD push NULL and the bound
    attribute.
    """
    n, nulls = at.n_stack, set(at.nulls)
    if instr.op == "PUSH_NULL":
        nulls.add(n)
    elif instr.op == "LOAD_GLOBAL" and instr.arg or _loads_method(instr):
        nulls.add(depth - 2 if VERSION.null_first else depth - 1)
    elif instr.op in ("CALL", "CALL_FUNCTION_EX"):
        nulls = {i for i in nulls if i < depth - 1}
    elif instr.op == "SWAP":
        other = n - instr.arg
        swap = {n - 1: other, other: n - 1}
        nulls = {swap.get(i, i) for i in nulls}
    elif (
        instr.op == "COPY"
        and n - instr.arg in nulls
        or instr.op == "LOAD_FAST_AND_CLEAR"
        and instr.arg in at.unbound
    ):
        nulls.add(n)
    return frozenset(i for i in nulls if i < depth)


def _loads_method(instr: Instr) -> bool:
    return instr.op in ("LOAD_METHOD", "LOAD_SPECIAL") or instr.op == "LOAD_SUPER_ATTR" and instr.arg[0]


def _unbound_after(at: Boundary, instr: Instr) -> frozenset[int]:
    if instr.op == "STORE_FAST":
        gone = at.n_stack - 1 in at.nulls
        return at.unbound | {instr.arg} if gone else at.unbound - {instr.arg}
    return at.unbound | {instr.arg} if instr.op in ("DELETE_FAST", "LOAD_FAST_AND_CLEAR") else at.unbound


def successors(at: Boundary, *, inner: bool = False) -> tuple[Boundary, ...]:
    """Where a frame may be after the instruction: the next one, then a jump's target; none when it leaves the
    frame.

    With `inner` the instruction (a call of an inlined frame) is replaced by one value pushed on the stack,
    from which the call's own operands are gone already.
    """
    instr, dropped = at.instr, _dropped(at)
    if inner:
        end, n_stack = (dropped.end, at.n_stack) if dropped else (instr.end, at.n_stack + 1)
        return (Boundary(at.code, end, n_stack, at.nulls, at.unbound),)
    if instr.op in _ENDS:
        return ()
    unbound = _unbound_after(at, instr)

    def after(offset: int, jump: bool) -> Boundary:
        depth = _depth_after(instr, at.n_stack, jump)
        nulls = _nulls_after(at, instr, depth)
        return Boundary(
            at.code, decode(at.code).at(offset).offset, depth - (dropped is not None), nulls, unbound
        )

    if instr.op == "JUMP":
        return (after(instr.goal, True),)
    ways = (after(dropped.end if dropped else instr.end, False),)
    return (*ways, after(instr.target, True)) if instr.target is not None else ways


def _dropped(at: Boundary) -> Instr | None:
    """The instruction that drops a call's result: it goes with the call, since the rest would guard the
    value (`x.item()` alone on its line), and compile for each.
    """
    after = decode(at.code).at(at.instr.end) if at.instr.op in ("CALL", "CALL_FUNCTION_EX") else None
    return after if after is not None and after.op == "POP_TOP" else None


_PLAIN = frozenset({"POP_TOP", "LOAD_CONST", "LOAD_FAST", "BUILD_TUPLE", "BUILD_LIST", "COPY", "SWAP"})


def way_out(after: Boundary) -> tuple[Instr, ...]:
    """The instructions from here to the frame's end where they only hand out existing values; else none.

    Going on captured would guard a number that `item()` gave, and compile for each.
    """
    info, found = decode(after.code), []
    for instr in info.instrs[info.index[after.offset] :]:
        found.append(instr)
        if instr.op == "RETURN_VALUE":
            return tuple(found)
        if instr.op not in _PLAIN or instr.op == "LOAD_FAST" and instr.arg in after.unbound:
            break
    return ()


# ---- writing the functions ----


def _rebuild(out: Assembler, at: Boundary, thunk: bool) -> None:
    """From the flat tuple in slot 0 to the frame: the stack first, then the slots, slot 0 last."""
    code, state = at.code, 0
    place = {("slot", i): n for n, i in enumerate(at.bound_slots)}
    place |= {("stack", i): len(place) + n for n, i in enumerate(at.full_stack)}

    def push(key: tuple[str, int] | int) -> None:
        out.emit("LOAD_FAST", state)
        out.const(place[key] if isinstance(key, tuple) else key)
        out.emit(*VERSION.subscript)

    # Frames count as complete (for tracebacks and sys._getframe) from the first RESUME on.
    out.emit("RESUME", 0)
    levels = set(at.exception_slots)
    for i in range(at.n_stack):
        if i in at.nulls:
            out.emit("PUSH_NULL")
            continue
        push(("stack", i))
        if i in levels:
            out.emit("PUSH_EXC_INFO")
            out.emit("POP_TOP")
    if thunk:
        with out.callee():
            push(len(place))
    slots = [i for i in at.bound_slots if i + out.shift != state] + [
        i for i in at.bound_slots if i + out.shift == state
    ]
    cells = {decode(code).localsplus.index(name) for name in code.co_cellvars}
    for i in slots:
        push(("slot", i))
        if i in cells:
            out.slot("MAKE_CELL", i)  # `locals()` takes a slot for a cell only when this ran
        out.slot("STORE_FAST", i)
    if not slots or slots[-1] + out.shift != state:
        out.emit("DELETE_FAST", state)


def _leave(
    code: types.CodeType, consts: Assembler, after: Boundary, resume: Callable[..., Any] | None
) -> bytearray:
    """What follows the instruction: collect slots and stack, unwind handler levels, return
    `resume(*flat)`.
    """
    out = Assembler(code)
    out.consts = consts.consts
    if resume is None:
        for instr in way_out(after):
            _copy(out, after, instr)
        return out.data
    levels = set(after.exception_slots)
    # The stack is taken from the top, so the list is reversed before the slots go in front of it.
    out.emit("BUILD_LIST", 0)
    for i in reversed(range(after.n_stack)):
        if i in after.nulls:
            out.call_over_null(list)  # gives the same list again
            continue
        if i in levels:
            with out.callee():
                out.const(sys.exception)
            out.call(0)
            out.emit("LIST_APPEND", 1)
        out.emit("SWAP", 2)
        if i in levels:
            out.emit("POP_EXCEPT")
        else:
            out.emit("LIST_APPEND", 1)
    out.const(slice(None, None, -1))
    out.emit(*VERSION.subscript)
    for i in after.bound_slots:
        out.slot(VERSION.load_slot, i)
    out.emit("BUILD_LIST", len(after.bound_slots))
    out.emit("SWAP", 2)
    out.emit("LIST_EXTEND", 1)
    # The collector does not look into code objects, so a cycle through one would never be freed: it holds a
    # weak reference, and the function holds the callable.
    with out.callee():
        with out.callee():
            out.const(weakref.ref(resume))
        out.call(0)
    out.under_callee()
    for name in VERSION.call_star:
        out.emit(name)
    out.emit("RETURN_VALUE")
    return out.data


def _copy(out: Assembler, at: Boundary, instr: Instr) -> None:
    """The instruction as it stands in the user's code (jumps apart), with its companions."""
    raw = instr.raw_arg
    if instr.op == "LOAD_SPECIAL":
        out.call_on_top(functools.partial(_special, instr.argval))
        _push_null(out)
    elif _loads_method(instr):
        # Which of the two forms it would push is known only when it runs: always NULL and the bound attribute.
        if instr.op == "LOAD_METHOD":
            out.emit("LOAD_ATTR", raw & ~1 if VERSION.method_bit else raw)
        else:
            out.emit("LOAD_SUPER_ATTR", raw & ~1)
        _push_null(out)
    elif instr.op in ("LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLOSURE", "MAKE_CELL", *_SLOT_OPS):
        out.slot(dis.opname[instr.opcode], instr.arg)
    elif dis.opname[instr.opcode] in NEEDS_BEFORE:
        out.test(dis.opname[instr.opcode], raw)
    elif instr.op != "JUMP":
        for number, arg in (*instr.before, (instr.opcode, raw)):
            out.emit(dis.opname[number], arg)


def _push_null(out: Assembler) -> None:
    """The NULL that a call expects beside the callable on top."""
    out.emit("PUSH_NULL")
    if VERSION.null_first:
        out.emit("SWAP", 2)


def _special(name: str, value: Any) -> Any:
    """A special method as LOAD_SPECIAL finds it, bound."""
    cls = type(value)
    found = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    if not found:
        with value:  # raises what LOAD_SPECIAL raises
            raise AssertionError(f"{cls} has no {name}")
    bind = getattr(type(found[0]), "__get__", None)
    return found[0] if bind is None else bind(found[0], value, cls)


_SLOT_OPS = frozenset({"LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_AND_CLEAR"})


def _function(
    at: Boundary, out: Assembler, globals_: dict[str, Any], kind: str, kept: tuple[Any, ...]
) -> Callable[..., Any]:
    line = at.instr.line or at.code.co_firstlineno
    code = put_before(at.code, out, line, at.code.co_name)
    closure = tuple(types.CellType() for _ in code.co_freevars) or None
    inner = types.FunctionType(code, globals_, at.code.co_name, None, closure)

    def function(*flat: Any) -> Any:
        return inner(flat)

    function.__name__ = function.__qualname__ = f"{at.code.co_name}.{kind}@{at.offset}"
    function.__dict__["resumes"] = kept
    return function


def _enter(out: Assembler, at: Boundary) -> int:
    """The offset in the user's code where CPython goes on at a boundary. The instruction there may be the second
    half of a fused one, or take any value where CPython's takes a bool: then it runs in front of the jump.
    """
    instr = at.instr
    if instr.offset % 2 and instr.target is None:
        _copy(out, at, instr)
        return instr.end
    name = dis.opname[instr.opcode]
    if name not in NEEDS_BEFORE or instr.before and not instr.offset % 2:
        return instr.offset
    out.emit(NEEDS_BEFORE[name])
    return instr.last


def _check(at: Boundary) -> None:
    reason = why_not_resumable(at.code)
    if reason is not None:
        raise ValueError(f"{at.code.co_name}: {reason}")


def resume_function(at: Boundary, globals_: dict[str, Any]) -> Callable[..., Any]:
    """A function of the flat values that goes on at the boundary and returns the frame's result."""
    _check(at)
    out = Assembler(at.code)
    _rebuild(out, at, thunk=False)
    out.emit("JUMP_FORWARD", _enter(out, at) // 2)
    return _function(at, out, globals_, "resume", ())


def waiting_generator(at: Boundary, globals_: dict[str, Any]) -> Callable[..., Any]:
    """A function of the flat values that gives a generator which waits at the boundary: a YIELD_VALUE, whose operand
    is not on the stack."""
    out = Assembler(at.code)
    out.emit("RETURN_GENERATOR")
    out.emit("POP_TOP")
    _rebuild(out, at, thunk=False)
    out.const(None)
    out.emit("JUMP_FORWARD", at.offset // 2)
    make = _function(at, out, globals_, "generator", ())

    def waiting(*flat: Any) -> Any:
        generator = make(*flat)
        next(generator)
        return generator

    return waiting


def break_function(
    at: Boundary,
    resumes: Sequence[Callable[..., Any] | None],
    globals_: dict[str, Any],
    *,
    inner: bool = False,
    handled: bool = True,
) -> Callable[..., Any]:
    """A function of the flat values that runs the one instruction, then returns `resume(*flat)` of where that
    led.

    resumes: a weakly referenceable callable for each of `successors(at, inner=inner)`, on that boundary's
    flat values; None where the frame takes its `way_out`. With `inner` the function takes one more argument,
    a callable without arguments whose result is pushed in place of the instruction (see `successors`). An
    exception of the instruction goes to the user's handlers, natively; with `handled` false, to the caller.
    """
    _check(at)
    instr, out = at.instr, Assembler(at.code)
    after = successors(at, inner=inner)
    assert len(after) == len(resumes), (instr, len(resumes))
    leaves = [_leave(at.code, out, boundary, resume) for boundary, resume in zip(after, resumes)]
    _rebuild(out, at, thunk=inner)
    start = out.offset
    # Since 3.13 an exception that leaves a called frame is looked up one unit before the call.
    out.emit("NOP")
    if inner:
        out.call(0)
    elif instr.op in JUMPS_WITH_TEST:
        name = dis.opname[instr.opcode].replace("BACKWARD", "FORWARD")
        out.test(name, len(leaves[0]) // 2)
    else:
        _copy(out, at, instr)
    if _dropped(at):
        out.emit("POP_TOP")
    end = out.offset
    for leave in leaves[:1]:
        out.data += leave
    if len(leaves) == 2:
        for name in VERSION.loop_end if instr.op == "FOR_ITER" else ():
            out.emit(name)
        out.data += leaves[1]
    out.emit("NOP")
    handler = decode(at.code).handler(instr.offset)
    if handled and handler is not None and end > start:
        out.cover(start, end, handler)
    return _function(at, out, globals_, "break", tuple(resumes))


class GraphRaised(BaseException):
    """Unwinds a frame in the place of an error whose place in the frame is not known: `with` blocks and
    `finally` see it, no handler of the program's catches it."""


def unwind(at: Boundary, flat: Sequence[Any], globals_: dict[str, Any]) -> None:
    """Leave the `with` and `try` blocks that are open at the boundary, as an error does."""

    def leave() -> None:
        raise GraphRaised

    with contextlib.suppress(GraphRaised):
        break_function(at, [None], globals_, inner=True)(*flat, leave)


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
# Functions that call one of these see all locals.
_OBSERVERS = frozenset({"locals", "vars", "dir", "eval", "exec", "super"})


def live_slots(code: types.CodeType, offset: int) -> frozenset[int]:
    """The live slots right before the instruction at an offset."""
    return _live(code)[decode(code).index[offset]]


@by_code
def _live(code: types.CodeType) -> list[frozenset[int]]:
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
            handler = info.handler(instr.offset)
            if handler is not None:
                after |= live[info.index[handler.target]]
            if after != live[i]:
                live[i], changed = after, True
    return [slots | cells for slots in live]
