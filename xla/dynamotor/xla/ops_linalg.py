"""Products of matrices, attention; decompositions and solvers. Low precision accumulates in float32 and
rounds once. `info` is calculated as LAPACK defines it; `check_errors=True` runs on the CPU.

In some releases and ops aten factors the transpose of a real matrix, and its gradients count on that: aten is
asked once.

>>> torch.linalg.solve(a, b)
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import torch

from .dtypes import LOW_PRECISION, contract, is_complex, jax_dtype, matmul_precision, on_cpu, rounded, wide
from .lowering import aten, op, require, rows
from .promotion import cast

_AT_ONCE, _PIVOTS = "errors are checked at once, which needs the data", "XLA has no LU without pivots"


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(_transposed(x))


def _broadcast_batch(*matrices: jax.Array) -> list[jax.Array]:
    batch = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return [jnp.broadcast_to(m, batch + m.shape[-2:]) for m in matrices]


def _empty(dtype=jnp.float32) -> jax.Array:
    return jnp.zeros((0,), dtype)


# -- triangular and Cholesky ---------------------------------------------------------------------------------


def _solve_triangular(
    a, b, *, upper: bool, left=True, unit=False, adjoint=False, transpose=False
) -> jax.Array:
    """X of A X = B (`left`) or X A = B, batches broadcast."""
    a, b = _broadcast_batch(a, b)
    return jax.lax.linalg.triangular_solve(
        a,
        b,
        left_side=left,
        lower=not upper,
        transpose_a=adjoint or transpose,
        conjugate_a=adjoint,
        unit_diagonal=unit,
    )


@op(aten.triangular_solve)
def _triangular_solve(b, a, upper=True, transpose=False, unitriangular=False):
    a, b = _broadcast_batch(a, b)
    return _solve_triangular(a, b, upper=upper, transpose=transpose, unit=unitriangular), a


def _cholesky(a: jax.Array, upper: bool) -> jax.Array:
    """The factor from the triangle that aten reads; NaN where A is not positive definite."""
    lower = jnp.tril(_adjoint(a) if upper else a)
    return jax.lax.linalg.cholesky(lower, symmetrize_input=False)


def _bad_minor(a: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    """LAPACK's info: 0, or the order of the first leading minor that is not positive definite."""
    size, batch = a.shape[-1], a.shape[:-2]
    eye = jnp.eye(size, dtype=a.dtype)

    def search(_):  # runs only after a failure
        def step(order, info):
            inside = jnp.arange(size) < order
            leading = jnp.where(inside[:, None] & inside[None, :], a, eye)
            failed = jnp.isnan(_cholesky(leading, upper)).any((-1, -2))
            return jnp.where((info == 0) & failed, order, info).astype(jnp.int32)

        return jax.lax.fori_loop(1, size + 1, step, jnp.zeros(batch, jnp.int32))

    return jax.lax.cond(jnp.isnan(factor).any(), search, lambda _: jnp.zeros(batch, jnp.int32), None)


@op(aten.linalg_cholesky_ex)
def _cholesky_ex(a, *, upper=False, check_errors=False):
    require(not check_errors, _AT_ONCE)
    factor = _cholesky(a, upper)
    return _adjoint(factor) if upper else factor, _bad_minor(a, factor, upper)


@op(aten._cholesky_solve_helper, aten.cholesky_solve)
def _cholesky_solve(b, factor, upper=False):
    b, factor = _broadcast_batch(b, factor)
    half = _solve_triangular(factor, b, upper=upper, adjoint=upper)
    return _solve_triangular(factor, half, upper=upper, adjoint=not upper)


@op(aten.cholesky_inverse)
def _cholesky_inverse(factor, upper=False):
    eye = jnp.eye(factor.shape[-1], dtype=factor.dtype)
    return _cholesky_solve(eye, jnp.triu(factor) if upper else jnp.tril(factor), upper)


# -- LU ------------------------------------------------------------------------------------------------------


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(LU, pivots, info): pivots from 1; info is the first zero on U's diagonal, counted from 1, or 0."""
    factors, pivots, _ = jax.lax.linalg.lu(a)
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    first = jnp.argmax(zero, axis=-1) + 1 if zero.shape[-1] else jnp.zeros(a.shape[:-2], int)
    return factors, (pivots + 1).astype(jnp.int32), jnp.where(zero.any(-1), first, 0).astype(jnp.int32)


def _permutation_matrix(pivots: jax.Array, size: int, dtype) -> jax.Array:
    """P of A = P L U: row r of the permuted matrix is row `permutation[r]` of A."""
    permutation = jax.lax.linalg.lu_pivots_to_permutation((pivots - 1).astype(jnp.int32), size)
    return jax.nn.one_hot(permutation, size, dtype=dtype, axis=-2)


