"""Linear algebra: factors that multiply back, aten's conventions for LU and info, gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

from lowering_harness import check, to_jax, to_torch  # noqa: E402

from dynamotor.xla import ops_linalg  # noqa: E402, F401
from dynamotor.xla.lowering import Spec, Unsupported, apply, find  # noqa: E402

aten = torch.ops.aten
DTYPES = [torch.float64, torch.complex128]


def run(func, *args, **kwargs):
    """(ours, aten's), as tuples of tensors."""
    expected = func(*args, **kwargs)
    flat = expected if isinstance(expected, tuple) else (expected,)
    specs = tuple(Spec(tuple(t.shape), t.dtype) for t in flat)
    got = apply(
        func,
        find(func),
        tuple(to_jax(a) for a in args),
        kwargs,
        specs if isinstance(expected, tuple) else specs[0],
    )
    return tuple(to_torch(g, t.dtype) for g, t in zip(got if isinstance(got, tuple) else (got,), flat)), flat


def same(func, *args, **kwargs):
    for got, want in zip(*run(func, *args, **kwargs)):
        torch.testing.assert_close(got, want.contiguous().resolve_conj(), rtol=1e-8, atol=1e-8)


def square(*batch, size=4, dtype=torch.float64):
    return torch.randn(*batch, size, size, dtype=dtype) + 3 * torch.eye(size, dtype=dtype)


def positive(*batch, dtype=torch.float64):
    a = square(*batch, dtype=dtype)
    return a @ a.mH


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cholesky(dtype, upper):
    same(aten.linalg_cholesky_ex.default, positive(2, dtype=dtype), upper=upper)
    factor = torch.linalg.cholesky(positive(2, dtype=dtype), upper=upper)
    same(aten._cholesky_solve_helper.default, torch.randn(2, 4, 3, dtype=dtype), factor, upper)
    same(aten.cholesky_inverse.default, factor, upper)


def test_cholesky_says_which_minor_failed():
    matrices = positive(3)
    matrices[1, 2, 2] = -100.0
    (_, info), (_, expected) = run(aten.linalg_cholesky_ex.default, matrices)
    assert info.tolist() == expected.tolist() == [0, 3, 0]


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5), (2, 5, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lu(shape, dtype):
    a = torch.randn(shape, dtype=dtype)
    same(aten.linalg_lu_factor_ex.default, a)
    same(aten.linalg_lu.default, a)
    same(aten.lu_unpack.default, *torch.linalg.lu_factor(a))


def test_lu_counts_the_first_zero_pivot():
    a = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 2.0, 3.0]])
    (_, _, info), (_, _, expected) = run(aten.linalg_lu_factor_ex.default, a)
    assert info == expected == 2


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_solve(dtype, left):
    b = torch.randn(2, 4, 4, dtype=dtype)
    same(aten._linalg_solve_ex.default, square(2, dtype=dtype), b, left=left)
    factors, pivots = torch.linalg.lu_factor(square(2, dtype=dtype))
    for adjoint in (False, True):
        same(aten.linalg_lu_solve.default, factors, pivots, b, left=left, adjoint=adjoint)
    for upper in (False, True):
        triangle = square(2, dtype=dtype).triu() if upper else square(2, dtype=dtype).tril()
        same(aten.linalg_solve_triangular.default, triangle, b, upper=upper, left=left)


def test_solve_of_a_vector():
    same(aten._linalg_solve_ex.default, square(), torch.randn(4, dtype=torch.float64))
    same(aten._linalg_solve_ex.default, square(2), torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inverse_and_determinant(dtype):
    for a in (square(dtype=dtype), square(2, 3, dtype=dtype)):
        same(aten.linalg_inv_ex.default, a)
        same(aten._linalg_det.default, a)
        same(aten._linalg_slogdet.default, a)


@pytest.mark.slow
def test_gradients():
    a, b = square(2).requires_grad_(), torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def total():
        values = (
            torch.linalg.solve(a, b).sum()
            + torch.linalg.det(a).sum()
            + torch.linalg.slogdet(a)[1].sum()
            + torch.linalg.inv(a).sum()
        )
        (
            values
            + torch.linalg.cholesky(a @ a.mT).sum()
            + torch.linalg.qr(a)[1].sum()
            + torch.linalg.matrix_exp(a).sum()
        ).backward()

    check(total)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 5)])
def test_qr(mode, shape):
    a = torch.randn(shape, dtype=torch.float64)
    same(aten.linalg_qr.default, a, mode)
    same(aten.geqrf.default, a)


def test_reflectors():
    reflectors, tau = torch.geqrf(torch.randn(2, 5, 3, dtype=torch.float64))
    same(aten.linalg_householder_product.default, reflectors, tau)
    same(aten.ormqr.default, reflectors, tau, torch.randn(2, 5, 4, dtype=torch.float64))
    same(aten.ormqr.default, reflectors, tau, torch.randn(2, 4, 5, dtype=torch.float64), False, True)


@pytest.mark.parametrize("shape", [(4, 4), (2, 5, 3), (3, 5)])
@pytest.mark.parametrize("full", [True, False])
def test_singular_values_multiply_back(shape, full):
    a = torch.randn(shape, dtype=torch.float64)
    (u, s, vh), (_, expected, _) = run(aten._linalg_svd.default, a, full)
    rank = s.shape[-1]
    torch.testing.assert_close(s, expected)
    torch.testing.assert_close(u[..., :rank] * s[..., None, :] @ vh[..., :rank, :], a)
    same(aten._linalg_svd.default, a, False, False)


@pytest.mark.parametrize("triangle", ["L", "U"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_symmetric_eigenvalues_multiply_back(triangle, dtype):
    a = positive(2, dtype=dtype)
    other = a.tril() if triangle == "L" else a.triu()
    (values, vectors), (expected, _) = run(aten._linalg_eigh.default, other, triangle)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mH, a)


def test_general_eigenvalues_multiply_back():
    a = square(2)
    (values, vectors), _ = run(aten.linalg_eig.default, a)
    torch.testing.assert_close(a.to(vectors.dtype) @ vectors, vectors * values[..., None, :])


def test_exponentials():
    same(aten.linalg_matrix_exp.default, square(2))
    same(aten.linalg_matrix_exp.default, square() * 20)


def test_errors_that_must_be_raised_at_once_are_refused():
    with pytest.raises(Unsupported, match="data"):
        run(aten.linalg_inv_ex.default, square(), check_errors=True)
