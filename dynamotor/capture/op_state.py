"""Python state behind registered operators: an operator written in Python may read or change objects that the trace
has read, or has changed without having written the change yet.

A graph runs such a call before the effects of its trace are replayed, and after every read of its trace. So

* an operator that changes outside objects breaks the graph: it runs natively, between two graphs;
* one that reads outside objects breaks the graph if a change is pending.

Functions under `functools.lru_cache` are called while the graph is captured, and are refused for the same reasons.
The code of `torch.library.custom_op` functions is scanned, with the functions that it calls, as far as names lead. An
implementation that cannot be found (`Library.impl`) is taken for one that reads. Operators written in C++ do neither.
"""

from __future__ import annotations

import enum
import functools
import itertools
import random
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base import compat
from ..base.compat import OpOverload, OpOverloadPacket
from ..graph.op_facts import facts, is_custom
from .breaks import unsupported_if
from .code_names import cells_of, led_to, names_of
from .source import trusted_module
from .values.base import Trace
from .values.constant import PURE_TYPES
from .values.function import CellValue
from .values.tensor import writes_inputs


class Access(enum.IntEnum):
    """The effects of a call on Python objects that are not its arguments."""

    NONE = 0
    READS_NAMES = 1  # globals and closure variables whose values cannot change
    READS = 2
    CHANGES = 3


# Methods that change their object, of containers, queues, context variables, files and tensors.
_METHODS = """
    append appendleft extend insert remove pop popleft popitem clear add discard update setdefault sort reverse set put
    put_nowait send write copy_ fill_ zero_ add_ mul_ sub_ div_
"""
_CHANGING_NAMES = frozenset(_METHODS.split())
_STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"))
_SHADOW_KEYS = ("Meta", "Functionalize", "FuncTorchBatched", "ADInplaceOrView")


def check_op(trace: Trace, target: Any) -> None:
    """Break the graph before a call of an operator that could see, or make, a change which the graph does at another
    time.
    """
    target = op_of_others(target)
    if target is None:
        return
    access = access_of(target)
    unsupported_if(
        access is Access.CHANGES,
        "side-effect",
        f"the operator {target} changes Python objects",
        "a graph calls it after everything that the function reads",
        "pass the state as a tensor argument (mutates_args), or accept the break",
    )
    unsupported_if(
        any(key.startswith("CompositeImplicit") for key in _python_kernels(target)),
        "side-effect",
        f"the operator {target} is composite and written in Python",
        "its code would run once more while the graph is made, with the effects that it may have",
        "make it a torch.library.custom_op, or accept the break",
    )
    pending = access > Access.NONE and _is_pending(trace, access)
    _refuse_pending(f"the operator {target}", pending or access is Access.READS and writes_inputs(trace))


def check_functions(trace: Trace, name: str, *fns: Any) -> None:
    """Break the graph before a call whose Python (`fns`) the graph runs again, if it may read a pending change. Tensors
    it gets as arguments alone.
    """
    access = max(_Scan().function(fn, ()) for fn in fns)
    _refuse_pending(name, access > Access.NONE and _is_pending(trace, access))


