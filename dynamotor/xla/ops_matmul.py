"""Matrix products. Low precision accumulates in float32 and rounds once; integers wrap as aten's do.

>>> torch.ops.aten.addmm.default(bias, x, weight.t())  # one dot and one add
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dtypes import LOW_PRECISION
from .lowering import aten, op, rows
from .numerics import contract, matmul_precision, rounded, wide


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.matmul` with float32 accumulation: float16 and bfloat16 give float32 (the caller rounds once),
    other types stay.
    """
    return contract(jnp.matmul, x, y)


def _plus(base: jax.Array, beta: float, alpha: float, value: jax.Array) -> jax.Array:
    """beta * base + alpha * value; with beta = 0 the base is not read (its NaN does not spread), as in
    aten.
    """
    if alpha != 1:
        value = _scaled(value, alpha)
    if beta == 0:
        return value
    base = wide(base)
    return value + (base if beta == 1 else _scaled(base, beta))


def _scaled(value: jax.Array, factor: float) -> jax.Array:
    return value * jnp.asarray(factor, value.dtype) if value.dtype != jnp.bool_ else value & bool(factor)


rows(
    op,
    {
        (aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul): lambda x, y, out_dtype=None: product(x, y),
        (aten.addmm, aten.addmv, aten.baddbmm): lambda base, x, y, out_dtype=None, *, beta=1, alpha=1: _plus(
            base, beta, alpha, product(x, y)
        ),
        aten._int_mm: lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.int32),
    },
)


@op(aten.addbmm)
def _addbmm(base, x, y, *, beta=1, alpha=1):
    batch, rows, inner = x.shape
    if x.dtype in LOW_PRECISION:  # aten rounds after each product
        for left, right in zip(x, y):
            base, beta = rounded(_plus(base, beta, alpha, product(left, right)), x.dtype), 1
        return base if batch else _plus(base, beta, 1, jnp.zeros((rows, y.shape[2]), jnp.float32))
    side_by_side = x.transpose(1, 0, 2).reshape(rows, batch * inner)
    return _plus(base, beta, alpha, product(side_by_side, y.reshape(batch * inner, y.shape[2])))


@op(aten.linear)
def _linear(x, weight, bias=None):
    result = product(x, weight.T)
    return result if bias is None else result + wide(bias)


@op(aten._trilinear)
def _trilinear(x1, x2, x3, expand1, expand2, expand3, sumdim, unroll_dim=1):
    """The sum over `sumdim` of the product of three tensors, each unsqueezed at its `expand` dimensions."""
    letters = "abcdefghijklmnopqrstuvwxyz"[: x1.ndim + len(expand1)]
    terms = [
        "".join(c for i, c in enumerate(letters) if i not in expand) for expand in (expand1, expand2, expand3)
    ]
    result = "".join(c for i, c in enumerate(letters) if i not in sumdim)
    factors = [wide(x) for x in (x1, x2, x3)]
    return jnp.einsum(f"{','.join(terms)}->{result}", *factors, precision=matmul_precision(factors[0].dtype))
