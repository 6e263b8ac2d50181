"""Products of a few rows whose number is known at the call: beside float64, and which call takes which kernel."""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters
from dynamotor.codegen import cpp, cpp_kernel
from dynamotor.codegen.product_cpp import MOST, MOST_BYTES

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def near(got, x, w, bias=None):
    """got is as near to float64 as the type allows, and laid out as eager's result."""
    want = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    eager = F.linear(x, w, bias)
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[x.dtype]
    size = (x.double().abs() @ w.double().t().abs()).clamp(min=1)
    assert ((got.double() - want).abs() <= unit * want.abs() + 1e-6 * size).all()


def launched(f, x, *rest):
    dynamotor.mark_dynamic(x, 0)
    return str(dynamotor.lower(f, x, *rest).call_program)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(512, 512), (515, 303), (1, 70000), (2113, 33)])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_any_number_of_rows(dtype, k, n, biased):
    generator = torch.Generator().manual_seed(k)
    w = torch.randn(n, k, generator=generator).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if biased else None
    compiled = dynamotor.compile(lambda x: F.linear(x, w, bias))
    with torch.no_grad():
        for rows in (3, 2, 4, 5, 7, 8, 13, MOST[dtype], MOST[dtype] + 1, 1, 0):
            x = torch.randn(rows, k, generator=generator).to(dtype)
            dynamotor.mark_dynamic(x, 0)
            near(compiled(x), x, w, bias)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(512, 512), (515, 303), (1, 70000), (2113, 33), (70, 2500)])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_weights_whose_columns_are_side_by_side(dtype, k, n, biased):
    """transformers' Conv1D (GPT-2) keeps its weights so; a library takes ten times as long for halves."""
    generator = torch.Generator().manual_seed(k)
    w = torch.randn(k, n + 7, generator=generator).to(dtype)[:, 5 : n + 5]
    bias = torch.randn(2 * n, generator=generator).to(dtype)[::2] if biased else None
    compiled = dynamotor.compile(lambda x: F.linear(x, w.t(), bias))
    x = torch.randn(MOST[dtype] + 1, k + 2, generator=generator).to(dtype)[:, 1:-1]
    assert f"if 0 < s0 <= {MOST[dtype]} else" in launched(lambda x, w: F.linear(x, w.t(), bias), x[:4], w)
    with torch.no_grad():
        for rows in (3, 1, 2, 4, 5, 7, 8, 13, MOST[dtype], MOST[dtype] + 1, 0):
            given = x[:rows]
            dynamotor.mark_dynamic(given, 0)
            near(compiled(given), given, w.t(), bias)
    with config.patch(isa="portable"):
        near(dynamotor.compile(lambda x: F.linear(x, w.t(), bias), dynamic=False)(x[:6]), x[:6], w.t(), bias)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_any_instruction_set(dtype, isa, monkeypatch):
    if not cpp_kernel.ISAS[isa].is_here:
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setattr(cpp, "_memo", {})
    x, w = torch.randn(6, 523).to(dtype), torch.randn(131, 523).to(dtype)
    with config.patch(isa=isa), torch.no_grad():
        near(dynamotor.compile(lambda x, w: F.linear(x, w), dynamic=False)(x, w), x, w)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_views_of_weights_and_of_rows(dtype):
    x, w = torch.randn(5, 3, 600).to(dtype)[:, 1, 17:], torch.randn(400, 700).to(dtype)[30:, 60:643]
    dynamotor.mark_dynamic(x, 0)
    with torch.no_grad():
        near(dynamotor.compile(lambda x, w: F.linear(x, w))(x, w), x, w)


def test_threads_share_the_weights():
    x, w = torch.randn(6, 512), torch.randn(1021, 512)
    dynamotor.mark_dynamic(x, 0)
    torch.set_num_threads(3)
    try:
        with torch.no_grad():
            near(dynamotor.compile(lambda x, w: F.linear(x, w))(x, w), x, w)
            columns = w.t().contiguous().t()
            near(dynamotor.compile(lambda x, w: F.linear(x, w))(x, columns), x, columns)
    finally:
        torch.set_num_threads(1)


