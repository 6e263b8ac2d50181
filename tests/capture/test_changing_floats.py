"""Python floats that differ between calls: inputs of one program where tensors meet them, numbers elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_programs import same
from warned import text_of

import dynamotor
from dynamotor.base.events import counters

NUMBERS = (5.5, 7.25, -9.5, 0.1, 3.0, 1e-3)
PROGRAMS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "all operators": lambda x, f: (f / x, x / f, f - x, x - f, f + x, x + f, f * x, x * f),
    "comparisons of tensors": lambda x, f: (f < x, x <= f, x == f, f != x),
    "no dimensions": lambda x, f: (x.sum() * f, f / x.sum()),
    "arithmetic": lambda x, f: (x * (1.0 - f) + f * f / 3, x * -f, x + abs(f) ** 2, x - f // 2 - f % 3),
    "math": lambda x, f: x * math.sqrt(abs(f)) + math.cos(f) - math.exp(-abs(f)),
    "rounded": lambda x, f: x * round(f, 1) + round(f * 3, 2) - round(f, -1),
    "methods": lambda x, f: x.mul(f).add_(f).div(f),
    "functions": lambda x, f: torch.sub(torch.mul(x, f), f),
    "returned": lambda x, f: (x * 2, f, f * 2, float(f)),
    "asked": lambda x, f: x * f if f is not None and isinstance(f, float) else x,
    "in place": lambda x, f: _in_place(x, f),
}


def _in_place(x: torch.Tensor, f: float) -> torch.Tensor:
    x = x.clone()
    x *= f
    x -= f
    f *= 2
    return x / f


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    dynamotor.reset()
    yield


def captures(fn: Any, calls: list[tuple[Any, ...]], backend: str = "eager") -> int:
    """Compare each call with eager's; how often was captured."""
    before, compiled = counters["frames"]["captured"], dynamotor.compile(fn, backend=backend)
    for args in calls:
        assert same(fn(*args), compiled(*args)), args
    return counters["frames"]["captured"] - before


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_program_serves_all_numbers(name, dtype):
    x = torch.randn(7, dtype=dtype)
    assert captures(PROGRAMS[name], [(x, f) for f in NUMBERS]) == 2


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(("all operators", "arithmetic"), (torch.float32, torch.bfloat16, torch.float16)),
        ("no dimensions", torch.float32),  # PyTorch computes those of 16 bits, and rounds as eager does
    ],
)
def test_the_general_program_gives_the_bits_of_a_special_one(name, dtype):
    x = torch.randn(37).to(dtype)
    general = dynamotor.compile(PROGRAMS[name])
    for f in NUMBERS:
        special = dynamotor.compile(PROGRAMS[name], dynamic=False)
        for a, b in zip(general(x, f), special(x, f), strict=True):
            assert a.dtype is b.dtype and torch.equal(a, b)


def test_tensors_of_whole_and_complex_numbers_take_the_number_too():
    x = torch.randn(7)
    calls = [(x, f) for f in NUMBERS]
    for fn in (
        lambda x, f: (torch.arange(3) * f, f - torch.arange(3), f / x.int(), x.bool() + f, x.long() < f),
        lambda x, f: (x.long().sum() * f, (x > 0).sum() / f),
        lambda x, f: x.to(torch.complex64) * f,
    ):
        assert captures(fn, calls) == 2


def test_what_needs_the_number_itself_is_a_program_each():
    calls = [(torch.randn(7), f) for f in (3.5, 4.5, 5.25, 6.0)]
    assert captures(lambda x, f: x * torch.arange(f).sum(), calls) == len(calls)  # a shape


def test_comparisons_are_guards():
    x = torch.randn(7)
    assert captures(lambda x, f: x * f if f > 1 else x - f, [(x, f) for f in NUMBERS]) == 3
    assert captures(lambda x, f: x * f if f else x, [(x, f) for f in (1.0, 2.0, 0.0, 3.0, 0.0)]) == 3


def test_special_numbers():
    x, before = torch.randn(7), counters["frames"]["captured"]
    compiled = dynamotor.compile(lambda x, f: (x * f, x + f), backend="eager")
    for f in (1.0, 2.0, math.nan, -0.0, math.inf, 0.0, -math.inf):
        for want, got in zip((x * f, x + f), compiled(x, f), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit(), want.signbit())
    assert counters["frames"]["captured"] - before == 2


def test_the_warning_of_the_limit_says_what_to_do(recwarn):
    compiled = dynamotor.compile(lambda x, alpha: x * torch.arange(alpha).sum(), backend="eager")
    with dynamotor.config.patch(cache_size_limit=3):
        for f in map(abs, NUMBERS):
            compiled(torch.randn(3, 2), f)
    assert "alpha differs between calls and is needed as a number" in text_of(recwarn)


