"""PyTorch's databases of operators and modules, read when they are first asked for: three seconds of imports
that other fuzzers, and the collection of tests, do not pay.
"""

from __future__ import annotations

from typing import Any


def operator_infos() -> list[Any]:
    """PyTorch's OpInfo of every operator, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def module_infos() -> list[Any]:
    """PyTorch's ModuleInfo of every module, in its order."""
    from torch.testing._internal.common_modules import module_db

    return module_db
