"""Fourier transforms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..layouts import (
    ask_eager,
)
from ..op_definition import (
    Shape,
    define,
    require,
    shape,
)
from ..spec import TensorSpec, aten

define(aten._fft_c2r.default, aten._fft_r2c.default, aten._fft_c2c.default, layout=ask_eager)


def _transformed(x: TensorSpec, dims: Sequence[int], n: Any) -> Shape:
    """The last of `dims` gets the size n. Kernels order results in memory by the order of the argument's
    strides:
    asking makes that order a guard.
    """
    for a, b in itertools.combinations(x.stride, 2):
        bool(a >= b) and bool(b >= a)
    last = dims[-1] % len(x.shape)
    return (*x.shape[:last], n, *x.shape[last + 1 :])


@shape(aten._fft_c2c.default)
def _c2c_shape(x: TensorSpec, dims: Sequence[int], *args: Any) -> Shape:
    return _transformed(x, dims, x.shape[dims[-1]]) if dims else x.shape


@shape(aten._fft_r2c.default)
def _r2c_shape(x: TensorSpec, dims: Sequence[int], norm: int, onesided: bool) -> Shape:
    n = x.shape[dims[-1]]
    return _transformed(x, dims, n // 2 + 1 if onesided else n)


@shape(aten._fft_c2r.default)
def _c2r_shape(x: TensorSpec, dims: Sequence[int], norm: int, n: Any) -> Shape:
    require(x.shape[dims[-1]] == n // 2 + 1)
    return _transformed(x, dims, n)