def test_other_types_are_other_programs():
    x = torch.randn(7)
    assert captures(lambda x, f: x * f, [(x, f) for f in (1.0, 2.0, 3, 4.0, True, 5.0)]) <= 4


@pytest.mark.parametrize("fn", [lambda x, f: x * (1 / f), lambda x, f: (x * 2, 1 / f)])
def test_what_raises_at_some_number_raises(fn):
    compiled, x = dynamotor.compile(fn, backend="eager"), torch.randn(3)
    for f in (1.0, 2.0, 3.0):
        assert same(fn(x, f), compiled(x, f))
    with pytest.raises(ZeroDivisionError):
        compiled(x, 0.0)
    assert same(fn(x, 4.0), compiled(x, 4.0))


def test_a_number_of_a_module_that_changes():
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = torch.nn.Linear(3, 3), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() * self.scale

    module, before = Scaled(), counters["frames"]["captured"]
    compiled = dynamotor.compile(module)
    for scale in NUMBERS:
        module.scale = scale
        found = []
        for call in (compiled, module.forward):
            x = torch.ones(2, 3, requires_grad=True)
            out = call(x)
            out.sum().backward()
            found.append((out, x.grad, module.linear.weight.grad))
            module.zero_grad(set_to_none=True)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert counters["frames"]["captured"] - before == 2


def test_a_number_that_the_program_changes_itself():
    class Mean:
        value = 2.0

    mean, before, want = Mean(), counters["frames"]["captured"], 2.0
    mean.value = want

    def update(x: torch.Tensor) -> torch.Tensor:
        mean.value = mean.value * 0.9 + 0.1
        return x * mean.value

    compiled = dynamotor.compile(update, backend="eager")
    for _ in range(6):
        out, want = compiled(torch.ones(3)), want * 0.9 + 0.1
        assert mean.value == want and torch.equal(out, torch.ones(3) * want)
    assert counters["frames"]["captured"] - before == 2


def test_explain_shows_the_input():
    compiled = dynamotor.compile(lambda x, f: x * f, backend="eager")
    for f in (1.0, 2.0):
        compiled(torch.randn(3), f)
    assert "f is an input, 2.0 at the capture" in str(dynamotor.explain(compiled)(torch.randn(3), 3.0))


def test_numbers_are_numbers_without_dynamic():
    calls, before = [(torch.randn(3), f) for f in NUMBERS], counters["frames"]["captured"]
    compiled = dynamotor.compile(lambda x, f: x * f, backend="eager", dynamic=False)
    for args in calls:
        compiled(*args)
    assert counters["frames"]["captured"] - before == len(calls)


def test_gpu_kernels_take_the_number_as_an_input():
    pytest.importorskip("triton")
    from bench.triton_interpret import available

    if not available():
        pytest.skip("triton was imported without TRITON_INTERPRET=1")
    compiled = dynamotor.compile(lambda x, f: (x.softmax(-1) * f, x - f), options={"target": "triton"})
    for f in NUMBERS:
        x = torch.randn(5, 33)
        for a, b in zip(compiled(x, f), (x.softmax(-1) * f, x - f), strict=True):
            torch.testing.assert_close(a, b)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _scale


_scale = 1.0


def test_a_function_with_a_backward_of_its_own_reads_a_number():
    global _scale
    compiled = dynamotor.compile(lambda x: _Scaled.apply(x).sin(), backend="eager", fullgraph=True)
    for _scale in (1.0, 2.5, 3.5):
        x = torch.ones(3, requires_grad=True)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), 2.0).cos() * _scale)


def test_a_break_does_not_make_numbers_of_inputs():
    def fn(x: torch.Tensor, f: float) -> torch.Tensor:
        x = x * f
        torch._dynamo.graph_break()
        return x + f

    calls = [(torch.randn(3), f) for f in NUMBERS]
    assert captures(fn, calls) <= 4


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (x * y, y / 2, type(y).__name__, isinstance(y, np.floating)),
        lambda x, y: (1.0 / y * x, y > 100, abs(-y)),
        lambda x, y: (x - math.sqrt(y), float(y) * x),
    ],
)
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(np.float64, (0.5, 1.25, 3.5, math.nan)), (np.int64, (3, 4, 7, -5)), (np.int64, (3, 4, 2**60, 7))],
)
def test_a_number_of_numpys_is_an_input_too(fn, kind, numbers):
    compiled = dynamotor.compile(fn, backend="eager")
    counters.clear()
    x = torch.randn(3)
    for number in numbers:
        if number < 0 and "sqrt" in fn.__code__.co_names:
            continue
        got, want = compiled(x, kind(number)), fn(x, kind(number))
        assert [type(a) for a in got] == [type(a) for a in want]
        torch.testing.assert_close(got[0], want[0], equal_nan=True)
        np.testing.assert_equal(got[1:-1], want[1:-1])
    assert counters["frames"]["captured"] <= 2 + (2**60 in numbers)


