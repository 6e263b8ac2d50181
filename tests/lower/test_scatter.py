"""Writes at computed positions: values, sums of equal positions, fused ops, positions out of range."""

import pytest
import torch
from harness import check, compiled

from dynamotor.base.config import config

aten = torch.ops.aten
I = torch.tensor([3, 1, 3, 0, 3])  # noqa: E741
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def values(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, shape).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32])
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_of_equal_positions(dtype, dim):
    x, y = values(6, 7, dtype=dtype), values(5, 7, dtype=dtype) if dim == 0 else values(6, 5, dtype=dtype)
    index = torch.randint(0, 6, y.shape)
    kernels = (
        3 if dtype in (torch.bfloat16, torch.float16) else 2
    )  # half precisions are summed in float32, then rounded
    check(
        lambda x, i, y: x.scatter_add(dim, i, y), x, index, y, kernels=kernels, fallbacks=(), tolerance=2e-2
    )
    check(lambda x, i, y: x.scatter_reduce(dim, i, y, "sum") * 2, x, index, y, fallbacks=(), tolerance=2e-2)
    check(lambda x, i, y: x.index_add(dim, i, y), x, I, y, fallbacks=None, tolerance=2e-2)
    check(lambda x, i, y: x.index_add(dim, i, y, alpha=2), x, I, y, fallbacks=None, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.int8, torch.bool])
def test_values_put_at_positions(dtype):
    x, y = values(6, 7, dtype=dtype), values(6, 3, dtype=dtype)
    index = torch.stack([torch.randperm(7)[:3] for _ in range(6)])
    check(lambda x, i, y: x.scatter(1, i, y), x, index, y, kernels=2, fallbacks=(), tolerance=0)
    check(lambda x, i: x.scatter(1, i[:4], 1), x, index, fallbacks=(), tolerance=0)
    check(
        lambda x, i, y: x.index_put((i,), y), x, torch.tensor([4, -1]), y[:2, :1], fallbacks=(), tolerance=0
    )


def test_slices_put_at_positions():
    x, y, i = values(6, 7), values(6, 2), torch.tensor([4, 1])
    check(lambda x, i, y: x.index_copy(1, i, y) * 2, x, i, y, fallbacks=())
    check(lambda x, i, y: x.index_copy(0, i[0], y), x, i, y.t()[:1, :1].expand(1, 7), fallbacks=())
    check(lambda x, i: x.index_fill(0, i - 5, 2.5) + 1, x, i, fallbacks=())
    check(lambda x, i: x.index_fill(1, i[1], 2), x.long(), i, fallbacks=())
    check(
        lambda x, i, y: aten.scatter.reduce(x, 1, i, y, reduce="add"),
        x,
        i.expand(6, 2) * 0,
        y,
        fallbacks=(),
        tolerance=1e-5,
    )


def test_advanced_positions():
    x, i, j = torch.randn(6, 7, 20), torch.tensor([[5], [-6], [2]]), torch.tensor([1, -7, 3, 4])
    check(lambda x, i, j, v: x.index_put((i, j), v), x, i, j, torch.randn(3, 4, 20), fallbacks=())
    check(
        lambda x, i, j, v: x.index_put((i, j), v, True),
        x,
        i % 2,
        j,
        torch.randn(4, 1),
        fallbacks=(),
        tolerance=1e-5,
    )
    check(
        lambda x, j, v: aten.index_put(x, [None, j], v, True) + 1,
        x,
        j % 3,
        torch.randn(6, 4, 20),
        fallbacks=(),
        tolerance=1e-5,
    )
    check(
        lambda x, j, v: aten.index_put(x, [j, None, j], v, True),
        x,
        j % 3,
        torch.randn(4, 7),
        fallbacks=(),
        tolerance=1e-5,
    )


def test_equal_positions_are_summed_in_eagers_order():
    x, i, y = torch.randn(2, 3), torch.randint(0, 2, (500,)), torch.randn(500, 3) * 1e4
    check(lambda x, i, y: x.index_put((i,), y, True), x, i, y, fallbacks=(), tolerance=1e-4)


