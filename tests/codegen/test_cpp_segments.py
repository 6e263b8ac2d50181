"""Maps whose segments read one thing or another: joined, padded, rolled, part of them replaced; long copies."""

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.codegen import cpp_kernel

F = torch.nn.functional
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Rows and columns of two operands; with 3 rows each task has a part of a row.
SHAPES = [((7, 5), (7, 3)), ((9, 64), (9, 65)), ((3, 5000), (3, 4099)), ((300, 1000), (300, 33))]
MOVED = {
    "joined": lambda x, y: torch.cat([x, y], 1),
    "joined_thrice": lambda x, y: torch.cat([y, x, y[:, :1]], -1),
    "joined_rows": lambda x, y: torch.cat([x, x[:2], x]),
    "joined_turned": lambda x, y: torch.cat([x.flip(1), y], 1),
    "padded": lambda x, y: F.pad(x, (1, 2, 3, 1)),
    "cut_and_padded": lambda x, y: F.pad(x, (-1, 2, 1, -2), value=1),
    "rolled": lambda x, y: x.roll((1, -2), (0, 1)),
    "replaced": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 1, 3),
    "repeated": lambda x, y: (x.repeat(2, 3), x.flatten().tile(2), x.repeat(1, 2).roll(1, 1))[x.shape[0] % 3],
    "joined_and_padded": lambda x, y: F.pad(torch.cat([x, y], 1), (2, 0, 0, 1)),
}


def filled(shape, dtype, special=True):
    x = (torch.randn(shape) * 9).to(dtype)
    if special and dtype.is_floating_point:
        x.view(-1)[::5] = float("nan")
        x.view(-1)[1::7] = -0.0
        x.view(-1)[2::7] = torch.finfo(dtype).smallest_normal / 4
    return x


def laid_out(x, layout):
    if layout == "dense":
        return x
    if layout == "transposed":
        return x.t().contiguous().t()
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return moved.copy_(x)


def bits(x):
    x = x.contiguous()
    return x if x.dtype is torch.bool else x.view(BITS[x.element_size()])


def same(function, *inputs, **settings):
    with torch.no_grad(), config.patch(**settings):
        got, eager = dynamotor.compile(function, dynamic=False)(*inputs), function(*inputs)
    assert got.stride() == eager.stride() and torch.equal(bits(got), bits(eager))


@pytest.mark.parametrize("layout", ["dense", "unaligned", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MOVED)
def test_segments_have_the_bits_of_eager(name, dtype, layout):
    for one, other in SHAPES[:2]:
        x, y = (laid_out(filled(shape, dtype), layout) for shape in (one, other))
        same(MOVED[name], x, y, verify=True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MOVED)
def test_large_segments(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for one, other in SHAPES[2:]:
            same(MOVED[name], filled(one, torch.float32), filled(other, torch.float32), verify=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@pytest.mark.parametrize("name", MOVED)
def test_segments_of_other_instruction_sets(name, isa):
    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip("another processor")
    for dtype in (torch.float32, torch.uint8, torch.bfloat16):
        same(MOVED[name], filled((9, 64), dtype), filled((9, 65), dtype), isa=isa)


def test_segments_that_compute():
    def function(x, y):
        z = F.pad(torch.cat([x.exp(), y * 2, x - y], 1).relu(), (1, 1))
        return z, torch.cat([z[:, :4], y], 1) + 1

    x, y = torch.randn(33, 21), torch.randn(33, 21)
    for got, eager in zip(dynamotor.compile(function)(x, y), function(x, y), strict=True):
        torch.testing.assert_close(got, eager)


def test_a_loop_has_no_rows():
    for n in (5, 40_000, 300_001):
        x, y = torch.randn(n), torch.randn(77)
        same(lambda x, y: torch.cat([x, y, x]), x, y, verify=True)
        same(lambda x, y: F.pad(x, (3, 1)), x, y, verify=True)


def test_a_repeated_row():
    for x in (torch.randn(9, 40), torch.randn(1, 40).expand(9, -1), torch.randn(40, 9).t()):
        same(lambda x: x.repeat(1, 3), x, verify=True)
        same(lambda x: torch.cat([x.repeat(2, 2), x.repeat_interleave(2, 1).repeat(2, 1)], 1), x, verify=True)
        same(lambda x: x[:, 3:].repeat(1, 9).view(9, 3, -1)[:, 1], x, verify=True)


def test_the_number_of_rows_differs_between_calls():
    compiled = dynamotor.compile(lambda x, y: torch.cat([F.pad(x, (1, 2, 1, 0)), y]), dynamic=True)
    for rows in (3, 70, 9, 200):
        x, y = torch.randn(rows, 30), torch.randn(5, 33)
        assert torch.equal(compiled(x, y), torch.cat([F.pad(x, (1, 2, 1, 0)), y]))


def test_joined_transposed_operands_go_in_tiles():
    x, y = torch.randn(70, 90), torch.randn(70, 40)
    function = lambda x, y: torch.cat([x.t(), y.t().contiguous()])  # noqa: E731
    same(function, x, y, verify=True)
    code = dynamotor.lower(lambda x, y: torch.cat([x.t(), y[:, :70].reshape(40, 70)]), x, y).code
    assert "transpose_(" in code


def test_parts_of_any_width_are_joined_with_what_computes_them():
    x, y = torch.randn(64, 5), torch.randn(64, 3)
    schedule = dynamotor.lower(lambda x, y: torch.cat([x.relu(), y], 1).softmax(1), x, y).schedule
    assert "kernel1" not in schedule and "cat(" not in schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool], ids=str)
def test_long_runs_are_copied_by_the_library(dtype):
    x = filled((600, 5000 // dtype.itemsize), dtype)
    for function in (lambda x: x.roll(7, 0), lambda x: x.flip(0), lambda x: torch.cat([x, x])):
        same(function, x, verify=True)
        assert "copy_(" in dynamotor.lower(function, x).code


def test_bytes_of_another_sign_are_copied():
    x = torch.randint(0, 256, (700, 600), dtype=torch.uint8)
    for function in (lambda x: x.to(torch.int8), lambda x: torch.cat([x, x]).to(torch.int8)):
        same(function, x, verify=True)
        same(lambda x, function=function: function(x).to(torch.uint8), x, verify=True)
    assert "copy_(" in dynamotor.lower(lambda x: x.to(torch.int8), x).code
    same(lambda x: x.to(torch.bool).to(torch.uint8), x, verify=True)


def test_a_moved_place_out_of_range_is_an_error():
    x, at = torch.randn(700, 2048), torch.tensor([3, 700])
    with pytest.raises(IndexError):
        dynamotor.compile(lambda x, at: x[at])(x, at)