def _lu_solve(factors: jax.Array, pivots: jax.Array, b: jax.Array, left: bool, adjoint: bool) -> jax.Array:
    """Solve A X = B, X A = B, or the same with A's adjoint, from A = P L U."""
    if not left:  # X A = B is A^H X^H = B^H
        return _adjoint(_lu_solve(factors, pivots, _adjoint(b), True, not adjoint))
    factors, b = _broadcast_batch(factors, b)
    pivots = jnp.broadcast_to(pivots - 1, factors.shape[:-1])
    return jsl.lu_solve((factors, pivots), b, trans=2 if adjoint else 0)


@op(aten.linalg_lu_factor_ex)
def _lu_factor_ex(a, *, pivot=True, check_errors=False):
    require(not check_errors, _AT_ONCE)
    require(pivot, _PIVOTS)
    return _lu(a)


def _unpacked(factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """L (m, k) with ones on its diagonal and U (k, n), k = min(m, n)."""
    rows, columns = factors.shape[-2:]
    size = min(rows, columns)
    lower = jnp.tril(factors[..., :, :size], -1) + jnp.eye(rows, size, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :size, :])


@op(aten.linalg_lu)
def _linalg_lu(a, *, pivot=True):
    require(pivot, _PIVOTS)
    factors, pivots, _ = _lu(a)
    return _permutation_matrix(pivots, a.shape[-2], a.dtype), *_unpacked(factors)


@op(aten.lu_unpack)
def _lu_unpack(factors, pivots, unpack_data=True, unpack_pivots=True):
    matrix = _permutation_matrix(pivots, factors.shape[-2], factors.dtype) if unpack_pivots else _empty()
    return matrix, *(_unpacked(factors) if unpack_data else (_empty(), _empty()))


def _factors_transpose(factors: torch.Tensor) -> bool:
    """Whether these factors of [[1, 2], [3, 4]] are those of its transpose."""
    return factors[0, 0].item() == 2


_SAMPLE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
_SOLVE_TRANSPOSES = _factors_transpose(aten._linalg_solve_ex(_SAMPLE, _SAMPLE)[1])
_DET_TRANSPOSES = _factors_transpose(aten._linalg_det(_SAMPLE)[1])


def _factored(a: jax.Array, transposes: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """LU of what aten factors: a complex matrix itself, a real one or its transpose."""
    return _lu(_transposed(a) if transposes and not is_complex(a.dtype) else a)


@op(aten._linalg_solve_ex)
def _solve_ex(a, b, *, left=True, check_errors=False):
    require(not check_errors, _AT_ONCE)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    factors, pivots, info = _factored(a, _SOLVE_TRANSPOSES)
    columns = b[..., None] if vector else b
    result = _lu_solve(factors, pivots, columns, left, _SOLVE_TRANSPOSES and not is_complex(a.dtype))
    return (result[..., 0] if vector else result), factors, pivots, info


@op(aten.linalg_inv_ex)
def _inv_ex(a, *, check_errors=False):
    require(not check_errors, _AT_ONCE)
    factors, pivots, info = _lu(a)
    return _lu_solve(factors, pivots, jnp.eye(a.shape[-1], dtype=a.dtype), True, False), info


def _sign_of_pivots(pivots: jax.Array) -> jax.Array:
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), axis=-1)
    return 1 - 2 * (swaps % 2)


@op(aten._linalg_det)
def _det(a):
    factors, pivots, _ = _factored(a, _DET_TRANSPOSES)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    return _sign_of_pivots(pivots).astype(a.dtype) * jnp.prod(diagonal, axis=-1), factors, pivots


@op(aten._linalg_slogdet)
def _slogdet(a):
    factors, pivots, _ = _factored(a, _DET_TRANSPOSES)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    units = diagonal / jnp.where(size == 0, 1, size)
    sign = _sign_of_pivots(pivots).astype(a.dtype) * jnp.prod(units, axis=-1)
    return sign, jnp.sum(jnp.log(size), axis=-1), factors, pivots


# -- orthogonal and spectral ---------------------------------------------------------------------------------


@op(aten.linalg_qr)
def _qr(a, mode="reduced"):
    return (
        (_empty(a.dtype), jnp.linalg.qr(a, mode="r")) if mode == "r" else tuple(jnp.linalg.qr(a, mode=mode))
    )


@op(aten.geqrf)
def _geqrf(a):
    reflectors, tau = jnp.linalg.qr(a, mode="raw")
    return _transposed(reflectors), tau


rows(
    op,
    {
        aten.linalg_solve_triangular: lambda a, b, *, upper, left=True, unitriangular=False: (
            _solve_triangular(a, b, upper=upper, left=left, unit=unitriangular)
        ),
        aten.linalg_lu_solve: lambda factors, pivots, b, *, left=True, adjoint=False: _lu_solve(
            factors, pivots, b, left, adjoint
        ),
        aten.linalg_householder_product: lambda a, tau: jax.lax.linalg.householder_product(a, tau),
    },
)


