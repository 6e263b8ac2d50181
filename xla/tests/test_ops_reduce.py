"""Reductions, scans and sorting against aten's CPU kernels, forward and gradient."""

from __future__ import annotations

import pytest
import torch

jax = pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import FEW_OR_MORE, check, check_opinfo, company, gather, to_jax, to_torch  # noqa: E402

from dynamotor.xla import ops_pointwise, ops_reduce  # noqa: E402, F401
from dynamotor.xla.lowering import Spec, apply, find  # noqa: E402

aten = torch.ops.aten
nan, inf = float("nan"), float("inf")
REDUCTIONS = "sum nansum prod mean nanmean var std var_mean std_mean amax amin aminmax max min argmax argmin any all logsumexp linalg.vector_norm count_nonzero median nanmedian mode histc bucketize searchsorted renorm"
SCANS = "cumsum cumprod cummax cummin logcumsumexp diff cumulative_trapezoid trapezoid"


@pytest.mark.parametrize("samples", FEW_OR_MORE)
@pytest.mark.parametrize("name", f"{REDUCTIONS} {SCANS} quantile masked.var masked.logsumexp".split())
def test_float_ops_and_their_gradients_equal_aten(request, name: str, samples: int) -> None:
    mode = company(request, lambda name, samples: check_opinfo(name, torch.float32, samples))
    assert not mode.refused


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "sum",
        "nansum",
        "prod",
        "mean",
        "var",
        "amax",
        "argmax",
        "any",
        "all",
        "norm",
        "count_nonzero",
        "cumsum",
        "cumprod",
        "cummax",
        "logcumsumexp",
    ],
)
def test_other_dtypes_equal_aten(request, name: str, dtype: torch.dtype) -> None:
    mode = company(request, lambda name, dtype: check_opinfo(name, dtype, samples=3))
    assert not mode.refused


SPECIAL = torch.tensor(
    [
        [1.0, nan, 3.0, nan],
        [inf, -inf, 0.0, inf],
        [2.0, 2.0, -1.0, 2.0],
        [-0.0, 0.0, -0.0, 0.0],
        [nan, nan, nan, nan],
    ]
)


@pytest.mark.parametrize(
    "fn",
    [
        torch.amax,
        torch.amin,
        torch.sum,
        torch.nansum,
        torch.logsumexp,
        torch.cumsum,
        torch.logcumsumexp,
        torch.cummax,
        torch.cummin,
        torch.median,
        torch.nanmedian,
        torch.argmax,
        torch.argmin,
        torch.max,
        torch.min,
        torch.any,
        torch.all,
        torch.var,
    ],
    ids=lambda fn: fn.__name__,
)
def test_nan_infinities_and_ties_along_a_dimension(request, fn) -> None:
    def collect(fn):
        x = SPECIAL[:4] if fn in (torch.median, torch.nanmedian) else SPECIAL
        return gather(lambda: (fn(x, 1), fn(x, 0), fn(x.double(), -1)))

    assert company(request, collect).right


@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, -1, inf, -inf])
def test_norms_of_every_order(order: float) -> None:
    check(
        lambda x: (x.norm(order), x.norm(order, 1), x.norm(order, [0, 1], True, torch.float64)),
        torch.randn(3, 4),
    )
    check(torch.linalg.vector_norm, torch.randn(3, 4, 2), order, [0, 2], True)
    check(torch.linalg.vector_norm, torch.randn(5, dtype=torch.complex64), order)
    check(lambda x: torch.linalg.vector_norm(x, order, dtype=torch.float64), torch.randn(5))


def test_a_number_reduces_and_scans_like_a_row_of_one() -> None:
    x = torch.tensor(2.5)
    check(
        lambda v: (
            v.sum(0),
            v.mean(-1),
            v.amax(0),
            v.max(0),
            v.argmax(),
            v.cumsum(0),
            v.cummax(0),
            v.sort(),
            v.topk(1),
            v.median(0),
            v.kthvalue(1),
            v.norm(),
            v.var(correction=0),
        ),
        x,
    )


