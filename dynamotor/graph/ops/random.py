"""Random numbers and dropout."""

from __future__ import annotations

from typing import Any

import torch

from ...base.compat import OpOverload
from ...base.config import config
from ..bucket_padding import (
    Call,
    CannotPad,
    Padded,
)
from ..kernel_checks import (
    argument_names,
    ask_nothing,
)
from ..layouts import (
    dense,
    dense_as,
    in_row_major,
    with_stride,
)
from ..op_definition import (
    PASS,
    broadcast,
    define,
    layout,
    padding,
    question,
    shape_of_argument,
)
from ..spec import TensorSpec, aten

define(aten.native_dropout_backward.default, aten.bernoulli.p, shape=shape_of_argument(0))


@layout(aten.native_dropout.default, shape=shape_of_argument(0))
def _dropout_layout(x: TensorSpec, p: float, train: bool | None) -> Any:
    if not train or not 0 < p < 1 or not x.is_contiguous or not x.dtype.is_floating_point:
        return PASS
    return dense(x.shape, x), TensorSpec.dense(x.shape, torch.bool, x.device)


@padding(aten.native_dropout.default)
def _dropout_padding(call: Call) -> Padded:
    """Each element by itself; another shape draws other numbers."""
    CannotPad.when(config.fallback_random, "random numbers that are to be those of each size")
    return call.emit((call.axes(0), call.axes(0)))


define(
    aten.normal.Tensor_Tensor,
    requires=lambda mean, deviation, **kwargs: broadcast([mean.shape, deviation.shape]),
)
define(
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.poisson.default,
    layout=with_stride(in_row_major),
)
# Without a meta kernel.
define(
    aten.binomial.default,
    aten._standard_gamma_grad.default,
    aten._sample_dirichlet.default,
    layout=dense_as(0),
)
# The functional forms of draws into a tensor.
question(
    *(
        "uniform",
        "normal_functional",
        "bernoulli",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
        "random",
    )
)(ask_nothing)


@question("randint")
def _ask_bounds(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`randint` leaves the check of its bounds to `random_`."""
    named = dict(zip(argument_names(func), args)) | kwargs
    whole = torch.empty(0, dtype=named.get("dtype") or torch.int64, device="cpu")
    ask_nothing(getattr(aten.random_, "from"), (whole, named.get("low", 0), named["high"]), {})