def test_operands_of_odd_layout_and_shape():
    x, y, index = torch.randn(7, 6).t(), torch.randn(10, 5)[::2].t(), torch.randint(0, 6, (5, 5)).t()
    check(lambda x, i, y: x.scatter_add(1, i, y), x, index, y, fallbacks=(), tolerance=1e-5, strides=False)
    check(
        lambda x, i, y: x.expand(6, 7).scatter_add(0, i, y),
        x[:1],
        index,
        y,
        fallbacks=(),
        tolerance=1e-5,
        strides=False,
    )
    check(lambda x, i, y: x.scatter_add(0, i, y), x, index[:0], y[:0], fallbacks=())
    check(
        lambda x, i, y: x.scatter(0, i, y),
        torch.randn(1, 4),
        torch.zeros(1, 4, dtype=torch.long),
        torch.randn(1, 4),
        fallbacks=(),
    )
    check(
        lambda x, i, y: x.index_add(0, i, y), torch.randn(4), torch.tensor(2), torch.randn(1), fallbacks=None
    )


def test_producers_and_readers():
    x, y, index = torch.randn(6, 7), torch.randn(5, 7), torch.randint(0, 6, (5, 7))
    texts = check(
        lambda x, i, y: torch.relu(x.exp().scatter_add(0, i, y.tanh() * 2)),
        x,
        index,
        y,
        kernels=3,
        tolerance=1e-5,
    )
    assert any("tanh" in t and "] += " in t for t in texts)
    check(lambda x, i, y: x.scatter_add(0, i, y).gather(0, i) + y, x, index, y, tolerance=1e-5)
    check(lambda x, i, y: (x.scatter_add(0, i, y), x.scatter(0, i, 1.0), x + 1), x, index, y, tolerance=1e-5)
    check(lambda x, y: x.scatter(1, x.argmax(1, True), 0.0) + x, x, y)
    check(lambda x, i, y: x.scatter_add(0, i, torch.softmax(y, 1)), x, index, y, tolerance=1e-5)
    check(lambda x, i, y: x.scatter_add(0, i, y).sum(0), x, index, y, tolerance=1e-5)


@pytest.mark.parametrize("padding", [-1, 1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_of_an_embedding(padding, dtype):
    g, i = values(3, 4, 16, dtype=dtype), torch.randint(0, 5, (3, 4))
    check(
        lambda g, i: aten.embedding_dense_backward(g, i, 5, padding, False) * 2,
        g,
        i,
        fallbacks=(),
        tolerance=5e-2,
    )
    check(
        lambda g, i: aten.embedding_dense_backward(g, i, 5, padding, True), g, i, fallbacks=(), tolerance=5e-2
    )


@pytest.mark.parametrize("bad", [6, -1])
@pytest.mark.parametrize("operands", [(6, 5), (1, 1)])
def test_a_place_out_of_range_raises(bad, operands):
    rows, count = operands
    x, y = torch.randn(rows, 3), torch.randn(count, 3)
    index = torch.zeros(count, 3, dtype=torch.long)
    for f in (lambda x, i, y: (x.scatter_add(0, i, y),), lambda x, i, y: (x.scatter(0, i, y),)):
        call, _, _ = compiled(f, x, index, y)
        call(x, index, y)
        with pytest.raises(IndexError):
            call(x, index + bad, y)
        call(x, index, y)


def test_deterministic_sums_are_left_to_aten_on_a_gpu():
    x, y, index = torch.randn(6, 7), torch.randn(5, 7), torch.randint(0, 6, (5, 7))
    left = ["aten.scatter_add.default"] if config.target == "triton" else []
    torch.use_deterministic_algorithms(True)
    try:
        check(lambda x, i, y: x.scatter_add(0, i, y) + 1, x, index, y, fallbacks=left)
    finally:
        torch.use_deterministic_algorithms(False)
