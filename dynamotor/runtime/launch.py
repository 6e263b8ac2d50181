"""Turn the address of a generated C function into a callable that takes tensors.

>>> kernel = make_kernel(library, "k0", 2)
>>> kernel(source, result)  # calls void k0(void** ptrs, const int64_t* ints) with the two data pointers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import _C
from .build import Library

# data_pointers(sequence of tensors) -> tuple of their data pointers
data_pointers = _C.data_ptrs


def make_kernel(library: Library, name: str, n_tensors: int, ints: Sequence[int] = ()) -> Callable[..., None]:
    """A callable of `n_tensors` tensors that runs the library's C function on their data pointers and on
    `ints`.
    """
    return _C.Kernel(library.address(name), n_tensors, tuple(ints), release_gil=True, owner=library)