class Counted:
    """A step that counts its calls."""

    def __init__(self) -> None:
        self.step, self.decay = 0, 0.9

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x * min(1.0, self.step / 100) / (1 - self.decay**self.step)


SEVERAL: dict[str, Callable[..., Any]] = {
    "sums": lambda x, a, b, n: x * (a + b) - (b - a) ** 2,
    "math": lambda x, a, b, n: x * math.sqrt(a * b) + math.exp(-a / b),
    "with integers": lambda x, a, b, n: (x * (a * n), x + n / 3 * a, x - a**n),
    "integers alone": lambda x, a, b, n: x / (1 - 0.9**n) + math.sqrt(n),
    "with sizes": lambda x, a, b, n: x[:n] * (a / x[:n].shape[0]),
    "answers": lambda x, a, b, n: x * a if a * 5 > b else x * b,
    "whole parts": lambda x, a, b, n: x[: int(a * b + 2)],
    "returned": lambda x, a, b, n: (x + 1, a * b, f"{a / b:.2f} of {n * a:.1f}"),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", SEVERAL)
def test_several_numbers_together_take_one_program(name: str) -> None:
    x = torch.linspace(1, 2, 12).reshape(6, 2)
    calls = [(x, 0.5 + k / 100, 1.5 + k / 50, 2 + k % 4) for k in range(6)]
    assert captures(SEVERAL[name], calls) == 2


@pytest.mark.regression
def test_errors_and_odd_values_of_several_numbers_are_eagers() -> None:
    def fn(x: torch.Tensor, a: float, b: float, n: int) -> Any:
        return x * (a / b) if n else x + a ** (b * n)

    numbers = [
        (1.0, 2.0, 1),
        (2.0, 4.0, 2),
        (1.5, 0.0, 3),
        (math.nan, -0.0, 3),
        (-8.0, 0.5, 0),
        (math.inf, 3.0, 4),
    ]
    compiled, x = dynamotor.compile(fn, backend="eager"), torch.ones(2)
    for args in numbers:
        try:
            expected: Any = fn(x, *args)
        except ZeroDivisionError as error:
            with pytest.raises(ZeroDivisionError, match=str(error)):
                compiled(x, *args)
        else:
            torch.testing.assert_close(compiled(x, *args), expected, equal_nan=True)


@pytest.mark.regression
def test_a_counter_of_calls_takes_one_program() -> None:
    eager, fast = Counted(), Counted()
    compiled = dynamotor.compile(fast.__call__, backend="eager")
    for _ in range(6):
        torch.testing.assert_close(compiled(torch.ones(2)), eager(torch.ones(2)))
    assert counters["frames"]["captured"] <= 3


@pytest.mark.regression
@pytest.mark.parametrize(
    "text", ["math.sqrt(n)", "math.log(n)", "1 / n", "math.exp(n * n)", "0.0**n", "7 % n"]
)
def test_a_result_that_is_not_read_raises_as_in_eager(text: str) -> None:
    fn = eval(f"lambda x, n: ({text}, x + 1)[1]", {"math": math})
    compiled, x = dynamotor.compile(fn, backend="eager"), torch.ones(2)
    for n in (1.0, 2.0, 3.0, 0.0, -1.5, 40.0):
        try:
            fn(x, n)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error), match=str(error)):
                compiled(x, n)
        else:
            torch.testing.assert_close(compiled(x, n), x + 1)


@pytest.mark.regression
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: (x * n, n + x, x % n, x.fmod(n), x == n, x // n, x / n),
        lambda x, n: (x.clamp(0, n), x.clamp_min(n), torch.where(x > 1, x, n), torch.where(x > 1, n, 0)),
        lambda x, n: (
            torch.full((2,), n),
            torch.full_like(x, n),
            x.masked_fill(x > 1, n),
            x.new_full((1,), n),
        ),
        lambda x, n: (torch.tensor([n, 1]), torch.tensor([[n], [2]]), torch.tensor(n), x + (2 * n + 1)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("kind", [np.int64, np.float64, float])
def test_whole_numbers_of_numpys_stay_whole_beside_whole_tensors(
    fn: Any, dtype: torch.dtype, kind: type
) -> None:
    compiled, x = dynamotor.compile(fn, backend="eager"), torch.tensor([1, 2], dtype=dtype)
    for number in (3, 2, 4, 5):
        torch.testing.assert_close(compiled(x, kind(number)), fn(x, kind(number)))
