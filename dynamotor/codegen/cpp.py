"""C++ for fused loop kernels: one function a kernel, one self-contained translation unit a graph.

>>> unit = emit_unit([emit_kernel(step.kernel) for step in loop_steps])   # text; build it with FLAGS
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Flags that the text is written for; the runtime adds the user's `config.cxx_flags`.
FLAGS: tuple[str, ...] = ("-O2", "-fno-math-errno", "-fno-trapping-math", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")


@dataclass(frozen=True, slots=True)
class CFunction:
    """One C function `extern "C" void name(void** ptrs, const int64_t* ints)`.

    name: derived from the structure, so that equal kernels share one function. params: C element types, one a pointer.
    """

    name: str
    source: str
    params: tuple[str, ...]


def emit_kernel(kernel) -> CFunction:
    """The C function of a `lower.ir.Kernel`; equal structures give the same function (memo)."""
    raise NotImplementedError


def emit_unit(functions: Iterable[CFunction]) -> str:
    """One translation unit: the prelude, then each distinct function once."""
    raise NotImplementedError