def check_cached(trace: Trace, fn: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Break the graph before a call of a function with a cache, which the capture and its guards make for real: the
    function must change nothing, and read nothing that has a pending change. `given`: objects among its arguments.
    """
    access = _Scan().function(fn, given)
    name = f"{fn.__qualname__}, which has a cache (functools.lru_cache),"
    unsupported_if(
        access is Access.CHANGES,
        "side-effect",
        f"{name} changes Python objects",
        "its cache is asked ahead of the changes that the function makes before the call",
        "call it outside the compiled function",
    )
    pending = access > Access.NONE and _is_pending(trace, access)
    _refuse_pending(name, pending or access is Access.READS and writes_inputs(trace))


def reads_late(*fns: Any) -> str:
    """Why functions that run later (in a backward) may find something else then than now: their reads, in words;
    empty where they depend on their arguments alone.
    """
    scan = _Scan()
    access = max((scan.function(fn, ()) for fn in fns), default=Access.NONE)
    if access is Access.NONE:
        return f"asks PyTorch or the system for {scan.asked}" if scan.asked else ""
    return _LATE[access]


def held_by(fn: Callable[..., Any]) -> list[Any]:
    """The values that a function reads by names, and those that it calls, but for code; PyTorch's states too, as
    objects that no guard follows."""
    scan = _Scan()
    scan.function(fn, ())
    return [*scan.held, *([object()] if scan.asked else [])]


def called_by(*fns: Any) -> Iterator[tuple[types.FunctionType, dict[str, Any] | types.CellType | None, str]]:
    """The program's functions that functions reach by names, these themselves included: each with the globals or the
    cell that lead to it, and its name there."""
    todo, seen = [getattr(fn, "__func__", fn) for fn in fns], set()
    while todo:
        fn = todo.pop()
        module = getattr(fn, "__globals__", {}).get("__name__")
        if not isinstance(fn, types.FunctionType) or id(fn) in seen or trusted_module(module):
            continue
        seen.add(id(fn))
        yield fn, None, ""
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or ()))
        for name in {names[0] for names in names_of(fn.__code__).loaded}:
            value = next(_values(fn, (name,)), None)
            if isinstance(value, types.FunctionType) and not trusted_module(
                value.__globals__.get("__name__")
            ):
                yield value, cells.get(name, fn.__globals__), name
                todo.append(value)


def reaches(roots: Iterable[Any], uses: Callable[[set[str]], bool]) -> bool:
    """Whether one of these values, or a function that they lead to by names, items and submodules, uses such names."""
    todo, seen = list(roots), {}
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # held, so that no other object gets its id
        if isinstance(value, types.BuiltinFunctionType) and uses({value.__name__}):
            return True
        if not isinstance(value, types.FunctionType):
            todo += _inside(value)
            continue
        names = names_of(value.__code__)
        if uses({*names.attributes, *itertools.chain(*names.loaded)}):
            return True
        if not trusted_module(value.__globals__.get("__name__")):
            found = [v for loaded in names.loaded for v in _values(value, loaded)]
            todo += found + [f for v in found for f in _functions(v, names.attributes)]
    return False


_DATA = frozenset((int, float, complex, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter))


def _inside(value: Any) -> Iterable[Any]:
    """The callables in a container, or those that a call of the value calls."""
    if isinstance(value, dict | tuple | list):
        items = value.values() if isinstance(value, dict) else value
        return () if _DATA.issuperset(map(type, items)) else items  # long lists of numbers cost little
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, torch.nn.Module) and "_modules" in value.__dict__:
        return [value.__dict__.get("forward", type(value).forward), *value._modules.values()]
    return ()


_LATE = {
    Access.READS_NAMES: "reads a global name or a closure variable that may be set again",
    Access.READS: "reads an object that may change",
    Access.CHANGES: "changes an object",
}


# Operators in Python of PyTorch itself and of this package: they read their arguments alone.
_READ_ARGUMENTS = frozenset(
    ("dynamotor", "dynamotor_xla", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
    + ("_dtensor", "symm_mem", "quantized", "quantized_decomposed", "profiler", "rngprims", "streams")
    + ("torchvision", "torchao")
)


def op_of_others(target: Any) -> OpOverload | None:
    """The overload that a call means, where it is an operator of the program or of another library."""
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target if is_custom(target) and target.namespace not in _READ_ARGUMENTS else None


def formulas_of(target: Any) -> list[Any]:
    """The functions that `register_autograd` gave an operator."""
    target = op_of_others(target)
    definition = None if target is None else compat.custom_op_definitions.get(target._schema.name)
    found = () if definition is None else (definition._backward_fn, definition._setup_context_fn)
    return [function for function in found if function is not None]


def late_python(target: Any) -> str:
    """Why a call of an operator must be made by PyTorch each time: its Python runs while a graph is recorded (an
    implementation as a composite op, a formula of its gradient) and may read something else later.
    """
    target = op_of_others(target)
    if target is None:
        return ""
    name = target._schema.name
    definition = compat.custom_op_definitions.get(name)
    if definition is not None:
        if not torch.is_grad_enabled():
            return ""
        if why := reads_late(*formulas_of(target)):
            return f"the gradient of {target} {why}"
        plain = not facts(target).writes and {str(one.type) for one in target._schema.returns} == {"Tensor"}
        again = "" if plain else differs_when_repeated(target)
        return f"{target} gives more than tensors and may not be called again" if again else ""
    for key in _python_kernels(target):
        if key.startswith("CompositeImplicit"):
            return f"{target} is a composite op written in Python, which may read objects"
        if key.startswith("Autograd") and torch.is_grad_enabled():
            return f"the gradient of {target} is written in Python, which may read objects"
    return ""


def differs_when_repeated(target: Any) -> bool:
    """Whether a second call of an operator with the same arguments may give something else, or be noticed: its Python
    reads objects, draws random numbers or writes messages."""
    target = op_of_others(target)
    if target is None:
        return False
    definition = compat.custom_op_definitions.get(target._schema.name)
    if definition is None:
        return access_of(target) is not Access.NONE
    scan = _Scan()
    access = max(scan.function(fn, ()) for fn in _implementations(definition))
    return access is not Access.NONE or scan.has_effect or bool(scan.asked)


def _python_kernels(target: OpOverload) -> list[str]:
    """The dispatch keys for which `Library.impl` gave an operator an implementation."""
    overload = target._schema.overload_name
    name = target._schema.name.partition("::")[2] + (f".{overload}" if overload else "")
    key = "/".join((target.namespace, name, ""))
    return [k.removeprefix(key) for k in compat.registered_kernels if k.startswith(key)]


def _refuse_pending(name: str, pending: bool) -> None:
    unsupported_if(
        pending,
        "side-effect",
        f"{name} may read Python objects that were changed before",
        "a graph calls it before changes of objects are written",
        "pass the value that it reads as an argument, or accept the break",
    )


def _is_pending(trace: Trace, access: Access) -> bool:
    """Whether a change of Python objects that such a call could see is not written yet."""
    if access is Access.READS_NAMES:
        return any(type(v) is CellValue or _is_namespace(v) for v in trace.effects.touched)
    return trace.effects.changes_objects or bool(trace.effects.calls)


def _is_namespace(value: Any) -> bool:
    obj = getattr(value, "obj", None)
    return type(obj) is dict and "__name__" in obj


def access_of(target: OpOverload) -> Access:
    """The effects of an operator's implementations on Python objects."""
    name = target._schema.name
    definition = compat.custom_op_definitions.get(name)
    if definition is not None:
        return max(_Scan().function(fn, ()) for fn in _implementations(definition))
    found = any(not k.startswith(("Autograd", *_SHADOW_KEYS)) for k in _python_kernels(target))
    return Access.READS if found else Access.NONE


def _implementations(definition: Any) -> list[Any]:
    return [definition._init_fn, *definition._backend_fns.values()]


class _Scan:
    """A walk over the functions that a function reaches by names."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, bool]] = set()
        self.held: list[Any] = []  # values of names
        self.asked = ""  # a state of PyTorch or the system that was asked for
        self.has_effect = False  # outside of Python's objects: a message, a random number

    def function(self, fn: Callable[..., Any], given: tuple[Any, ...]) -> Access:
        """`given`: outside objects that its arguments may be."""
        fn = getattr(fn, "__func__", fn)
        if not isinstance(fn, types.FunctionType):
            return Access.NONE
        if trusted_module(fn.__globals__.get("__name__")):  # a wrapper of torch's, of the program's function
            inner = cells_of(fn).values()
            return max((self.function(f, ()) for f in inner if callable(f)), default=Access.NONE)
        if (id(fn), bool(given)) in self.seen:
            return Access.NONE
        self.seen.add((id(fn), bool(given)))
        opcodes, loaded, attributes, rebound, imported = names_of(fn.__code__)
        if rebound:
            return Access.CHANGES
        found = [v for names in loaded for v in _values(fn, names)]
        asked = (names[-1] for names in loaded if any(_asks(names, v) for v in _values(fn, names)))
        self.asked = self.asked or next(asked, "")
        held = [v for v in found if not _is_code(v)]
        self.held += held
        objects = [*(v for v in held if type(v) not in PURE_TYPES), *given]
        if objects and (opcodes & _STORES or attributes & _CHANGING_NAMES or _are_stepped(objects)):
            return Access.CHANGES
        called = [f for v in found for f in _functions(v, attributes)]
        called += [f for v in given for f in _functions(v, attributes)]
        shows = any(_shows(fn, names) for names in loaded)
        draws = any(map(_draws, found)) or not _RANDOM.isdisjoint(imported)
        self.has_effect |= shows or draws
        unknown = any(_is_namespace_call(fn, names) for names in loaded) or any(map(_may_change, imported))
        access = Access.READS if objects or shows or unknown else Access.READS_NAMES if held else Access.NONE
        return max([access, *(self.function(f, tuple(objects)) for f in called)])


# Functions whose answer is a state: PyTorch's settings, modes and generators, the time, the system.
_ASKING = re.compile(
    r"(is|are|get)_.*(enabled|mode|default|threads|precision|dtype|device|level|state|stream|seed|warn).*|.*seed.*"
)
_SYSTEM = frozenset(
    ("random", "time", "os", "sys", "datetime", "secrets", "uuid", "gc", "threading", "socket")
)


_RANDOM = frozenset(("random", "secrets", "numpy.random", "numpy.random.mtrand", "numpy.random._generator"))
_NAMESPACES = frozenset(("globals", "locals", "vars", "eval", "exec", "__import__"))  # builtins


def _is_namespace_call(fn: types.FunctionType, names: tuple[str, ...]) -> bool:
    return names[0] in _NAMESPACES and names[0] not in fn.__globals__


def _may_change(module: str) -> bool:
    """Whether names of a module that is imported at each call may change: one of the program's, or of the system."""
    return module.partition(".")[0] in _SYSTEM or not trusted_module(module)


def _asks(names: tuple[str, ...], value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    owner = getattr(value, "__self__", None)
    if module in _SYSTEM or isinstance(owner, random.Random) or "backends" in names:
        return True
    return (module or "").startswith("torch") and _ASKING.fullmatch(names[-1]) is not None


def _draws(value: Any) -> bool:
    """Whether a name leads to a generator of random numbers or to a function of one, but for PyTorch's own: a second
    derivative sets these to where the forward drew."""
    owner = getattr(value, "__self__", value)
    if isinstance(owner, torch.Generator | random.Random):
        return True
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return module in _RANDOM or type(owner).__module__ in _RANDOM


def _shows(fn: types.FunctionType, names: tuple[str, ...]) -> bool:
    """Whether a name leads to a function that writes a message: its place among pending messages can be seen."""
    if names[0] == "print":
        return "print" not in fn.__globals__
    modules = {getattr(v, "__module__", None) or getattr(v, "__name__", "") for v in _values(fn, names)}
    return not modules.isdisjoint(("warnings", "_warnings", "logging"))


def _values(fn: types.FunctionType, names: tuple[str, ...]) -> Iterator[Any]:
    """The present value of a global or closure name; of modules, the value at the end of the attributes."""
    value = led_to(names, (cells_of(fn), fn.__globals__))
    if value is not None:  # else a builtin, or a name that is set later
        yield value


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


_BOUND = (types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)
_LEADS_ON = (
    weakref.ReferenceType,
    functools.partial,
    torch.nn.Module,
)  # callable, and hold objects that may change


def _is_code(value: Any) -> bool:
    """Whether it is called rather than read: a module, a function, an operator, a library's class."""
    if isinstance(value, types.ModuleType | types.FunctionType):
        return True
    if isinstance(value, _BOUND):
        return value.__self__ is None or _is_code(value.__self__)
    if isinstance(value, _LEADS_ON):
        return False
    if isinstance(
        value, OpOverload | OpOverloadPacket | compat.OpNamespace | compat.Ops | compat.CustomOpDef
    ):
        return True
    cls = value if isinstance(value, type) else type(value)
    module = cls.__module__
    if module == "builtins" and cls.__flags__ & _HEAP_TYPE:  # of a program that `exec` runs without a name
        return False
    return callable(value) and (trusted_module(module) or module.startswith("triton."))


def _are_stepped(objects: list[Any]) -> bool:
    """Whether one is an iterator, which `next` or a loop changes."""
    return any(hasattr(type(v), "__next__") for v in objects)


def _functions(value: Any, attributes: frozenset[str]) -> Iterator[Any]:
    """The Python functions that a use of the value may call."""
    if isinstance(value, compat.CustomOpDef):
        yield value._init_fn
        return
    if isinstance(value, types.FunctionType):
        yield value
        return
    cls = value if isinstance(value, type) else type(value)
    if _is_code(value) or trusted_module(cls.__module__):
        inner = next(
            filter(None, (getattr(value, n, None) for n in ("__wrapped__", "func", "__func__"))), None
        )
        if isinstance(inner, types.FunctionType | types.MethodType):
            yield inner
        return
    for name in (*attributes, "__call__", "__getitem__", "__getattr__", "__enter__", "__exit__", "__iadd__"):
        found = getattr(cls, name, None)
        found = found.fget if isinstance(found, property) else found
        if isinstance(found, types.FunctionType | types.MethodType):
            yield found
