"""Opcodes that decide: operators, jumps, loops, calls, returns, generators, exceptions and `with` blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

from .breaks import unsupported, unsupported_if
from .bytecode import Instr
from .checks import decided
from .interpreter import Frame, GeneratorValue, opcode, replace
from .polyfills.cursors import Cursor
from .short_circuits import leads_there_anyway
from .values.base import MISSING, Iterator, ObjectIterator, Raised, Trace, Value
from .values.constant import Constant, is_none
from .values.containers import DictValue, TupleValue, contents_of
from .values.instances import link_context
from .values.klass import ClassValue
from .values.operators import SYMBOLS
from .values.size import LateComparison
from .values.torch_function import HeldNumber


# Jumps and loops --------------------------------------------------------------------------------------------
@opcode("JUMP")
def jump(frame: Frame, instr: Instr, target: int) -> None:
    frame.ip = target


@opcode("FOR_ITER")
def for_iter(frame: Frame, instr: Instr, target: int) -> None:
    iterator = frame.stack[-1]
    unsupported_if(
        iterator.source is not None and _differs_by_round(frame.trace, iterator),
        "loop",
        "loop split: its body breaks the graph, so each iteration runs separately",
        cure="move the break of its body out of the loop",
    )
    if not isinstance(iterator, Iterator):
        iterator = ObjectIterator(iterator)
    item = iterator.next(frame.trace)
    if item is None:
        frame.stack.pop()
        frame.ip = target
    else:
        frame.stack.append(item)


def _differs_by_round(trace: Trace, iterator: Value) -> bool:
    """Whether a break left this iterator in the frame and another round found it elsewhere: then the next item is
    taken natively and comes as an argument, so that one program serves all rounds."""
    policy = trace.sizes.policy
    return issubclass(iterator.python_type(), Cursor | zip | map | filter) and any(
        source.leads_through((iterator.source,)) for source in policy.varying
    )


def _decided_early(frame: Frame, instr: Instr, when: bool) -> bool | None:
    """Whether a jump is taken, where that does not depend on the value on the stack."""
    if type(frame.stack[-1]) is LateComparison:
        return leads_there_anyway(frame, instr, when) or None
    assumed = decided(frame, instr, when)
    return None if assumed is None else assumed is when


def _jump_rule(when: str, holds: Callable[[Any, Value], bool]) -> None:
    @opcode(f"POP_JUMP_IF_{when}")
    def pop_jump(frame: Frame, instr: Instr, target: int) -> None:
        jumps = _decided_early(frame, instr, when == "TRUE") if when in ("TRUE", "FALSE") else None
        if holds(frame.trace, frame.stack[-1]) if jumps is None else jumps:
            frame.ip = target
        frame.stack.pop()

    @opcode(f"JUMP_IF_{when}_OR_POP")
    def jump_or_pop(frame: Frame, instr: Instr, target: int) -> None:
        if holds(frame.trace, frame.stack[-1]):
            frame.ip = target
        else:
            frame.stack.pop()


_jump_rule("FALSE", lambda trace, value: not trace.truth(value))
_jump_rule("TRUE", lambda trace, value: trace.truth(value))
_jump_rule("NONE", lambda trace, value: is_none(value))
_jump_rule("NOT_NONE", lambda trace, value: not is_none(value))


# Calls and returns ------------------------------------------------------------------------------------------
@opcode("CALL")
def call(frame: Frame, instr: Instr, target: int) -> None:
    trace, stack, n, names = frame.trace, frame.stack, instr.arg, instr.argval
    base = len(stack) - n - 2
    args = stack[base + 2 :]
    fn, *bound = (
        v for v in stack[base : base + 2] if v is not None
    )  # a callable and NULL, or a method and self
    args = bound + args
    del stack[base:]
    kwargs = {}
    if names:
        first = len(args) - len(names)
        kwargs = dict(zip(names, args[first:]))
        del args[first:]
    trace.tail = True
    result = fn.call(trace, args, kwargs)
    trace.tail = False
    stack.append(result)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, instr: Instr, target: int) -> None:
    trace, stack = frame.trace, frame.stack
    named = stack.pop() if instr.arg & 1 else None
    unsupported_if(
        not trace.can_iterate(stack[-1]),
        "unsupported-call",
        "a call with * of what cannot be iterated",
    )
    args = stack.pop().listed(trace)
    (fn,) = (v for v in (stack.pop(), stack.pop()) if v is not None)
    kwargs: dict[str, Value] = {}
    if named is not None:
        table = DictValue([])
        trace.update_dict(table, named)
        kwargs = {k.as_constant(): v for k, v in table.load().values()}
        unsupported_if(
            not all(isinstance(name, str) for name in kwargs),
            "unsupported-call",
            "a call with keywords that are no strings",
        )
    trace.tail = True
    result = fn.call(trace, args, kwargs)
    trace.tail = False
    stack.append(result)


@opcode("RETURN_VALUE", "YIELD_VALUE")
def return_value(frame: Frame, instr: Instr, target: int) -> bool:
    frame.result = frame.stack.pop()
    return True


# Generators -------------------------------------------------------------------------------------------------
@opcode("SEND")
def send(frame: Frame, instr: Instr, target: int) -> None:
    trace, stack = frame.trace, frame.stack
    value, receiver = stack[-1], stack[-2]
    if isinstance(receiver, GeneratorValue):
        yielded, result = receiver.send(trace, value)
    else:
        item = receiver.next(trace)
        yielded, result = item is not None, item if item is not None else Constant(None)
    stack.pop()
    if not yielded:
        if not instr.arg:
            stack.pop()
        frame.ip = target
    stack.append(result)


# Exceptions -------------------------------------------------------------------------------------------------
@opcode("RAISE_VARARGS")
def raise_varargs(frame: Frame, instr: Instr, target: int) -> None:
    trace = frame.trace
    if instr.arg == 0:
        handled = trace.exception()
        if handled is None:
            raise trace.error(RuntimeError, "No active exception to reraise")
        raise Raised(handled, again=True)
    cause = frame.stack.pop() if instr.arg == 2 else None
    value = _instance(frame, frame.stack.pop())
    unsupported_if(
        value.real() is not MISSING,
        "side-effect",
        "an exception from outside is raised",
        "its traceback grows",
    )
    if cause is not None:
        cause = cause if is_none(cause) else _instance(frame, cause, "exception causes")
        value.setattr(trace, "__cause__", cause)
    link_context(trace, value)
    raise Raised(value)


def _instance(frame: Frame, value: Value, what: str = "exceptions") -> Value:
    if isinstance(value, ClassValue) and issubclass(value.value, BaseException):
        return frame.trace.call(value, [])
    frame.trace.raise_if(
        not issubclass(value.python_type(), BaseException),
        TypeError,
        f"{what} must derive from BaseException",
    )
    return value


@opcode("PUSH_EXC_INFO")
def push_exc_info(frame: Frame, instr: Instr, target: int) -> None:
    value = frame.stack.pop()
    frame.stack.append(HandledValue(frame.trace.stack.handled))
    frame.stack.append(value)
    frame.trace.stack.handled = value


class HandledValue(Value):
    """What PUSH_EXC_INFO saves: the exception that was being handled before."""

    __slots__ = ("value",)

    def __init__(self, value: Value | None) -> None:
        super().__init__()
        self.value = value

    def reconstruct(self, emitter: Any) -> str:
        raise unsupported("reconstruct", "an exception handler is running")

    def python_type(self) -> type:
        return type(None) if self.value is None else self.value.python_type()


@opcode("POP_EXCEPT")
def pop_except(frame: Frame, instr: Instr, target: int) -> None:
    frame.trace.stack.handled = frame.stack.pop().value


@opcode("RERAISE")
def reraise(frame: Frame, instr: Instr, target: int) -> None:
    raise Raised(frame.stack.pop(), again=True)


@opcode("CHECK_EXC_MATCH")
def check_exc_match(frame: Frame, instr: Instr, target: int) -> None:
    kinds, cls = frame.stack.pop().as_constant(), frame.stack[-1].python_type()
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    unsupported_if(
        not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds),
        "unsupported-call",
        "`except` of something other than a class of exceptions",
    )
    frame.stack.append(Constant(any(frame.trace.derives(cls, kind) for kind in kinds)))


@opcode("CLEANUP_THROW")
def cleanup_throw(frame: Frame, instr: Instr, target: int) -> None:
    error = frame.stack[-1]
    if not issubclass(error.python_type(), StopIteration):
        raise Raised(error, again=True)
    args = error.getattr(frame.trace, "args").unpack(frame.trace)
    frame.stack[-3:] = [Constant(None), args[0] if args else Constant(None)]


# with -------------------------------------------------------------------------------------------------------
@opcode("BEFORE_WITH")
def before_with(frame: Frame, instr: Instr, target: int) -> None:
    trace, manager = frame.trace, frame.stack[-1]
    leave = special(frame, manager, "__exit__")
    enter = special(frame, manager, "__enter__")
    result = trace.call(enter, [])
    frame.stack[-1] = leave
    frame.stack.append(result)


@opcode("LOAD_SPECIAL")
def load_special(frame: Frame, instr: Instr, target: int) -> None:
    value = special(frame, frame.stack[-1], instr.argval)
    frame.stack.pop()
    frame.push_callee(value)


def special(frame: Frame, value: Value, name: str) -> Value:
    """A special method bound to its instance."""
    cls = value.python_type()
    raw = frame.trace.type_attr(cls, name)
    if raw is MISSING:
        raise frame.trace.error(TypeError, _refusal(cls))
    return frame.trace.bind(raw, name, value, cls)


def _refusal(cls: type) -> str:
    """The text with which this version of CPython refuses instances of a class in `with`: that of a class of the same
    name with as many of the methods."""
    like = {name: None for name in ("__enter__", "__exit__", "__aenter__", "__aexit__") if hasattr(cls, name)}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        with type(cls.__name__, (), names | like)():
            raise AssertionError(f"{cls} is a context manager")
    except TypeError as error:
        return str(error)


@opcode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, instr: Instr, target: int) -> None:
    trace, error = frame.trace, frame.stack[-1]
    leave = frame.stack[-instr.arg]
    frame.stack.append(
        trace.call(leave, [trace.make(error.python_type()), error, error.getattr(trace, "__traceback__")])
    )


# match ------------------------------------------------------------------------------------------------------
@opcode("MATCH_KEYS")
def match_keys(frame: Frame, instr: Instr, target: int) -> None:
    keys, subject = frame.stack[-1].unpack(frame.trace), contents_of(frame.stack[-2])
    if not isinstance(subject, DictValue):
        raise unsupported("unsupported-op", "a mapping pattern over an object that is no dict")
    found: dict[Hashable, Value] = {}
    for key in keys:
        known = key.hash_key(frame.trace)
        text = f"mapping pattern checks duplicate key ({key.as_constant()!r})"
        frame.trace.raise_if(known in found, ValueError, text)
        item = subject.lookup(known)
        if item is None:
            break
        found[known] = item
    frame.stack.append(TupleValue(found.values()) if len(found) == len(keys) else Constant(None))


@opcode("MATCH_CLASS")
def match_class(frame: Frame, instr: Instr, target: int) -> None:
    trace = frame.trace
    subject, cls, names = frame.stack[-3:]
    trace.raise_if(not issubclass(cls.python_type(), type), TypeError, "called match pattern must be a class")
    found: list[Any] | None = None
    if trace.truth(trace.call(trace.make(isinstance), [subject, cls])):
        whole, positional = _positional(trace, cls, instr.arg)
        attributes = _attributes(trace, subject, cls, (*positional, *names.as_constant()))
        found = None if attributes is None else [subject] * whole + attributes
    frame.stack[-3:] = [Constant(None) if found is None else TupleValue(found)]


def _positional(trace: Trace, cls: Value, count: int) -> tuple[bool, list[str]]:
    """The targets of a class's positional patterns: the whole object (one pattern of int, str, ...), and attributes."""
    if not count:
        return False, []
    names = trace.getattr_or_none(cls, "__match_args__")
    flags = cls.getattr(trace, "__flags__").as_constant()
    whole = names is None and bool(flags & _MATCHES_WHOLE)
    if names is not None and names.python_type() is not tuple:
        text = f"{_name(trace, cls)}.__match_args__ must be a tuple (got {names.python_type().__name__})"
        raise trace.error(TypeError, text)
    allowed = [] if names is None else names.unpack(trace)
    if (most := len(allowed) + whole) < count:
        accepted = f"accepts {most} positional sub-pattern{'s' * (most != 1)} ({count} given)"
        raise trace.error(TypeError, f"{_name(trace, cls)}() {accepted}")
    for each in allowed[:count]:
        kind = each.python_type()
        text = f"__match_args__ elements must be strings (got {kind.__name__})"
        trace.raise_if(kind is not str, TypeError, text)
    return whole, [each.as_constant() for each in allowed[:count]]


