"""What is taken as constant: the functions of libraries, and what their modules' names hold (not which object it is).

>>> trusted_module("torch.nn.functional")
True
"""

from __future__ import annotations

import sys
from typing import Any

# Another torch.nn.functional.relu after a compile is seen, another code of that function or another item of a list that
# its module holds is not; everything that hangs on users' objects and classes is.
_TRUSTED_ROOTS = frozenset(sys.stdlib_module_names) - {"__main__", "test", "this"} | {
    "torch",
    "numpy",
    "dynamotor",
}


def trusted_module(name: Any) -> bool:
    """Whether the module of this name is taken as constant."""
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED_ROOTS
