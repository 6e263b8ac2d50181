"""Matrices times few vectors: rows side by side, the rows that are left, and kernels that sum one by one."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.codegen import cpp, cpp_kernel
from dynamotor.codegen.cpp_products import ProductsEmitter, rows_together


@pytest.fixture
def _together(monkeypatch):
    """How many rows went side by side, kernel by kernel."""
    found = []

    def choose(kernel):
        found.append(rows_together(kernel))
        return ProductsEmitter(kernel, found[-1]) if found[-1] > 1 else None

    monkeypatch.setattr(cpp, "products_emitter", choose)
    monkeypatch.setattr(cpp, "_memo", {})
    return found


def close(f, *inputs, isa=""):
    """ours is as near to float64 as rows of float32 sums are."""
    with config.patch(isa=isa), torch.no_grad():
        got = dynamotor.compile(f, dynamic=False)(*inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    want = f(*wide)
    unit = 1e-2 if got.dtype is torch.bfloat16 else 1e-5
    assert ((got.double() - want).abs() <= unit * (want.abs() + 1)).all()


@pytest.mark.parametrize("isa", ["", "avx2", "portable"])
@pytest.mark.parametrize("rows", [512, 515, 1021])
@pytest.mark.parametrize("columns", [512, 1000, 4099])
def test_rows_of_any_number_and_length(rows, columns, isa, _together):
    if isa and not cpp_kernel.ISAS[isa].is_here:
        pytest.skip(f"this processor has no {isa}")
    w = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    x, b = torch.randn(1, columns), torch.randn(rows)
    close(lambda x, w, b: torch.relu(x @ w.to(x.dtype).t() / 3000 + b), x, w, b, isa=isa)
    assert max(_together) == (8 if rows * columns >= 1 << 18 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [512, 1021])
@pytest.mark.parametrize("columns", [1000, 4099])
def test_wider_weights_go_row_by_row(rows, columns, dtype, _together):
    w, x, b = [torch.randn(n, dtype=dtype) for n in ((rows, columns), (1, columns), (rows,))]
    close(lambda x, w, b: torch.relu(x @ w.t() / 30 + b), x, w, b)
    assert max(_together) == 1


@pytest.mark.parametrize("rows", [1024, 1021])
def test_rows_with_gaps(rows, _together):
    w = torch.randint(-128, 128, (rows, 1000), dtype=torch.int8)
    close(lambda x, w: x @ w[:, 3:900].to(x.dtype).t() / 3000, torch.randn(1, 897), w)
    assert max(_together) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_weights_in_bytes(dtype, count, _together):
    w = torch.randint(-128, 128, (520, 1024), dtype=torch.int8)
    x, s = torch.randn(count, 1024, dtype=dtype), torch.rand(520, dtype=dtype) / 100
    close(lambda x, w, s: x @ w.to(x.dtype).t() * s / 30, x, w, s)
    assert 8 // count in _together


def test_several_sums_over_one_matrix_share_their_rows(_together):
    w = torch.randint(-128, 128, (1024, 512), dtype=torch.int8)
    x, y = torch.randn(512) / 100, torch.randn(512) / 100
    close(lambda w, x, y: (w.to(x.dtype) * x).sum(1) + (w.to(x.dtype) * y).sum(1), w, x, y)
    assert 4 in _together or 8 in _together


def test_sums_in_place_are_added_once():
    w, x, y = torch.randn(1021, 512), torch.randn(512), torch.randn(1021)
    want = y.double() + (w.double() * x.double()).sum(1)

    def f(w, x, y):
        y += (w * x).sum(1)

    dynamotor.compile(f, dynamic=False)(w, x, y)
    assert torch.allclose(y.double(), want, atol=1e-4)


def test_threads_share_the_blocks(_together):
    torch.set_num_threads(2)
    try:
        w = torch.randint(-128, 128, (1021, 512), dtype=torch.int8)
        close(lambda x, w: x @ w.to(x.dtype).t() / 3000, torch.randn(1, 512), w)
    finally:
        torch.set_num_threads(1)
    assert max(_together) == 8


def test_sums_of_rows_alone_and_of_large_integers_go_one_by_one(_together):
    x = torch.randn(1024, 512)
    dynamotor.compile(lambda x: x.sum(1), dynamic=False)(x)
    dynamotor.compile(lambda x, y: (x.long() * y).sum(1), dynamic=False)(x, torch.arange(512))
    assert set(_together) <= {1}


def test_a_block_fetches_each_line_of_the_next_one_once():
    """Short rows are over before the processor sees that they are read: 768 bytes a row came at 8 GB/s, now at
    20.
    """
    w = torch.ones(512, 768, dtype=torch.int8)
    text = str(dynamotor.lower(lambda x, w: (x * w.float()).sum(1), torch.ones(1, 768), w).code)
    width = cpp_kernel.machine_width()
    turn = 8 * width * (2 if width >= 16 else 1)  # bytes of the block in a turn of the loop
    assert text.count("__builtin_prefetch(") == max(1, turn // 64)
