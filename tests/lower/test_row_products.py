"""Products of a few rows: one kernel reads the weights once."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import counters

WEIGHT = torch.randint(-127, 127, (256, 512), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALE = torch.rand(256, generator=torch.Generator().manual_seed(1))
ZERO = torch.randint(0, 15, (256, 4, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def scaled_after(x):
    return F.silu((x @ WEIGHT.t().to(x.dtype)) * SCALE.to(x.dtype))


def scaled_before(x):
    return F.linear(x.unsqueeze(0), WEIGHT.to(x.dtype) * SCALE.to(x.dtype)[:, None], SCALE.to(x.dtype))


def grouped(x):
    groups = (WEIGHT.view(256, 4, 128) - ZERO).to(x.dtype) * SCALE.to(x.dtype)[:, None, None]
    return F.linear(x, groups.view(256, 512))


def columns(x):
    return x @ WEIGHT.view(512, 256).to(x.dtype)


def nibbles(low, high, scale):
    """256 rows of 512 weights, two a byte beside one another, in four groups."""
    numbers = torch.stack([low, high], -1).view(256, 4, 128)
    return (numbers * scale[:, None, None]).view(256, 512)


def nibbles_of_unsigned(x):
    packed = WEIGHT.view(torch.uint8)[:, :256]
    return F.linear(x, nibbles(packed & 15, packed >> 4, SCALE.to(x.dtype)))


def nibbles_of_signed(x):
    packed = WEIGHT[:, :256]
    return x @ nibbles(((packed << 4) >> 4).to(x.dtype), (packed >> 4).to(x.dtype), SCALE.to(x.dtype)).t()


def nibbles_in_halves(x):
    packed = WEIGHT.view(torch.uint8)[:, :256]
    return F.linear(x, torch.cat([packed & 15, (packed & 0xF0) >> 4], 1).to(x.dtype)) * SCALE.to(x.dtype)


NIBBLES = [nibbles_of_unsigned, nibbles_of_signed, nibbles_in_halves]


def products(function, x):
    """(the call of a product by a library?, the kernels that read WEIGHT)."""
    text = dynamotor.lower(function, x)
    return "mm" in str(text.call_program), str(text.code).count("i8*")


@pytest.mark.parametrize("function", [scaled_after, scaled_before, grouped, columns, *NIBBLES])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_eagers_error_of_float64(function, rows, dtype):
    x = torch.randn(rows, 512, dtype=dtype)
    exact, eager = function(x.double()), function(x)
    ours = dynamotor.compile(function, dynamic=False)(x)
    assert (ours.dtype, ours.stride()) == (eager.dtype, eager.stride())
    bound = 1.5 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (ours - exact).abs().max() <= bound


@pytest.mark.parametrize(
    ("function", "rows"), [(scaled_after, 2), (scaled_before, 4), (grouped, 4), (columns, 4)]
)
def test_bytes_are_read_once_by_one_kernel(function, rows):
    assert products(function, torch.randn(rows, 512)) == (False, 2)  # the parameter and its cast


@pytest.mark.parametrize("function", [nibbles_of_unsigned, nibbles_of_signed])
@pytest.mark.parametrize("rows", [1, 4])
def test_numbers_that_share_a_byte_are_summed_apart(function, rows):
    """As one sum each vector held numbers of both kinds, and its elements were unpacked one by one."""
    text = dynamotor.lower(function, torch.randn(rows, 512))
    assert "mm" not in str(text.call_program) and "shift" not in str(text.call_program)
    assert "%2" not in str(text.code)


@pytest.mark.parametrize(
    "x", [torch.randn(9, 512), torch.randn(4, 512, dtype=torch.bfloat16), torch.randn(2, 512).double()]
)
def test_more_rows_go_to_the_library(x):
    assert products(scaled_before, x)[0]


def test_no_rows_give_no_rows():
    x = torch.randn(0, 512)
    torch.testing.assert_close(dynamotor.compile(scaled_after, dynamic=False)(x), scaled_after(x))


def test_a_converted_weight_that_is_read_again_is_kept():
    def twice(x):
        weight = WEIGHT.t().to(x.dtype)
        return x @ weight, weight * 2

    assert products(twice, torch.randn(2, 512))[0]


def test_gradients():
    x = torch.randn(3, 512, requires_grad=True)
    (ours,) = torch.autograd.grad(dynamotor.compile(scaled_after, dynamic=False)(x).sum(), x)
    (eager,) = torch.autograd.grad(scaled_after(x.double()).sum(), x)
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-3)


def test_two_products_of_a_row_do_not_share_a_kernel():
    """The weights of the second would be read across their rows."""
    up, down = (torch.randint(-127, 127, shape, dtype=torch.int8) for shape in ((512, 256), (256, 512)))

    def block(x):
        return F.linear(torch.relu(F.linear(x, up.to(x.dtype))), down.to(x.dtype))

    kernels = dynamotor.lower(block, torch.randn(1, 256)).call_program
    assert [line for line in kernels.splitlines() if "sum_dim" in line][1:] and "part" not in kernels


class Layers(torch.nn.Module):
    """Two products with weights of a module, which are constants of a program for inference."""

    def __init__(self, dtype, narrow):
        super().__init__()
        weights = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(3))
        self.register_buffer("weights", (weights * 40).to(torch.int8) if narrow else weights.to(dtype))
        self.dtype = dtype

    def forward(self, x):
        for w in self.weights.unbind():
            x = F.linear(x, w.to(self.dtype) / 40 if w.dtype is torch.int8 else w)
        return x


@pytest.mark.parametrize("narrow", [False, True], ids=["dense", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_a_module_are_read_where_they_are(dtype, narrow):
    model, x = (
        Layers(dtype, narrow),
        torch.randn(1, 512, generator=torch.Generator().manual_seed(4)).to(dtype),
    )
    before = dict(counters["fold"])
    compiled = dynamotor.compile(model)
    with torch.no_grad():
        got, eager = compiled(x), model(x)
        exact = Layers(torch.float64, narrow)
        if not narrow:
            exact.weights = model.weights.double()
        want = exact(x.double())
    assert (got - want).abs().max() <= 1.5 * (eager - want).abs().max() + 1e-3 * want.abs().max()
    assert counters["fold"] == before, "constants of weights are compared with them at each call"
    with torch.no_grad():
        model.weights.mul_(0)
        assert not compiled(x).any()


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float16, 2)], ids=str
)
def test_few_rows_times_weights_in_memory_are_sums(dtype, rows):
    w = torch.randn(512, 512, dtype=dtype)
    for n, library in ((1, False), (rows, False), (rows + 1, True)):
        text = dynamotor.lower(lambda x, w: F.linear(x, w), torch.randn(n, 512, dtype=dtype), w)
        assert ("mm" in str(text.call_program)) == library
    text = dynamotor.lower(lambda x, w: x @ w, torch.randn(1, 512, dtype=dtype), w)
    assert "mm" in str(text.call_program), "columns of weights are strided"
