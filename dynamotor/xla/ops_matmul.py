"""Matrix products. Low precision accumulates in float32 and rounds once; integers wrap as aten's do. Scaled
dot product attention in aten's CPU form, which composites.py calls: (output, log of the sum of exponentials
of each row).

>>> torch.ops.aten.addmm.default(bias, x, weight.t())  # one dot and one add
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from .dtypes import LOW_PRECISION, contract, matmul_precision, rounded, wide
from .lowering import aten, op, require, rows


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


# -- attention -----------------------------------------------------------------------------------------------


_SOURCE_MASK, _PADDING_MASK = 0, 1


@op(aten._masked_softmax)
def _masked_softmax(x, mask, dim=None, mask_type=None):
    """True in the mask hides; the mask is (L, L), (B, L) or of x's own shape. Rows that are hidden whole give
    nan.
    """
    x = wide(x)
    if mask_type == _SOURCE_MASK:
        mask = mask.reshape((1,) * (x.ndim - 2) + mask.shape[-2:])
    elif mask_type == _PADDING_MASK:
        mask = mask.reshape(mask.shape[0], *(1,) * (x.ndim - 2), mask.shape[-1])
    return jax.nn.softmax(jnp.where(mask, -jnp.inf, x), -1 if dim is None else dim)


@op(aten._masked_softmax_backward)
def _masked_softmax_backward(grad, output, mask, dim=None):
    grad, output = wide(grad), wide(output)
    dim = -1 if dim is None else dim
    weighted = jnp.where(mask, 0, grad * output)
    return jnp.where(mask, 0, weighted - output * jnp.sum(weighted, axis=dim, keepdims=True))


# -- scaled dot product attention ----------------------------------------------------------------------------


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return contract(partial(jnp.einsum, subscripts), x, y)


def _scores(
    query: jax.Array, key: jax.Array, mask: jax.Array | None, is_causal: bool, scale: float
) -> jax.Array:
    """(B, H, L, S): scaled products, -inf where hidden. A boolean mask shows where it is True, another one is
    added.
    """
    scores = _einsum("bhld,bhsd->bhls", query, key) * scale
    if is_causal:
        shown = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
        scores = jnp.where(shown, scores, -jnp.inf)
    if mask is None:
        return scores
    return jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + wide(mask)


def _scale(query: jax.Array, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _check(dropout_p: float, query: jax.Array, key: jax.Array) -> None:
    require(not dropout_p, "aten's CPU attention has no dropout")
    require(query.shape[1] == key.shape[1], "key and value have fewer heads than query")


@op(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """Rows that see nothing give zero, and 0 as their log-sum."""
    _check(dropout_p, query, key)
    scores = _scores(query, key, attn_mask, is_causal, _scale(query, scale))
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    blind = top == -jnp.inf
    weights = jnp.exp(scores - jnp.where(blind, 0, top))
    total = jnp.where(blind, 1, jnp.sum(weights, axis=-1, keepdims=True))
    output = _einsum("bhls,bhsd->bhld", weights.astype(value.dtype), value) / total
    return output, jnp.where(blind, 0, top + jnp.log(total))[..., 0]


@op(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(
    grad, query, key, value, output, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """The weights are calculated again from the log-sums, as in FlashAttention (Dao et al., 2022)."""
    _check(dropout_p, query, key)
    scale = _scale(query, scale)
    weights = jnp.exp(_scores(query, key, attn_mask, is_causal, scale) - logsumexp[..., None])
    delta = jnp.sum(wide(grad) * wide(output), axis=-1, keepdims=True)
    slope = weights * (_einsum("bhld,bhsd->bhls", grad, value) - delta) * scale
    weights, slope = weights.astype(query.dtype), slope.astype(query.dtype)
    return (
        _einsum("bhls,bhsd->bhld", slope, key),
        _einsum("bhls,bhld->bhsd", slope, query),
        _einsum("bhls,bhld->bhsd", weights, grad),
    )