@op(aten.ormqr)
def _ormqr(reflectors, tau, other, left=True, transpose=False):
    """Q @ other or other @ Q for the square Q of the reflectors, or its adjoint."""
    size = reflectors.shape[-2]
    missing = size - reflectors.shape[-1]
    batch = [(0, 0)] * (reflectors.ndim - 2)
    square = jnp.pad(reflectors, [*batch, (0, 0), (0, missing)])
    q = jax.lax.linalg.householder_product(square, jnp.pad(tau, [*batch, (0, size - tau.shape[-1])]))
    q = _adjoint(q) if transpose else q
    return product(q, other) if left else product(other, q)


@op(aten._linalg_svd)
def _svd(a, full_matrices=False, compute_uv=True, *, driver=None):
    if compute_uv:
        return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))
    return _empty(a.dtype), jnp.linalg.svd(a, compute_uv=False), _empty(a.dtype)


@op(aten._linalg_eigh)
def _eigh(a, UPLO="L", compute_v=True):
    triangle = jnp.tril(a) if UPLO.upper() == "L" else jnp.tril(_adjoint(a))
    vectors, values = jax.lax.linalg.eigh(triangle, lower=True, symmetrize_input=False)
    return values, vectors if compute_v else _empty(a.dtype)


@op(aten.linalg_eig)
def _eig(a):
    require(on_cpu(), "XLA has eigenvalues of general matrices on the CPU only")
    return tuple(jnp.linalg.eig(a))


@op(aten._linalg_eigvals, aten.linalg_eigvals)
def _eigvals(a):
    require(on_cpu(), "XLA has eigenvalues of general matrices on the CPU only")
    return jnp.linalg.eigvals(a)


_SQUARINGS = 64


@op(aten.linalg_matrix_exp)
def _matrix_exp(a):
    """In double precision: the solver in Padé's approximation loses digits that aten's polynomials keep, and
    the gradient (the exponential of a matrix twice as large) shows it."""
    exact = a.astype(jnp.complex128 if is_complex(a.dtype) else jnp.float64)
    return jsl.expm(exact, max_squarings=_SQUARINGS) if a.size else a


# -- products of matrices, attention -------------------------------------------------------------------------


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
    return value * cast(factor, value.dtype) if value.dtype != jnp.bool_ else value & bool(factor)


rows(
    partial(op, lift=(float,)),
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


# Two factors by letters (`torch.einsum`'s), as one product: torch.einsum folds dimensions into one.
torch.library.define("dynamotor_xla::contraction", "(Tensor x, Tensor y, str letters) -> Tensor")


@torch.library.register_fake("dynamotor_xla::contraction")
def _fake_contraction(x: torch.Tensor, y: torch.Tensor, letters: str) -> torch.Tensor:
    return x.new_empty(torch.einsum(letters, x, y).shape)


@op(torch.ops.dynamotor_xla.contraction)
def _contraction(x, y, letters):
    return contract(partial(jnp.einsum, letters), x, y).astype(x.dtype)


def _save_factors(ctx, inputs, output):
    x, y, ctx.letters = inputs
    ctx.save_for_backward(x, y)


def _contraction_backward(ctx, grad):
    (x, y), product = ctx.saved_tensors, torch.ops.dynamotor_xla.contraction
    one, other, result = ctx.letters.replace("->", ",").split(",")
    of_x = product(grad, y.conj(), f"{result},{other}->{one}")
    return of_x, product(grad, x.conj(), f"{result},{one}->{other}"), None


torch.library.register_autograd(
    "dynamotor_xla::contraction", _contraction_backward, setup_context=_save_factors
)


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


@op(aten._grouped_mm)
def _grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):
    """Products by groups, as mixtures of experts need them: `offs` says where each group of the rows of x, of
    the columns of weight, or of the dimension that is summed, ends."""
    require(bias is None, "_grouped_mm with a bias")
    dtype = x.dtype if out_dtype is None else jax_dtype(out_dtype)
    if x.ndim == weight.ndim == 3:
        return jnp.matmul(wide(x), wide(weight), precision="highest").astype(dtype)
    require(offs is not None, "_grouped_mm without offsets")
    if weight.ndim == 3:
        sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
        return jax.lax.ragged_dot(wide(x), wide(weight), sizes, precision="highest").astype(dtype)
    places = jnp.arange(weight.shape[1] if x.ndim == 3 else weight.shape[0])
    mine = (places < offs[:, None]) & (places >= (offs - jnp.diff(offs, prepend=0))[:, None])
    form = "gmk,kn,gn->mn" if x.ndim == 3 else "mk,kn,gk->gmn"
    product = jnp.einsum(form, wide(x), wide(weight), mine.astype(wide(x).dtype), precision="highest")
    return product.astype(dtype)


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
