"""Opcodes that move values: constants, locals, globals, cells, attributes, the stack, and building of
containers.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from .breaks import unsupported, unsupported_if
from .bytecode import Instr, settled_cells
from .guards import IdIs
from .interpreter import Frame, opcode, opcodes, replace
from .source import Const, DictItem
from .values.base import Raised, Value
from .values.constant import Constant
from .values.containers import DictValue, ListValue, SetValue, TupleValue
from .values.function import CellValue, FunctionValue
from .values.klass import SuperValue
from .values.lazy_text import joined
from .values.operators import c_name
from .values.slices import make_slice
from .values.templates import TemplateValue, interpolation


@opcode("NOP", "STOPITERATION_ERROR")  # the latter: `GeneratorValue` makes it a RuntimeError, in 3.11 too
def nop(frame: Frame, instr: Instr, target: int) -> None:
    pass


@opcode("POP_TOP")
def pop_top(frame: Frame, instr: Instr, target: int) -> None:
    frame.stack.pop()


@opcode("PUSH_NULL")
def push_null(frame: Frame, instr: Instr, target: int) -> None:
    frame.stack.append(None)


@opcode("SWAP")
def swap(frame: Frame, instr: Instr, target: int) -> None:
    stack, n = frame.stack, instr.arg
    stack[-1], stack[-n] = stack[-n], stack[-1]


@opcode("LOAD_CONST")
def load_const(frame: Frame, instr: Instr, target: int) -> None:
    frame.stack.append(Constant(instr.argval))


# Locals, cells, globals -------------------------------------------------------------------------------------
def _unbound(frame: Frame, cls: type[Exception], kind: str, name: str) -> Raised:
    scope = " in enclosing scope" if kind == "free" else ""
    return frame.trace.error(
        cls, f"cannot access {kind} variable '{name}' where it is not associated with a value{scope}"
    )


@opcode("LOAD_FAST")
def load_fast(frame: Frame, instr: Instr, target: int) -> None:
    value = frame.fast[instr.arg]
    if value is None:
        raise _unbound(frame, UnboundLocalError, "local", instr.argval)
    frame.stack.append(value)


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, instr: Instr, target: int) -> None:
    frame.stack.append(frame.fast[instr.arg])
    frame.fast[instr.arg] = None


@opcode("STORE_FAST")
def store_fast(frame: Frame, instr: Instr, target: int) -> None:
    frame.fast[instr.arg] = frame.stack.pop()


@opcode("DELETE_FAST")
def delete_fast(frame: Frame, instr: Instr, target: int) -> None:
    if frame.fast[instr.arg] is None:
        raise _unbound(frame, UnboundLocalError, "local", instr.argval)
    frame.fast[instr.arg] = None


@opcode("MAKE_CELL")
def make_cell(frame: Frame, instr: Instr, target: int) -> None:
    name = frame.info.localsplus[instr.arg]
    frame.fast[instr.arg] = CellValue(frame.fast[instr.arg], settled=name in settled_cells(frame.code))


@opcode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, instr: Instr, target: int) -> None:
    frame.fast[len(frame.fast) - instr.arg :] = frame.func.closure


def _contents(frame: Frame, instr: Instr) -> Value:
    """The content of the cell that the instruction names."""
    cell: CellValue = frame.fast[instr.arg]
    value = cell.load(frame.trace)
    if value is None:
        if instr.argval in frame.code.co_freevars:
            raise _unbound(frame, NameError, "free", instr.argval)
        raise _unbound(frame, UnboundLocalError, "local", instr.argval)
    return value


@opcode("DELETE_DEREF")
def delete_deref(frame: Frame, instr: Instr, target: int) -> None:
    _contents(frame, instr)
    frame.fast[instr.arg].store(frame.trace, None)


@opcode("LOAD_GLOBAL")
def load_global(frame: Frame, instr: Instr, target: int) -> None:
    value = global_value(frame, instr.argval)
    if instr.arg:
        frame.push_callee(value)
    else:
        frame.stack.append(value)


def global_value(frame: Frame, name: str) -> Value:
    """A global or builtin of a frame."""
    value = frame.func.globals.lookup(name)
    if value is None:
        try:
            found = _BUILTINS[name]
        except KeyError:
            raise frame.trace.error(NameError, f"name '{name}' is not defined") from None
        frame.trace.reader.guard(IdIs(DictItem(Const(_BUILTINS, "builtins"), name), found))
        value = frame.trace.make(found)
    return value


_BUILTINS: dict[str, Any] = vars(sys.modules["builtins"])


@opcode("DELETE_GLOBAL")
def delete_global(frame: Frame, instr: Instr, target: int) -> None:
    frame.trace.raise_if(
        frame.func.globals.lookup(instr.argval) is None, NameError, f"name '{instr.argval}' is not defined"
    )
    frame.func.globals.remove(frame.trace, instr.argval)


# Attributes and items ---------------------------------------------------------------------------------------
@opcode("LOAD_METHOD")
def load_method(frame: Frame, instr: Instr, target: int) -> None:
    value = frame.stack[-1].getattr(frame.trace, instr.argval)
    frame.stack.pop()
    frame.push_callee(value)


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(frame: Frame, instr: Instr, target: int) -> None:
    stack = frame.stack
    fn, cls, instance = stack[-3:]
    if not (isinstance(fn, Constant) and fn.value is super):
        proxy = frame.trace.call(fn, [cls, instance] if instr.arg[1] else [])
    else:
        proxy = SuperValue(cls.as_constant(), instance)
    value = proxy.getattr(frame.trace, instr.argval)
    del stack[-3:]
    if instr.arg[0]:
        frame.push_callee(value)
    else:
        stack.append(value)


# Containers -------------------------------------------------------------------------------------------------
def _take(frame: Frame, n: int) -> list[Value]:
    items = frame.stack[len(frame.stack) - n :]
    del frame.stack[len(frame.stack) - n :]
    return items


@opcode("BUILD_MAP")
def build_map(frame: Frame, instr: Instr, target: int) -> None:
    items = _take(frame, 2 * instr.arg)
    made = DictValue([])
    for key, value in zip(items[::2], items[1::2]):
        made.setitem(frame.trace, key, value)
    frame.stack.append(made)


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, instr: Instr, target: int) -> None:
    keys = frame.stack.pop().as_constant()
    frame.stack.append(DictValue([(k, Constant(k), v) for k, v in zip(keys, _take(frame, instr.arg))]))


@opcode("LIST_EXTEND")
def list_extend(frame: Frame, instr: Instr, target: int) -> None:
    frame.trace.must_iterate(frame.stack[-1], "Value after * must be an iterable, not {}")
    items = frame.stack[-1].listed(frame.trace)
    frame.stack.pop()
    frame.stack[-instr.arg].mutate(frame.trace).extend(items)


@opcode("DICT_UPDATE")
def dict_update(frame: Frame, instr: Instr, target: int) -> None:
    source = frame.stack[-1]
    if not frame.trace.has_special(source, "keys"):
        raise frame.trace.error(TypeError, f"'{c_name(source.python_type())}' object is not a mapping")
    frame.trace.update_dict(frame.stack[-1 - instr.arg], source)
    frame.stack.pop()


@opcode("DICT_MERGE")
def dict_merge(frame: Frame, instr: Instr, target: int) -> None:
    trace, source = frame.trace, frame.stack[-1]
    into: DictValue = frame.stack[-1 - instr.arg]
    unsupported_if(
        not trace.has_special(source, "keys"),
        "unsupported-call",
        "a call with ** of something other than a mapping",
    )
    before = set(into.load())
    merged = DictValue([])
    trace.update_dict(merged, source)
    twice = before & set(merged.load())
    if twice:
        raise unsupported("unsupported-call", f"a keyword argument is given twice: {next(iter(twice))}")
    into.update(trace, merged)
    frame.stack.pop()


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, instr: Instr, target: int) -> None:
    frame.trace.must_iterate(frame.stack[-1], "cannot unpack non-iterable {} object")
    items = frame.stack[-1].unpack(frame.trace)
    if len(items) != instr.arg:
        few = len(items) < instr.arg
        text = (
            f"not enough values to unpack (expected {instr.arg}, got {len(items)})"
            if few
            else (f"too many values to unpack (expected {instr.arg})")
        )
        raise frame.trace.error(ValueError, text)
    frame.stack.pop()
    frame.stack.extend(reversed(items))


@opcode("UNPACK_EX")
def unpack_ex(frame: Frame, instr: Instr, target: int) -> None:
    frame.trace.must_iterate(frame.stack[-1], "cannot unpack non-iterable {} object")
    items = frame.stack[-1].unpack(frame.trace)
    before, after = instr.arg & 255, instr.arg >> 8
    if len(items) < before + after:
        raise frame.trace.error(
            ValueError, f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    frame.stack.pop()
    middle = ListValue(items[before : len(items) - after])
    frame.stack.extend(reversed([*items[:before], middle, *items[len(items) - after :]]))


# Strings, functions, imports --------------------------------------------------------------------------------
_CONVERSIONS = (None, str, repr, ascii)


@opcode("FORMAT_VALUE")  # until 3.12; then it is CONVERT_VALUE and FORMAT_SIMPLE or FORMAT_WITH_SPEC
def format_value(frame: Frame, instr: Instr, target: int) -> None:
    trace = frame.trace
    spec = frame.stack.pop() if instr.arg & 4 else Constant("")
    value = frame.stack.pop()
    convert = _CONVERSIONS[instr.arg & 3]
    if convert is not None:
        value = trace.call(trace.make(convert), [value])
    frame.stack.append(_formatted(frame, value, spec))


@opcode("BUILD_INTERPOLATION")
def build_interpolation(frame: Frame, instr: Instr, target: int) -> None:
    spec = frame.stack.pop() if instr.arg & 1 else None
    value, expression = _take(frame, 2)
    frame.stack.append(interpolation(instr.arg >> 2, value, expression, spec))


def _formatted(frame: Frame, value: Value, spec: Value) -> Value:
    return frame.trace.call(frame.trace.make(format), [value, spec])


@opcode("MAKE_FUNCTION")
def make_function(frame: Frame, instr: Instr, target: int) -> None:
    stack = frame.stack
    code: types.CodeType = stack.pop().as_constant()
    parts = {flag: stack.pop() for flag in instr.argval}
    func = FunctionValue(
        frame.trace,
        code,
        globals_=frame.func.globals,
        defaults=parts[1].unpack(frame.trace) if 1 in parts else [],
        kwdefaults={k.as_constant(): v for k, v in parts[2].load().values()} if 2 in parts else {},
        closure=parts[8].items if 8 in parts else [],
    )
    if isinstance(parts.get(4), TupleValue):
        items = parts[4].items
        func.special["__annotations__"] = DictValue(
            [(k.as_constant(), k, v) for k, v in zip(items[::2], items[1::2])]
        )
    if 16 in parts:
        func.special["__annotate__"] = parts[16]
    stack.append(func)


@opcode("IMPORT_NAME")
def import_name(frame: Frame, instr: Instr, target: int) -> None:
    level, names = (v.as_constant() for v in _take(frame, 2))
    namespace = {
        k: getattr(frame.func.globals.lookup(k), "value", None)
        for k in ("__package__", "__name__", "__spec__")
    }
    frame.stack.append(frame.trace.real_call(__import__, instr.argval, namespace, None, names, level))


@opcode("IMPORT_FROM")
def import_from(frame: Frame, instr: Instr, target: int) -> None:
    module = frame.stack[-1]
    found = frame.trace.getattr_or_none(module, instr.argval)
    if found is None:
        name = f"{module.as_constant().__name__}.{instr.argval}"
        if name not in sys.modules:
            raise frame.trace.error(
                ImportError, f"cannot import name '{instr.argval}' from '{module.as_constant().__name__}'"
            )
        found = frame.trace.make(sys.modules[name])
    frame.stack.append(found)


@opcode("LOAD_BUILD_CLASS")
def load_build_class(frame: Frame, instr: Instr, target: int) -> None:
    raise unsupported(
        "unsupported-op", "a class is defined", cure="define the class outside the compiled function"
    )


for _name, _n, _compute in (
    ("COPY", 0, lambda frame, instr: frame.stack[-instr.arg]),
    ("LOAD_CLOSURE", 0, lambda frame, instr: frame.fast[instr.arg]),
    ("LOAD_DEREF", 0, lambda frame, instr: _contents(frame, instr)),
    ("LOAD_COMMON_CONSTANT", 0, lambda frame, instr: frame.trace.make(instr.argval)),
    ("STORE_DEREF", 1, lambda frame, instr, x: frame.fast[instr.arg].store(frame.trace, x)),
    (
        "STORE_GLOBAL",
        1,
        lambda frame, instr, x: frame.func.globals.store(
            frame.trace, instr.argval, Constant(instr.argval), x
        ),
    ),
    ("LOAD_ATTR", 1, lambda frame, instr, x: x.getattr(frame.trace, instr.argval)),
    ("STORE_ATTR", 2, lambda frame, instr, x, obj: obj.setattr(frame.trace, instr.argval, x)),
    ("DELETE_ATTR", 1, lambda frame, instr, obj: obj.delattr(frame.trace, instr.argval)),
    ("BINARY_SUBSCR", 2, lambda frame, instr, obj, key: obj.getitem(frame.trace, key)),
    ("STORE_SUBSCR", 3, lambda frame, instr, x, obj, key: obj.setitem(frame.trace, key, x)),
    ("DELETE_SUBSCR", 2, lambda frame, instr, obj, key: obj.delitem(frame.trace, key)),
    ("BUILD_SLICE", None, lambda frame, instr, *parts: make_slice(parts)),
    ("BINARY_SLICE", 3, lambda frame, instr, obj, *ends: obj.getitem(frame.trace, make_slice(ends))),
    ("STORE_SLICE", 4, lambda frame, instr, x, obj, *ends: obj.setitem(frame.trace, make_slice(ends), x)),
    ("BUILD_TUPLE", None, lambda frame, instr, *items: TupleValue(items)),
    ("BUILD_LIST", None, lambda frame, instr, *items: ListValue(items)),
    ("LIST_APPEND", 1, lambda frame, instr, x: frame.stack[-1 - instr.arg].mutate(frame.trace).append(x)),
    ("SET_ADD", 1, lambda frame, instr, x: frame.stack[-1 - instr.arg].change(frame.trace, "add", x)),
    ("SET_UPDATE", 1, lambda frame, instr, x: frame.stack[-1 - instr.arg].change(frame.trace, "update", x)),
    ("MAP_ADD", 2, lambda frame, instr, key, x: frame.stack[-2 - instr.arg].setitem(frame.trace, key, x)),
    ("BUILD_SET", None, lambda frame, instr, *items: SetValue.of(frame.trace, list(items))),
    (
        "CONVERT_VALUE",
        1,
        lambda frame, instr, x: frame.trace.call(frame.trace.make(_CONVERSIONS[instr.arg]), [x]),
    ),
    ("FORMAT_SIMPLE", 1, lambda frame, instr, x: _formatted(frame, x, Constant(""))),
    ("FORMAT_WITH_SPEC", 2, lambda frame, instr, x, spec: _formatted(frame, x, spec)),
    ("LIST_TO_TUPLE", 1, lambda frame, instr, x: TupleValue(x.items)),
    ("BUILD_STRING", None, lambda frame, instr, *parts: joined(parts)),
    (
        "BUILD_TEMPLATE",
        2,
        lambda frame, instr, *parts: TemplateValue([TupleValue(part.unpack(frame.trace)) for part in parts]),
    ),
):
    opcodes.add(_name, replace(_n, _compute))
