"""Elementwise lowerings against eager: dtypes, broadcasting, strides, special values."""

import math

import pytest
import torch
import torch.nn.functional as F
from harness import check

import dynamotor
from dynamotor.lower.ir import F32, cast, compare, const, op

SPECIAL = torch.tensor(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        1e-30,
        -1e-30,
        1e-42,
        3e38,
        -3e38,
        float("inf"),
        -float("inf"),
        float("nan"),
        88.0,
        89.0,
        -103.0,
        -88.0,
        20.0,
        3.8,
        -3.9,
        7.9,
        -8.0,
        1e-4,
        2.5,
        -2.5,
    ]
)

UNARY = {
    name: getattr(torch, name)
    for name in (
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "tan",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "erf",
        "erfc",
        "sigmoid",
        "floor",
        "ceil",
        "round",
        "trunc",
        "neg",
        "abs",
        "reciprocal",
        "square",
        "sign",
        "isnan",
        "isinf",
        "relu",
        "frac",
    )
}
UNARY |= {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1, 2),
    "cube": lambda x: x**3,
    "root": lambda x: x**0.5,
    "power": lambda x: x**1.7,
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "atan2": torch.atan2,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
    "lt": torch.lt,
    "eq": torch.eq,
    "ge": torch.ge,
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "pow": lambda a, b: torch.pow(a.abs(), b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "copysign": torch.copysign,
}


def ulps(got, want):
    """Distance in units of the last place of float32; equal infinities and NaNs count as 0."""
    reference = want.float()
    step = torch.finfo(torch.float32).eps * reference.abs().clamp_min(torch.finfo(torch.float32).tiny)
    same = (got == reference) | (got.isnan() & reference.isnan())
    return torch.where(same, torch.zeros(()), ((got.double() - want) / step.double()).abs().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unary_ops(dtype):
    x = torch.cat([SPECIAL, torch.linspace(-9, 9, 100), torch.randn(200) * 30]).to(dtype)
    x = x[x.float().abs() < 1e38] if dtype is torch.bfloat16 else x
    finite = torch.cat([torch.randn(300) * 3, torch.rand(33)]).to(dtype)
    check(
        lambda x: [f(x) for f in UNARY.values()],
        finite,
        tolerance={torch.float32: 1e-5, torch.bfloat16: 1.6e-2}.get(dtype, 1e-12),
    )
    check(
        lambda x: [
            torch.exp(x),
            torch.log(x.abs()),
            torch.tanh(x),
            torch.erf(x),
            torch.sigmoid(x),
            torch.sqrt(x),
            torch.relu(x),
            x.clamp(-1, 1),
        ],
        x,
        tolerance={torch.float32: 1e-6, torch.bfloat16: 1.6e-2}.get(dtype, 1e-12),
    )


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sigmoid", "sqrt"])
def test_float_functions_are_accurate_and_keep_special_values(name):
    f = UNARY[name]
    x = torch.cat(
        [SPECIAL, torch.linspace(-20, 20, 4000), torch.logspace(-30, 30, 500), -torch.logspace(-30, 1.5, 500)]
    )
    (got,) = __import__("harness").compiled(lambda x: (f(x),), x)[0](x)
    want = f(x.double())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf() & x.isinf(), want.isinf() & x.isinf())
    normal = want.abs() > 2e-38
    assert ulps(got, want)[normal & want.float().isfinite()].max() < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shapes", [((5, 33), (5, 33)), ((4, 1, 7), (3, 1)), ((64,), ()), ((2, 3, 40), (1, 3, 1))]
)
def test_binary_ops_broadcast(shapes, dtype):
    a, b = (torch.randn(s, dtype=dtype) * 3 for s in shapes)
    check(
        lambda a, b: [f(a, b) for f in BINARY.values() if f is not torch.maximum] + [torch.maximum(a, b)],
        a,
        b,
        tolerance=2e-5 if dtype is torch.float32 else None,
    )


def test_maximum_propagates_nan_from_either_side():
    nan = float("nan")
    check(
        lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)),
        torch.tensor([nan, 1.0, nan, 2.0] * 8),
        torch.tensor([1.0, nan, nan, 3.0] * 8),
    )


@pytest.mark.parametrize(
    "pair",
    [
        (torch.float32, torch.int64),
        (torch.int32, torch.int64),
        (torch.bool, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.int64, torch.bool),
        (torch.uint8, torch.int32),
        (torch.int8, torch.int8),
    ],
)
def test_type_promotion(pair):
    a, b = ((torch.randn(3, 21) * 4).to(d) for d in pair)
    check(
        lambda a, b: (a + b, a * b, a > b, torch.where(b > 0, a, b), a / (b + 2)),
        a,
        b,
        fallbacks=None,
        tolerance=2e-3 if torch.float16 in pair else None,
    )