def test_empty_tensors_reduce_to_the_neutral_element() -> None:
    x = torch.empty(0, 3)
    check(
        lambda v: (
            v.sum(),
            v.sum(0),
            v.prod(0),
            v.mean(),
            v.any(0),
            v.all(),
            v.sum(1),
            v.cumsum(0),
            v.sort(0),
            v.norm(),
            v.var(1),
            v.logsumexp(0),
        ),
        x,
    )


@pytest.mark.parametrize("correction", [0, 1, 2.5, 7])
def test_variance_with_a_correction(correction: float) -> None:
    check(
        lambda x: (
            torch.var(x, 1, correction=correction),
            torch.std_mean(x, correction=correction, dim=[0, 1], keepdim=True),
        ),
        torch.randn(3, 5, 2),
    )


def test_half_precision_sums_accumulate_in_float32() -> None:
    check(
        lambda x: (x.sum(), x.mean(), x.cumsum(0), x.norm(), x.var()),
        torch.full((4000,), 0.1, dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("descending", [False, True])
def test_sorts_are_stable_with_nan_at_the_large_end(dtype: torch.dtype, descending: bool) -> None:
    x = (torch.randint(0, 4, (3, 40)) - 1).to(dtype)
    if dtype.is_floating_point:
        x[0, ::7], x[1, ::5], x[2, ::3] = nan, inf, -0.0
    mode = check(
        lambda v: (
            torch.sort(v, dim=1, descending=descending, stable=True),
            torch.sort(v, dim=0, descending=descending, stable=True),
        ),
        x,
    )
    assert "aten.sort.stable" in mode.right


def lowered(func: torch._ops.OpOverload, *args) -> list[torch.Tensor]:
    want = func(*args)
    specs = tuple(Spec(tuple(w.shape), w.dtype) for w in want)
    got = apply(func, find(func), tuple(to_jax(a) for a in args), {}, specs)
    return [to_torch(g, w.dtype) for g, w in zip(got, want)] + list(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_topk_takes_the_values_that_aten_takes(dtype: torch.dtype, largest: bool) -> None:
    """Of equal values either side may name any position: each position must hold its value, and none
    twice.
    """
    x = torch.randint(0, 9, (4, 30)).to(dtype)
    if dtype.is_floating_point:
        x[0, 3], x[1, 4], x[2, 5], x[3, :] = nan, inf, -inf, nan
    for dim, k in ((1, 7), (0, 3), (-1, 30), (1, 0)):
        values, places, want, _ = lowered(aten.topk.default, x, k, dim, largest, True)
        torch.testing.assert_close(values, want, equal_nan=True)
        torch.testing.assert_close(x.gather(dim, places), want, equal_nan=True)
        assert all(len(row.unique()) == k for row in places.movedim(dim, -1).flatten(0, -2))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_kthvalue_among_ties(k: int) -> None:
    x = torch.randint(0, 4, (5, 10))
    values, places, want, _ = lowered(aten.kthvalue.default, x, k, 1, True)
    assert torch.equal(values, want) and torch.equal(x.gather(1, places), want)


def test_histogram_counts_the_right_edge_and_drops_the_outside() -> None:
    x = torch.tensor([0.0, 0.1, 0.5, 1.0, 1.5, -0.2, nan, 0.9999])
    check(
        lambda v: (torch.histc(v[:4], 4), torch.histc(v, 5, 0, 1), torch.histc(torch.full((3,), 2.0), 3)), x
    )


def test_searching_sorted_rows_with_ties_and_both_sides() -> None:
    rows = torch.tensor([[1.0, 2.0, 2.0, 5.0], [0.0, 0.0, 3.0, 9.0]])
    values = torch.tensor([[2.0, 0.0, 7.0], [0.0, 9.0, 10.0]])
    for right in (False, True):
        check(lambda a, b: torch.searchsorted(a, b, right=right), rows, values)  # noqa: B023
        check(lambda b: torch.bucketize(b, rows[0].clone(), right=right, out_int32=True), values)  # noqa: B023
    check(lambda a, b: torch.searchsorted(a, b, sorter=torch.argsort(a, stable=True)), rows.flip(1), values)