def _name(trace: Trace, cls: Value) -> str:
    return cls.getattr(trace, "__name__").as_constant()


def _attributes(trace: Trace, subject: Value, cls: Value, names: tuple[str, ...]) -> list[Value] | None:
    """The attributes of an object in the order of their patterns; None where one is missing: no further one is
    read.
    """
    found: dict[str, Value] = {}
    for name in names:
        if name in found:
            text = f"{_name(trace, cls)}() got multiple sub-patterns for attribute {name!r}"
            raise trace.error(TypeError, text)
        value = trace.getattr_or_none(subject, name)
        if value is None:
            return None
        found[name] = value
    return list(found.values())


# Bits of a class's flags: matched by a pattern of items, by one of keys, and by its name with the object in the braces.
_SEQUENCE, _MAPPING, _MATCHES_WHOLE = 1 << 5, 1 << 6, 1 << 22


for _names, _n, _compute in (
    (
        ("BINARY_OP", "COMPARE_OP"),
        2,
        lambda frame, instr, a, b: frame.trace.binary(SYMBOLS[instr.argval], a, b),
    ),
    (("UNARY_NEGATIVE",), 1, lambda frame, instr, x: x.unary(frame.trace, operator.neg)),
    (("UNARY_POSITIVE",), 1, lambda frame, instr, x: x.unary(frame.trace, operator.pos)),
    (("UNARY_INVERT",), 1, lambda frame, instr, x: x.unary(frame.trace, operator.invert)),
    (("TO_BOOL",), 1, lambda frame, instr, x: _truth(frame.trace, x)),
    (
        ("UNARY_NOT",),
        1,
        lambda frame, instr, x: (
            x.logical_not() if type(x) is LateComparison else Constant(not frame.trace.truth(x))
        ),
    ),
    (("IS_OP",), 2, lambda frame, instr, a, b: Constant(frame.trace.same(a, b) != instr.argval)),
    (("CONTAINS_OP",), 2, lambda frame, instr, item, x: _contains(frame.trace, x, item, instr.argval)),
    (("END_SEND",), 2, lambda frame, instr, receiver, x: x),
    (
        ("GET_YIELD_FROM_ITER",),
        1,
        lambda frame, instr, x: x if isinstance(x, GeneratorValue) else x.iterate(frame.trace),
    ),
    (("GET_ITER",), 1, lambda frame, instr, x: x.iterate(frame.trace)),
    (("RETURN_GENERATOR",), 0, lambda frame, instr: Constant(None)),
    (("GET_LEN",), 0, lambda frame, instr: frame.stack[-1].length(frame.trace)),
    (("MATCH_SEQUENCE",), 0, lambda frame, instr: _top_has(frame, _SEQUENCE)),
    (("MATCH_MAPPING",), 0, lambda frame, instr: _top_has(frame, _MAPPING)),
):
    opcode(*_names)(replace(_n, _compute))


def _truth(trace: Trace, value: Value) -> Value:
    return value if type(value) is LateComparison else Constant(trace.truth(value))


def _contains(trace: Trace, container: Value, item: Value, inverted: bool) -> Value:
    found = container.contains(trace, item)
    if type(found) is HeldNumber:
        return found.logical_not(trace) if inverted else found
    return Constant(trace.truth(found) != inverted)


def _top_has(frame: Frame, flag: int) -> Value:
    return Constant(bool(frame.stack[-1].python_type().__flags__ & flag))