def test_scalars_and_zero_dimensional_operands():
    x, s = torch.randn(40), torch.tensor(2.5, dtype=torch.float64)
    check(lambda x, s: (x * s, x + 1.5, 2 - x, x / 3, x * s + s), x, s)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "flipped", "channels_last"])
def test_strided_operands(layout):
    x = {
        "transposed": torch.randn(17, 40).t(),
        "sliced": torch.randn(40, 66)[::2, 1::3],
        "expanded": torch.randn(20, 1).expand(20, 33),
        "flipped": torch.randn(9, 33),
        "channels_last": torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last),
    }[layout]
    y = torch.randn(x.shape)
    check(lambda x, y: x.flip(-1) * 2 + y if layout == "flipped" else torch.sigmoid(x) * 3 + 1, x, y)
    check(lambda x, y: x + y * 2, x, y)


def test_casts_round_and_wrap_as_eager():
    x = torch.randn(100) * 300
    check(
        lambda x: (
            x.to(torch.bfloat16),
            x.to(torch.float16).float() * 3,
            x.to(torch.int32),
            x.to(torch.int64) + 1,
            x.to(torch.bool),
            x.double() * 2,
            x.clamp(-100, 100).to(torch.int8),
        ),
        x,
    )
    i = torch.randint(-1000, 1000, (77,))
    check(lambda i: (i.to(torch.int8), i.float() / 7, i.to(torch.uint8), i.bool(), i.to(torch.bfloat16)), i)


def test_bfloat16_chains_stay_within_one_rounding_of_eager():
    x = torch.randn(64, 33).bfloat16()
    check(lambda x: torch.tanh(x * 2 + 1) * x, x, tolerance=3e-2)


def test_exact_option_rounds_half_precision_at_every_op():
    from dynamotor.base.config import config

    x = torch.randn(64, 33).bfloat16()
    with config.patch(exact=True):
        check(lambda x: (x * 2.7 + 1.3) * x - x, x, tolerance=0)


