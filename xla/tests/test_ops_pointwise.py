"""Elementwise ops, comparisons, activations and complex numbers against aten's CPU kernels, forward and
gradient.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("jax", reason="the XLA rules need jax")

from lowering_harness import FEW_OR_MORE, check, check_opinfo, company, gather  # noqa: E402

from dynamotor.xla import ops_pointwise, promotion  # noqa: E402, F401
from dynamotor.xla.dtypes import TORCH_TO_JAX, torch_dtype  # noqa: E402

nan, inf = float("nan"), float("inf")
UNARY = "abs acos acosh angle asin asinh atan atanh ceil cos cosh deg2rad exp exp2 expm1 floor frac frexp isfinite isinf isnan isneginf isposinf log log10 log1p log2 logical_not nan_to_num neg rad2deg reciprocal round rsqrt sgn sign signbit sin sinc sinh sqrt square tan tanh trunc"
BINARY = "add atan2 clamp clamp_max clamp_min copysign div eq float_power floor_divide fmax fmin fmod ge gt heaviside hypot isclose isin ldexp le logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul ne nextafter pow remainder rsub sub true_divide where __rpow__ __rmod__ __rdiv__"
TERNARY = "addcdiv addcmul lerp mvlgamma"
INTEGER = "bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd lcm"
ACTIVATIONS = "logit sigmoid " + " ".join(
    f"nn.functional.{name}"
    for name in [
        "celu",
        "elu",
        "gelu",
        "glu",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "logsigmoid",
        "mish",
        "prelu",
        "relu",
        "relu6",
        "selu",
        "silu",
        "softplus",
        "softshrink",
        "softsign",
        "tanhshrink",
        "threshold",
    ]
)
COMPLEX = "complex polar angle conj_physical sgn abs exp log sqrt sin tanh add mul div pow reciprocal sigmoid logaddexp"


def agrees(request: pytest.FixtureRequest, dtype: torch.dtype | None, samples: int = 3) -> None:
    """`dtype`, `samples`: where the test has no parameters of these names."""
    mode = company(request, lambda name, dtype=dtype, samples=samples: check_opinfo(name, dtype, samples))
    assert not mode.refused


@pytest.mark.parametrize("samples", FEW_OR_MORE)
@pytest.mark.parametrize("name", f"{UNARY} {BINARY} {TERNARY} {ACTIVATIONS} complex polar".split())
def test_float_ops_and_their_gradients_equal_aten(request, name: str, samples: int) -> None:
    agrees(request, torch.float32)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", f"{UNARY} {BINARY} {INTEGER}".split())
def test_integer_ops_equal_aten(request, name: str) -> None:
    agrees(request, torch.int64)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "exp",
        "rsqrt",
        "lerp",
        "clamp",
        "where",
        "eq",
        "remainder",
        "sign",
        "round",
        "bitwise_not",
        "logical_and",
        "nn.functional.gelu",
        "nn.functional.silu",
        "nn.functional.softplus",
        "nn.functional.elu",
    ],
)
def test_other_dtypes_equal_aten(request, name: str, dtype: torch.dtype) -> None:
    agrees(request, None, samples=2)


@pytest.mark.parametrize("name", COMPLEX.split())
def test_complex_ops_equal_aten(request, name: str) -> None:
    agrees(request, torch.complex64)


# Infinities, nan, both zeros, halves, and numbers whose quotient is not exact. No denormals: XLA's CPU
# kernels flush them to zero.
FLOATS = torch.tensor(
    [
        nan,
        inf,
        -inf,
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.5,
        -2.5,
        3.0,
        -3.0,
        7.9,
        -7.9,
        1e-30,
        1e30,
        100.0,
        20.5,
    ]
)
INTEGERS = torch.tensor(
    [0, 1, -1, 2, -2, 3, 7, -7, 63, 64, 65, 100, 127, -128, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1]
)
EDGES_UNARY = [torch.sign, torch.sgn, torch.round, torch.frac, torch.trunc, torch.exp, torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.sigmoid, torch.tanh, torch.sinc, torch.frexp, torch.signbit, torch.nan_to_num, torch.angle, torch.relu, torch.logical_not, torch.abs, F.softplus, F.elu, F.leaky_relu, F.hardshrink, F.hardswish, F.hardtanh, F.logsigmoid, F.mish]  # fmt: skip
EDGES_BINARY = [torch.add, torch.mul, torch.true_divide, torch.floor_divide, torch.remainder, torch.pow, torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.atan2, torch.copysign, torch.hypot, torch.eq, torch.lt, torch.logaddexp, torch.xlogy, torch.heaviside, torch.nextafter]  # fmt: skip


@pytest.mark.parametrize("fn", EDGES_UNARY, ids=lambda fn: fn.__name__)
def test_special_values_of_one_argument(request, fn) -> None:
    kinds = (FLOATS, FLOATS.double(), FLOATS.bfloat16())
    company(request, lambda fn: gather(lambda: [fn(x) for x in kinds]))


@pytest.mark.parametrize("fn", EDGES_BINARY, ids=lambda fn: fn.__name__)
def test_special_values_of_two_arguments(request, fn) -> None:
    ordinary = FLOATS[(FLOATS.abs() < 1e20) & (FLOATS.abs() != 1e-30) | FLOATS.isnan()]
    with_infinities = torch.cat([ordinary, torch.tensor([inf, -inf])])
    company(request, lambda fn: gather(fn, with_infinities[:, None], with_infinities[None]))


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
def test_quotients_are_rounded_as_aten_does(mode: str | None) -> None:
    ordinary = FLOATS[(FLOATS.abs() < 1e20) & (FLOATS.abs() != 1e-30)]
    check(lambda x, y: torch.div(x, y, rounding_mode=mode), ordinary[:, None], ordinary[None])
    whole = INTEGERS[INTEGERS != -(2**63)]  # aten itself dies of -2**63 / -1
    check(lambda x, y: torch.div(x, y, rounding_mode=mode), whole[:, None], whole[None, 1:])
    check(lambda x: torch.div(x, 49, rounding_mode=mode), torch.arange(-200.0, 200.0))


@pytest.mark.parametrize(
    "fn",
    [torch.pow, torch.bitwise_left_shift, torch.bitwise_right_shift, torch.bitwise_xor, torch.maximum],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_integers_wrap_around_and_shift_as_aten_does(fn, dtype: torch.dtype) -> None:
    values = INTEGERS.to(dtype).unique()
    if fn is torch.pow:
        check(lambda x: [torch.pow(x, n) for n in (0, 1, 2, 5, 64, 100)], values)
        check(lambda x: torch.pow(2, x), values)
    check(fn, values[:, None], values[None])


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, -3, nan, inf])
def test_powers_of_a_constant_exponent(request, exponent: float) -> None:
    kinds = (FLOATS, FLOATS.double(), FLOATS.bfloat16())
    company(request, lambda exponent: gather(lambda: [torch.pow(x, exponent) for x in kinds]))


def test_a_zero_imaginary_part_has_a_sign_on_branch_cuts() -> None:
    z = torch.tensor([complex(a, b) for a in (-2.0, -0.5, 0.5, 2.0) for b in (0.0, -0.0)])
    check(
        lambda: [
            f(z)
            for f in (torch.sqrt, torch.rsqrt, torch.log, torch.acos, torch.asin, torch.acosh, torch.atanh)
        ]
    )


SCALARS = [2, -1, 300, 2.5, True, 2 + 1j]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "fn",
    [
        torch.add,
        torch.mul,
        torch.true_divide,
        torch.maximum,
        torch.eq,
        torch.lt,
        lambda a, b: torch.where(a > 1, a, b),
        torch.pow,
    ],
    ids=lambda fn: fn.__name__,
)
def test_operands_of_two_types_are_promoted_as_torch_does(fn) -> None:
    kinds = (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    )
    tensors = [(torch.rand(4) * 9).to(dtype) for dtype in kinds]
    pairs = []
    for a, b in itertools.product(tensors, [*tensors, *(t[0].clone() for t in tensors), *SCALARS]):
        try:
            result = fn(a, b)
        except (RuntimeError, TypeError):  # a pair that aten refuses
            continue
        if result.dtype in TORCH_TO_JAX:  # bfloat16 and a complex number give bcomplex32 since PyTorch 2.14
            pairs.append((a, b))
    check(lambda: [fn(a, b) for a, b in pairs])
    assert len(pairs) > 40


def test_result_types_are_those_of_torch() -> None:
    import jax.numpy as jnp

    for a, b in itertools.product(
        [jnp.ones(2, jnp.int8), jnp.ones(2, jnp.bfloat16), jnp.ones((), jnp.float64), True, 2, 2.5, 1j],
        repeat=2,
    ):

        def as_torch(v):
            return (
                v
                if isinstance(v, (bool, int, float, complex))
                else torch.ones(v.shape, dtype=torch_dtype(v.dtype))
            )

        assert promotion.result_type(a, b) == torch.result_type(as_torch(a), as_torch(b)), (a, b)


def test_clamp_with_crossing_and_nan_bounds() -> None:
    bounds = [(3.0, 1.0), (nan, 1.0), (-1, None), (-inf, inf)]
    if torch.__version__ >= "2.13":  # the CPU kernels of 2.11 ignore an upper bound that is NaN
        bounds.append((None, nan))
    check(lambda: [torch.clamp(FLOATS, low, high) for low, high in bounds])


def test_a_float_scalar_that_arrives_as_an_array_gives_the_same() -> None:
    import jax.numpy as jnp

    from dynamotor.xla.lowering import Spec, apply, find

    x = jnp.arange(4, dtype=jnp.float32)
    for op in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor):
        rule, out = find(op), Spec((4,), torch.float32)
        assert rule.lifted
        assert (apply(op, rule, (x, jnp.float32(2.5)), {}, out) == apply(op, rule, (x, 2.5), {}, out)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_compared_with_complex_numbers_in_a_type_that_xla_lacks(dtype) -> None:
    x = torch.tensor([2.0, 3.0], dtype=dtype)
    check(lambda: [x == complex(2.0001, 0), x != complex(2.0001, 0), x == 3 + 1j])
