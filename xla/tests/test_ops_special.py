"""Special functions against aten's CPU kernels, forward and gradient."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import FEW_OR_MORE, check, check_opinfo, company  # noqa: E402

from dynamotor.xla import ops_pointwise  # noqa: E402, F401

FUNCTIONS = "bessel_j0 entr erfcx i0e i1 i1e log_ndtr modified_bessel_i0 modified_bessel_i1 ndtr ndtri spherical_bessel_j0 xlog1py zeta"

DECOMPOSED = {"aten.special_entr.default", "aten.special_xlog1py.default", "aten.xlogy.Tensor"}  # by PyTorch


@pytest.mark.parametrize(
    "name",
    [
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "polygamma",
        "i0",
        "igamma",
        "igammac",
        "xlogy",
        *(f"special.{n}" for n in FUNCTIONS.split()),
    ],
)
@pytest.mark.parametrize("samples", FEW_OR_MORE)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow), torch.int64], ids=str
)
def test_special_functions_and_their_gradients_equal_aten(
    request, name: str, dtype: torch.dtype, samples: int
) -> None:
    mode = company(request, lambda name, dtype, samples: check_opinfo(name, dtype, samples))
    assert not mode.refused and mode.missing <= DECOMPOSED


def test_zeta_and_polygamma_left_of_zero() -> None:
    q = torch.tensor([-0.5, -2.25, -7.9, -30.5, 0.0, -3.0, 0.1, 4.0], dtype=torch.float64)
    check(torch.special.zeta, torch.tensor([1.0, 2.0, 3.0, 6.0, 0.5], dtype=torch.float64)[:, None], q[None])
    check(lambda: [torch.polygamma(order, q) for order in (0, 1, 2, 3)])


def test_incomplete_gamma_functions_at_their_limits() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 7.5, float("inf"), -1.0], dtype=torch.float64)
    check(torch.igamma, values[:, None], values[None])
    check(torch.igammac, values[:, None], values[None])