def test_integer_arithmetic():
    a, b = torch.randint(-50, 50, (130,)), torch.randint(1, 9, (130,))
    check(
        lambda a, b: (
            a // 7,
            a % 7,
            a * b - 3,
            a & b,
            a | b,
            a ^ b,
            ~a,
            -a,
            a.abs(),
            a.clamp(-3, 5),
            a**2,
            torch.div(a, 3, rounding_mode="trunc"),
        ),
        a,
        b,
    )
    check(
        lambda a, b: (a // b, a % b), a, b, fallbacks=["aten.floor_divide.default", "aten.remainder.Tensor"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_arithmetic_on_a_mask_and_constants_is_a_choice_between_two_numbers(dtype):
    x = torch.randn(100)
    check(lambda x: (x > 0).to(dtype) / 0.9 * -0.3, x, tolerance=0 if dtype is not torch.bfloat16 else 1e-2)
    check(lambda x: ((x > 0).to(dtype) - 1) / 0.0, x, tolerance=0)
    chosen = op("div", cast(compare("gt", const(1, F32), const(0, F32)), F32), const(0.9, F32))
    assert chosen.op == "select" and chosen.args[1].args[0] == (torch.ones(()) / 0.9).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_heaviside_takes_the_second_operand_at_zero(dtype):
    x = SPECIAL.to(dtype) if dtype.is_floating_point else torch.tensor([0, 3, 7, 0, 255], dtype=dtype)
    at_zero = torch.arange(len(x)).to(dtype)
    check(lambda x, y: [torch.heaviside(x, y), torch.heaviside(x, y[1])], x, at_zero, kernels=1, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_nan_to_num_gives_what_the_dtype_holds(dtype):
    """Numbers are rounded to the dtype first; without them the ends of its range stand for infinities."""
    x = SPECIAL.to(dtype) if dtype.is_floating_point else torch.arange(-3, 30, dtype=dtype)
    check(
        lambda x: [
            x.nan_to_num(),
            x.nan_to_num(1e9, float("inf"), 1e-9),
            x.nan_to_num(float("nan"), neginf=2.0),
            (x * 60_000).nan_to_num(0.3),  # a product of halves is infinite where memory holds halves
        ],
        x,
        kernels=1,
        tolerance=0 if dtype is not torch.bfloat16 else 1.6e-2,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_an_interpolation_starts_from_the_nearer_end(dtype):
    """Beyond weights of -0.5 and 0.5 from the second one: an infinite end gives NaN there."""
    a = torch.cat([torch.tensor([1.0, 2.0, math.inf, 3.0] * 8), torch.randn(40) * 100]).to(dtype)
    b = torch.cat([torch.tensor([math.inf, 1.0, 2.0, -math.inf] * 8), torch.randn(40)]).to(dtype)
    w = torch.tensor([-0.5, 0.5, 0.499, 0.501, -1.0, 2.0, 0.0, 1.0] * 9).to(dtype)
    for weight in (w, w[:, None], w[4], torch.tensor(0.3, dtype=torch.float64), torch.tensor(2)):
        check(lambda a, b, w: torch.lerp(a, b, w), a, b, weight, kernels=1)
    for number in (-2.0, -0.7, -0.5, -0.3, 0.0, 0.3, 0.5, 1.0):
        check(lambda a, b, n=number: torch.lerp(a, b, n), a, b, kernels=1)
    # The weight is rounded before it is compared.
    check(lambda a, b, w: torch.lerp(a, b, w + 1e-3), a, b, w, kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_log_sigmoid_and_its_gradient_are_loops(dtype):
    x = torch.cat([SPECIAL, torch.tensor([90.0, -90.0, 1e-4, -1e-4])]).to(dtype)
    forward, backward = torch.ops.aten.log_sigmoid_forward, torch.ops.aten.log_sigmoid_backward
    check(lambda x: [*forward(x), forward(x * 2)[0] + 1], x, kernels=1)
    check(lambda g, x, z: backward(g, x, z), torch.ones_like(x), x, forward(x)[1], kernels=1)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=lambda d: str(d)[6:]
)
def test_shifts_by_a_number_are_computed_in_the_loop(dtype):
    info = torch.iinfo(dtype)
    x = torch.cat(
        [
            torch.randint(info.min, info.max, (60,), dtype=dtype),
            torch.tensor([info.min, info.max], dtype=dtype),
        ]
    )
    shifts = lambda a: ((a << 4) >> 4, (a >> 3) + 1, torch.bitwise_left_shift(a, 2), a >> 0)  # noqa: E731
    check(shifts, x, kernels=1)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=lambda d: str(d)[6:]
)
def test_shifts_by_counts_from_memory_are_computed_in_the_loop(dtype):
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (60,), dtype=dtype)
    counts = torch.randint(-3 if info.min else 0, info.bits + 4, (60,)).to(dtype)
    x[:2], counts[2:4] = torch.tensor([info.min, info.max]), torch.tensor([info.min, info.max])
    check(lambda a, b: (a << b, a >> b, torch.bitwise_right_shift(a + 1, b)), x, counts, kernels=1)
    check(lambda a, b: a << b, x[:5, None], counts[None], kernels=1)


def test_shifts_by_numbers_beyond_the_type_are_left_to_aten():
    x = torch.randint(-100, 100, (40,))
    check(lambda a: (a >> 64) + 1, x, fallbacks=["aten.__rshift__.Scalar"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=lambda d: str(d)[6:])
def test_small_powers_of_narrow_integers_wrap(dtype):
    x = torch.arange(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1).to(dtype)
    check(lambda a: (a.square(), a**3, a**4, (a**2) >> 1), x, kernels=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_softplus_and_bounds_by_tensors_are_computed_in_the_loop(dtype):
    x, g = SPECIAL.to(dtype), torch.randn(len(SPECIAL)).to(dtype)
    aten = torch.ops.aten
    check(
        lambda g, x: [
            aten.softplus_backward(g, x, 2, 5),
            aten.softplus_backward(g[0], x, 1, 20),
            aten.clamp_min(x, g),
            aten.clamp_max(x, g[0]),
        ],
        g,
        x,
        kernels=1,
        tolerance=1e-6 if dtype is torch.float32 else 1.6e-2,
    )


OF_HALVES_AND_A_NUMBER = {
    "mul": lambda t, i: (i * t, t * i),
    "div": lambda t, i: (i / t, t / i),
    "atan2": lambda t, i: (torch.atan2(i, t), torch.atan2(t, i)),
    "hypot": lambda t, i: torch.hypot(t, i),
    "pow": lambda t, i: (i**t, t**i),
    "addcmul": lambda t, i: (torch.addcmul(t, t, i), torch.addcmul(t, i, t)),
    "compare": lambda t, i: (t < i, i == t),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", OF_HALVES_AND_A_NUMBER)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_an_integer_without_dimensions_is_rounded_to_the_halves_beside_it(name, half):
    """65536 is infinite in float16, 2049 is 2048 there, and 257 is 256 in bfloat16."""
    f, values = OF_HALVES_AND_A_NUMBER[name], torch.tensor([0.0, 1.0, -0.5, 65504.0]).to(half)
    for number in (65536, 2049, 257):
        i = torch.tensor(number)
        found, wanted = dynamotor.compile(f, dynamic=False)(values, i), f(values, i)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
