"""Elementwise functions in C++ beside eager's, over all exponents: as exact, and equal where the result is no
ordinary number.
"""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.config import config
from dynamotor.codegen import cpp, cpp_kernel, cpp_prelude

ONE = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "erfc",
    "lgamma",
    "sigmoid",
    "rsqrt",
    "sqrt",
    "floor",
    "ceil",
    "trunc",
    "round",
]
TWO = ["pow", "atan2", "hypot", "fmod", "remainder", "logaddexp", "copysign", "floor_divide"]
ACTIVATIONS = {f.__name__: f for f in (F.elu, F.selu, F.celu, F.softplus, F.mish, F.silu, F.logsigmoid)}
FUNCTIONS = {name: getattr(torch, name) for name in ONE + TWO} | ACTIVATIONS
OURS = [
    "exp",
    "expm1",
    "log",
    "log1p",
    "sigmoid",
    "rsqrt",
    "sqrt",
    "floor",
    "ceil",
    "trunc",
    "round",
    "elu",
    "selu",
    "celu",
    "softplus",
    "silu",
]
PATTERNS = {torch.float32: (torch.int32, 23, 256), torch.float64: (torch.int64, 52, 2048)}


def sample(dtype):
    """Numbers of every exponent and sign, subnormals, infinities and NaN among them, and ordinary ones."""
    whole, digits, exponents = PATTERNS[dtype]
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, 1, (1 << digits) - 1])
    mantissas = torch.cat([ends, torch.randint(1 << digits, (13,), generator=generator)])
    bits = (torch.arange(exponents)[:, None] << digits | mantissas).flatten().to(whole)
    numbers = bits.view(dtype)
    ordinary = torch.rand(5_000, generator=generator, dtype=torch.float64) * torch.tensor([[8.0], [200.0]])
    return torch.cat([numbers, -numbers, (ordinary - ordinary.mean(1, keepdim=True)).flatten().to(dtype)])


def units(value, exact):
    """How far values are from exact ones, in units of the last place; 0 where either is not finite."""
    size = exact.to(value.dtype).abs().clamp(max=torch.finfo(value.dtype).max / 2)
    unit = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
    far = (value.double() - exact.double()).abs() / unit
    return torch.where(value.isfinite() & exact.to(value.dtype).isfinite(), far, 0.0)


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_over_all_exponents(name, dtype):
    if cpp_kernel.machine_width() < 8 and (dtype is torch.float64 or name not in OURS):
        pytest.skip("the C library's function, since the vectors have no other")
    beside_eager(FUNCTIONS[name], dtype, 1 + (name in TWO))


def test_erf_of_doubles_over_all_exponents():
    """Of floats it is a quotient within 5.4 units (test_accuracy.py)."""
    beside_eager(torch.erf, torch.float64, 1)


def beside_eager(function, dtype, operands):
    """As exact as eager, and the same where the result is no ordinary number."""
    x = sample(dtype)
    inputs = (x, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))])[:operands]
    got, eager = dynamotor.compile(lambda *inputs: function(*inputs))(*inputs), function(*inputs)
    if dtype is torch.float32:
        exact = function(*(x.double() for x in inputs))
        assert units(got, exact).max() <= units(eager, exact).max() + 1
    else:  # two functions, each within a unit of the exact result
        assert units(got, eager).max() <= 2
    special = eager.isnan() | eager.isinf() | (eager == 0)
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    places = special & ~eager.isnan() & (eager.isinf() | (got == 0))
    assert torch.equal(got[places], eager[places]) and torch.equal(
        got[places].signbit(), eager[places].signbit()
    )


@pytest.mark.parametrize("name", ["sin", "cos", "tan", "log10", "exp", "erf", "erfc", "atan2"])
@pytest.mark.parametrize("dtype", PATTERNS)
def test_a_result_does_not_depend_on_its_place(name, dtype):
    function = dynamotor.compile(lambda *inputs: getattr(torch, name)(*inputs))
    inputs = torch.rand(2, 77, dtype=dtype)[: 1 + (name in TWO)]
    whole = function(*inputs)
    assert torch.equal(torch.stack([function(*inputs[:, i : i + 1])[0] for i in range(77)]), whole)


def test_a_unit_has_the_functions_that_it_calls():
    text = cpp_prelude.prelude("tanh_(v1)+sin_(v2)", {cpp_kernel.machine_width()})
    assert "T tanh_(" in text and "LIBRARY1(tanh," in text and "LIBRARY1(sin," in text
    assert "expm1_" not in text and "dlsym" not in cpp_prelude.prelude("v1+v2", {4})


def test_without_the_library_functions_are_computed_lane_by_lane(monkeypatch):
    monkeypatch.setattr(
        cpp, "prelude", lambda *args, real=cpp.prelude: real(*args).replace('"Sleef_"', '"Missing_"')
    )
    x = torch.rand(100, dtype=torch.float64)
    with config.patch(cache_dir=""):
        torch.testing.assert_close(
            dynamotor.compile(lambda x: x.sin() + x.atan2(x + 1))(x), x.sin() + x.atan2(x + 1)
        )


@pytest.mark.regression
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_gelu_of_large_negative_halves_is_zero(dtype, isa):
    if isa == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512: its kernels cannot run here")
    x = torch.tensor([-65504.0, -3e4, -300.0, -7.0, 65504.0] * 7).to(dtype)
    with dynamotor.config.patch(isa=isa):
        got = dynamotor.compile(F.gelu)(x)
    torch.testing.assert_close(got, F.gelu(x))