def test_the_call_chooses_by_the_number_of_rows():
    w = torch.randn(512, 512)
    text = launched(lambda x, w: F.linear(x, w), torch.randn(4, 512), w)
    assert f"if 0 < s0 <= {MOST[torch.float32]} else mm(" in text
    text = str(dynamotor.lower(lambda x, w: F.linear(x, w), torch.randn(4, 512), w).call_program)
    assert "mm" in text and " else " not in text, "a fixed number"
    for w in (torch.randn(1024, 1024)[::2, ::2], torch.randn(64, 512), torch.randn(512, 512).double()):
        text = launched(lambda x, w: F.linear(x, w), torch.randn(4, 512).to(w.dtype), w)
        assert " else " not in text, "neither rows nor columns of weights, few weights, doubles"


def test_numbers_that_are_not_finite_stay_so():
    x, w = torch.randn(4, 512), torch.randn(512, 512)
    x[0, 3], x[1, 5], w[7, 9] = torch.inf, torch.nan, -torch.inf
    got = dynamotor.compile(lambda x, w: F.linear(x, w), dynamic=False)(x, w)
    want = F.linear(x.double(), w.double())
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def test_gradients_of_few_rows():
    x, w = (torch.randn(n, 512, requires_grad=True) for n in (5, 300))
    dynamotor.mark_dynamic(x, 0)
    f = lambda x, w: (F.linear(x, w) / 512**0.5).sin().sum()  # noqa: E731  # large sines have no digits
    got = torch.autograd.grad(dynamotor.compile(f)(x, w), (x, w))
    want = torch.autograd.grad(f(x.double(), w.double()), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Bytes(torch.nn.Module):
    """A linear layer whose weights are bytes."""

    def __init__(self, n, k, kind, biased, dtype):
        super().__init__()
        low, high = (-128, 128) if kind is torch.int8 else (0, 256)
        self.register_buffer("weight", torch.randint(low, high, (n, k), dtype=kind))
        self.register_buffer("bias", torch.randn(n).to(dtype) if biased else None)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (303, 521)])
def test_bytes_times_any_number_of_rows(dtype, kind, biased, n, k):
    model = Bytes(n, k, kind, biased, dtype)
    compiled, folded = dynamotor.compile(model), dict(counters["fold"])
    with torch.no_grad():
        for rows in (3, 2, 5, 8, MOST_BYTES[dtype], MOST_BYTES[dtype] + 1, 1, 0):
            assert rows == 0 or counters["fold"] == folded, "converted weights are constants"
            x = torch.randn(rows, k).to(dtype) / 16
            dynamotor.mark_dynamic(x, 0)
            near(compiled(x), x, model.weight.to(dtype), model.bias)


def test_bytes_are_converted_in_the_kernel_or_where_many_rows_are():
    model = Bytes(512, 512, torch.int8, False, torch.float32)
    text = launched(model, torch.randn(4, 512))
    assert f"if 0 < s0 <= {MOST_BYTES[torch.float32]} else dynamotor_byte_product(" in text
    for rows, own in ((2, False), (3, True), (MOST_BYTES[torch.float32] + 1, False)):
        text = str(dynamotor.lower(model, torch.randn(rows, 512)).call_program)
        assert ("byte_product" in text) == own


def test_bytes_that_are_no_rows_are_left():
    """Columns of weights, parts of converted weights and converted weights with another reader."""
    w = torch.randint(-128, 128, (512, 512), dtype=torch.int8)

    def twice(x):
        wide = w.to(x.dtype)
        return F.linear(x, wide), wide + 1

    for f in (lambda x: x @ w.to(x.dtype), twice, lambda x: F.linear(x, w.to(x.dtype)[:, :512] * 2)):
        x = torch.randn(5, 512)
        dynamotor.mark_dynamic(x, 0)
        assert "byte_product" not in launched(f, x)
        torch.testing.assert_close(dynamotor.compile(f)(x), f(x), rtol=1e-4, atol=1e-2)
