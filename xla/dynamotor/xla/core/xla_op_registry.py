"""Operations written as functions of values by XLA's names; see xla_builder.

>>> def slice_and_add(a, b, dimno=0): return a.slice_in_dim(0, 1, dimno) + b.slice_in_dim(1, 2, dimno)
>>> SLICE_AND_ADD = register("slice_and_add", slice_and_add)
>>> SLICE_AND_ADD(x, y, dimno=1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..jax_call import call_jax
from .xla_builder import Op as Value, plain_value


class Op:
    """An operation on xla tensors: `opfn(*values, **kwargs)`, differentiable; `kwargs` are plain and
    hashable.
    """

    def __init__(self, name: str, opfn: Callable[..., Any]) -> None:
        self.name = name

        def function(*arrays: Any, **kwargs: Any) -> Any:
            return plain_value(opfn(*map(Value, arrays), **kwargs))

        self._function = function

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        return call_jax(self._function, args, kwargs)


def register(name: str, opfn: Callable[..., Any]) -> Op:
    """The operation `opfn`, a function of `xla_builder.Op` values and plain keywords, to be called with
    tensors.
    """
    return Op(name, opfn)
