"""Reads and writes by index, scatter and its reductions, embeddings, against aten's CPU kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import FEW_OR_MORE, check, check_opinfo, company  # noqa: E402

from dynamotor.xla import (  # noqa: E402, F401
    ops_create,
    ops_index,
    ops_view,
)

aten = torch.ops.aten
F = torch.nn.functional
NAMES = [
    "gather",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
    "take",
    "put",
    "masked_fill",
    "masked_scatter",
    "take_along_dim",
    "nonzero_static",
    "nn.functional.embedding",
    "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate",
    "index_reduce",
]


@pytest.mark.parametrize("samples", FEW_OR_MORE)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_float_ops_and_their_gradients_equal_aten(request, name: str, samples: int) -> None:
    mode = company(request, lambda name, samples: check_opinfo(name, torch.float32, samples))
    assert not mode.refused
    assert mode.right


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "name", ["gather", "scatter_add", "index_add", "index_put", "put", "masked_scatter", "index_copy"]
)
def test_other_dtypes_equal_aten(request, name: str, dtype: torch.dtype) -> None:
    company(request, lambda name, dtype: check_opinfo(name, dtype, samples=4, gradient=False))


INDICES = [
    ([torch.tensor([0, -1, 2])]), ([None, torch.tensor([[0, 1], [-2, 3]])]), ([torch.tensor([0, 1]), torch.tensor([-1, 2])]),
    ([torch.tensor([0, 1]), None, torch.tensor([0, -1])]), ([torch.tensor(1), None, torch.tensor([0, 2])]), ([None, None, torch.tensor(-2)]),
    ([torch.tensor([[0], [2]]), torch.tensor([1, 3, 0])]), ([torch.zeros(0, dtype=torch.int64)]),
]  # fmt: skip


@pytest.mark.parametrize("indices", INDICES, ids=range(len(INDICES)))
def test_integer_indices_read_and_write(indices) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    mode = check(lambda: aten.index(x, indices).square().sum().backward())
    assert {"aten.index.Tensor"} <= mode.right and not mode.refused
    values = torch.randn(aten.index(x.detach(), indices).shape, dtype=torch.float64)
    assert check(lambda: aten.index_put(x.detach(), indices, values, True)).right
    assert check(lambda: aten.index_put(x.detach(), indices, values[..., :1])).right or values.numel() == 0


@pytest.mark.slow
def test_boolean_masks_are_written_by_a_select_and_not_read() -> None:
    x = torch.randn(3, 4, 5)
    for shape, lead in [((3,), 0), ((3, 4), 0), ((3, 4, 5), 0), ((4,), 1), ((4, 5), 1)]:
        mask = torch.rand(shape) < 0.5
        indices = [None] * lead + [mask]
        picked = aten.index(x, indices)
        for values, accumulate in itertools.product([torch.tensor(2.0), torch.randn(picked.shape), torch.randn(5) if x.ndim - lead > mask.ndim else
                                                     torch.randn(1)], [False, True]):  # fmt: skip
            mode = check(lambda i=indices, v=values, a=accumulate: aten.index_put(x, i, v, a))
            assert mode.right, (shape, lead)
    assert check(lambda: aten.index(x, [torch.rand(3) < 0.5])).refused


@pytest.mark.sweep(6)
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16], ids=str)
def test_scatter_and_index_reductions(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    x, source = torch.randint(-9, 9, (4, 3)).to(dtype), torch.randint(-9, 9, (6, 5)).to(dtype)
    index = torch.randint(0, 4, (5, 2))
    mode = check(lambda: aten.scatter_reduce(x, 0, index, source, reduce, include_self=include_self))
    assert mode.right
    if reduce != "sum":
        assert check(
            lambda: aten.index_reduce(x, 0, index[:, 0], source[:5, :3], reduce, include_self=include_self)
        ).right


def test_not_a_number_wins_maximum_and_minimum() -> None:
    x, source = torch.zeros(3), torch.tensor([float("nan"), 1.0, -1.0])
    for reduce in ("amax", "amin"):
        assert check(lambda r=reduce: aten.scatter_reduce(x, 0, torch.tensor([0, 0, 1]), source, r)).right


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_gradient(padding: int | None, by_frequency: bool) -> None:
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[1, 2, 2], [5, 0, 2]])
    mode = check(
        lambda: F.embedding(index, weight, padding, scale_grad_by_freq=by_frequency).square().sum().backward()
    )
    assert {"aten.embedding.default", "aten.embedding_dense_backward.default"} <= mode.right


@pytest.mark.parametrize("bag", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bags(bag: str, padding: int | None) -> None:
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index, offsets = torch.tensor([1, 2, 2, 5, 0, 2]), torch.tensor([0, 3, 3])
    mode = check(
        lambda: (
            F.embedding_bag(index, weight, offsets, mode=bag, padding_idx=padding)[:, :2]
            .square()
            .sum()
            .backward()
        )
    )
    assert {"aten._embedding_bag.default", "aten._embedding_bag_backward.default"} <= mode.right


@pytest.mark.parametrize("bag", ["sum", "mean"])
def test_weighted_bags_that_include_the_last_offset(bag: str) -> None:
    weight, scale = (
        torch.randn(6, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(6, dtype=torch.float64, requires_grad=True),
    )
    index, offsets = torch.tensor([1, 2, 2, 5, 0, 2]), torch.tensor([0, 4, 6])
    scale = scale if bag == "sum" else None
    mode = check(
        lambda: (
            F.embedding_bag(
                index, weight, offsets, mode=bag, per_sample_weights=scale, include_last_offset=True
            )
            .square()
            .sum()
            .backward()
        )
    )
    assert "aten._embedding_bag_backward.default" in mode.right


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_of_both_widths(dtype: torch.dtype) -> None:
    x, index = torch.randn(4, 3), torch.tensor([3, 0, 1], dtype=dtype)
    for call in (
        lambda: aten.index_select(x, 0, index), lambda: aten.embedding(x, index), lambda: aten.index_add(x, 0, index, torch.ones(3, 3)),
        lambda: aten.index(x, [index, None]),
    ):  # fmt: skip
        assert check(call).right


def test_zero_dimensional_tensors() -> None:
    x, zero = torch.randn(()), torch.zeros((), dtype=torch.int64)
    for call in (
        lambda: aten.gather(x, 0, zero), lambda: aten.scatter(x, 0, zero, torch.ones(())), lambda: aten.index_select(x, 0, zero),
        lambda: aten.take(x, zero), lambda: aten.index_add(x, 0, zero, torch.ones(())),
        lambda: aten.scatter_add(x, 0, zero, torch.ones(())), lambda: aten.index_copy(x, 0, zero, torch.ones(())),
    ):  # fmt: skip
        assert check(call).right
