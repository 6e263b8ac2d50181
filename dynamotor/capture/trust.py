"""What is taken as constant, so that no guard is spent on it: the names and functions of libraries' modules.

>>> trusted_module("torch.nn.functional"), is_rebound(vars(torch.backends.mha), "_is_fastpath_enabled")
(True, True)
"""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

# Libraries whose module globals and functions are taken as constants: replacing torch.nn.functional.relu or
# contextlib.suppress after a compile is not seen; everything that hangs on users' objects and classes is.
_TRUSTED_ROOTS = frozenset(sys.stdlib_module_names) - {"__main__", "test", "this"} | {
    "torch",
    "numpy",
    "dynamotor",
}


def trusted_module(name: Any) -> bool:
    """Whether the module of this name is taken as constant."""
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED_ROOTS


_rebound: dict[int, tuple[Any, frozenset[str]]] = {}  # by the id of a module's dict, which is kept


def is_rebound(namespace: dict[str, Any], name: Any) -> bool:
    """Whether a function of a library's module gives the name another value (`global name`): it is state, not
    a constant.
    """
    found = _rebound.get(id(namespace))
    if found is None:
        names: set[str] = set()
        for value in list(namespace.values()):
            members = vars(value).values() if issubclass(type(value), type) else (value,)
            for member in members:
                if type(member) is types.FunctionType and member.__globals__ is namespace:
                    _add_rebound(member.__code__, names)
        found = _rebound[id(namespace)] = namespace, frozenset(names)
    return name in found[1]


def _add_rebound(code: types.CodeType, names: set[str]) -> None:
    if _STORE_GLOBAL in code.co_code[::2]:
        names.update(i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL")
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            _add_rebound(const, names)


_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
