"""Register the costly checks and Triton's interpreter with the compiler: `import bench.verification`.

The modules are imported at their first use: the interpreter needs Triton.
"""

from __future__ import annotations

import importlib
from typing import Any

from dynamotor.base.development import functions

FUNCTIONS = {
    "verify_schedule": "proofs",
    "verify_loops": "proofs",
    "make_interpreted": "triton_interpret",
    "by_alignment": "triton_interpret",
}


def _register(name: str, module: str) -> None:
    @functions.register(name)
    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"bench.{module}"), name)(*args)


for _name, _module in FUNCTIONS.items():
    _register(_name, _module)
