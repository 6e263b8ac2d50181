"""Floats that differ between calls as options of functions, arguments of custom functions and parts of keys
need two programs at most, and give eager's results and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.base.events import counters


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * (k * 2 + 1)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.k, None


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x * 2 if isinstance(k, float) else x * 3

    @staticmethod
    def backward(ctx, g):
        return g * (5 if ctx.k > 1.2 else 7), None


PROGRAMS = {
    "add": lambda x, k: torch.add(x, x * 2, alpha=k),
    "sub": lambda x, k: x.sub(x.sin(), alpha=k),
    "add_": lambda x, k: (x * 1).add_(x, alpha=k),
    "addcmul": lambda x, k: torch.addcmul(x, x, x, value=k),
    "addcdiv": lambda x, k: x.addcdiv(x, x + 5, value=k),
    "addmm": lambda x, k: torch.addmm(x.view(2, 3), x.view(2, 3), x[:3].diag(), beta=k, alpha=k * 2),
    "clamp": lambda x, k: x.clamp(-k, k) + x.clamp(min=k, max=2.5),
    "clamp_min": lambda x, k: x.clamp_min(k),
    "lerp": lambda x, k: torch.lerp(x, x.sin(), k),
    "masked_fill": lambda x, k: x.masked_fill(mask=x > 1, value=k),
    "full": lambda x, k: x * torch.full((6,), k) + torch.full_like(x, k) - x.new_full((6,), k * 2),
    "fill_": lambda x, k: torch.empty(6).fill_(k) * x,
    "where": lambda x, k: torch.where(x > 0, x, k) + torch.where(x > 0, k, 0.0),
    "pow": lambda x, k: (x + 2) ** k + k**x,
    "remainder": lambda x, k: x % k,
    "tensor": lambda x, k: x * torch.tensor(k),
    "leaky_relu": lambda x, k: F.leaky_relu(x, k) + F.elu(x, alpha=k),
    "softplus": lambda x, k: F.softplus(x, k) + F.softplus(x * 3, threshold=k),
    "celu": lambda x, k: F.celu(x, k) + F.celu(x * 100, alpha=k),
    "threshold": lambda x, k: F.threshold(x, k, 0.5) + F.threshold(x, 0.1, k),
    "shrink": lambda x, k: F.hardshrink(x, k) + F.softshrink(x, k) + F.hardtanh(x, -k, k),
    "huber": lambda x, k: (
        F.huber_loss(x, x.detach() * 2, delta=k) + F.smooth_l1_loss(x, x.detach() * 3, beta=k)
    ),
    "pad": lambda x, k: F.pad(x, (1, 2), value=k) * k,
    "layer_norm": lambda x, k: F.layer_norm(x, (6,), x * 2, x, eps=k) + F.rms_norm(x, (6,), x, eps=k),
    "group_norm": lambda x, k: F.group_norm(x.view(1, 6), 3, x, x, eps=k) * F.normalize(x, dim=0, eps=k),
    "instance_norm": lambda x, k: F.instance_norm(x.view(1, 2, 3), weight=x[:2], eps=k) ** 2,
    "batch_norm": lambda x, k: _batch_norm(x.view(3, 2), k),
    "setitem": lambda x, k: _set(x * 1, k),
    "list": lambda x, k: x * torch.tensor([k, 2.0, k + 1, -k, 3, 0.5]),
    "nan_to_num": lambda x, k: (
        x.log().nan_to_num(k) + torch.nan_to_num(x.detach() / 0, 1.0, posinf=k, neginf=-k)
    ),
    "logit": lambda x, k: torch.logit(x, eps=k / 10) + x.logit(k / 8),
    "cosine_similarity": lambda x, k: (
        F.cosine_similarity(x.view(2, 3), x.view(2, 3).flip(0), eps=k * 4) + F.cosine_similarity(x, x, 0, k)
    ),
    "linspace": lambda x, k: x * torch.linspace(0.5, k, 6) + torch.linspace(k, 9, 6),
    "isclose": lambda x, k: (
        x * torch.isclose(x, x * 2, rtol=k / 4) * torch.isclose(x.detach() / 0, x.detach() / 0, atol=k)
    ),
    "quantile": lambda x, k: torch.quantile(x, k / 2) + x.view(2, 3).quantile(k / 3, dim=1),
    "renorm": lambda x, k: torch.renorm(x.view(2, 3), 2, 0, k) + x.view(2, 3).renorm(1, -1, k),
    "margins": lambda x, k: (
        F.triplet_margin_loss(x.view(2, 3), x.view(2, 3) * 2, x.view(2, 3).sin(), margin=k, swap=True)
        + F.margin_ranking_loss(x, x.sin(), x.sign(), margin=k)
    ),
    "function": lambda x, k: Scaled.apply(x, k),
    "key": lambda x, k: {f"loss_{k}": x.sum(), "last": x * 1, f"{k:.3f}": x * 2},
}


def _batch_norm(x, k):
    mean, variance = torch.zeros(2), torch.ones(2)
    normed = F.batch_norm(x, mean, variance, x[0], x[1], True, k / 10, k) ** 2
    return torch.cat([normed, mean[None], variance[None], F.batch_norm(x, mean, variance, eps=k)])


def _set(y, k):
    y[0] = k
    y[y > 1] = k
    return y


def _outcome(program, k):
    x = torch.linspace(-1, 3, 6).requires_grad_()
    found = program(x, k)
    tensors = list(found.values()) if isinstance(found, dict) else [found]
    sum(t.sum() for t in tensors).backward()
    return [t.detach() for t in tensors], x.grad, list(found) if isinstance(found, dict) else None


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_programs_give_eagers_results(name, backend):
    if name == "quantile" and torch.__version__ < "2.13":
        pytest.skip("this PyTorch reads the values of q, which breaks the graph")
    dynamotor.reset()
    before = counters["frames"]["captured"]
    compiled = dynamotor.compile(PROGRAMS[name], backend=backend)
    for i in range(5):
        ours, eager = _outcome(compiled, 1.03 + 0.13 * i), _outcome(PROGRAMS[name], 1.03 + 0.13 * i)
        torch.testing.assert_close(ours[:2], eager[:2])
        assert ours[2] == eager[2]
    assert counters["frames"]["captured"] - before <= 2


def test_a_function_that_looks_at_the_number_gets_it():
    dynamotor.reset()
    compiled = dynamotor.compile(lambda x, k: Branching.apply(x, k), backend="eager")
    for i in range(4):
        k = 1.1 + 0.1 * i
        torch.testing.assert_close(_outcome(compiled, k)[:2], _outcome(Branching.apply, k)[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_types_of_results_are_eagers(dtype):
    def program(x, k):
        return (
            x.clamp(max=k),
            x.masked_fill(x > 1, k),
            torch.where(x > 0, x, k),
            torch.add(x.float(), x, alpha=k),
        )

    dynamotor.reset()
    compiled, x = dynamotor.compile(program, backend="eager"), torch.arange(4).to(dtype)
    for k in (1.5, 1.25, 2.75):
        assert [t.dtype for t in compiled(x, k)] == [t.dtype for t in program(x, k)]
        torch.testing.assert_close(compiled(x, k), program(x, k))


def test_what_eager_refuses_is_refused():
    def program(x, k):
        return x.masked_fill(x > 1, k)

    dynamotor.reset()
    compiled = dynamotor.compile(program, backend="eager")
    for k in (1.5, 2.5):
        compiled(torch.ones(3), k)
    with pytest.raises(RuntimeError, match="overflow"):
        compiled(torch.ones(3), 1e300)


BESIDE_WHOLE_NUMBERS = {
    "add": lambda x, k: torch.add(x, x, alpha=k),
    "addcmul": lambda x, k: torch.addcmul(x, x, x, value=k),
    "fill": lambda x, k: x.clone().fill_(k) + torch.full_like(x, k) + torch.full((3,), k, dtype=x.dtype),
    "masked_fill": lambda x, k: x.masked_fill(x > 0, k),
    "leaky_relu": lambda x, k: F.leaky_relu(x, k),
    "hardtanh": lambda x, k: F.hardtanh(x, -k, k),
    "threshold": lambda x, k: F.threshold(x, k, 2.0),
    "pad": lambda x, k: F.pad(x, (1, 1), value=k),
    "addmm": lambda x, k: torch.addmm(x, x[:, None] * x, x[:, None] * x, alpha=k),
    "setitem": lambda x, k: _set(x.clone(), k),
    "clamp": lambda x, k: x.clamp(-k, k),
}


def _same(x, y):
    if isinstance(y, Exception):
        assert type(x) is type(y)
    else:
        torch.testing.assert_close(x, y, equal_nan=True)


def _results(program, calls):
    found = []
    for arguments in calls:
        try:
            found.append(program(*arguments))
        except (RuntimeError, ValueError) as error:
            found.append(error)
    return found


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
@pytest.mark.parametrize("name", BESIDE_WHOLE_NUMBERS)
def test_the_type_of_a_tensor_rounds_or_refuses_a_number(name, dtype):
    program = BESIDE_WHOLE_NUMBERS[name]
    calls = [(torch.tensor([0, 1, 5]).to(dtype), k) for k in (1.5, 0.75, 16777217.0, 1e-50, 2.0)]
    dynamotor.reset()
    ours = _results(dynamotor.compile(program, backend="eager"), calls)
    for x, y in zip(ours, _results(program, calls), strict=True):
        _same(x, y)


REFUSED = {
    "layer_norm": lambda x, w, k: F.layer_norm(x, x.shape[1:], w, eps=k),
    "rms_norm": lambda x, w, k: F.rms_norm(x, x.shape[1:], w, eps=k),
    "group_norm": lambda x, w, k: F.group_norm(x, 2, w, eps=k),
    "instance_norm": lambda x, w, k: F.instance_norm(x[:, :, None], eps=k),
    "batch_norm": lambda x, w, k: F.batch_norm(x, None, None, w, training=True, eps=k - 0.3),
    "addmm": lambda x, w, k: torch.addmm(w, x, x, alpha=k),
    "normalize": lambda x, w, k: (F.normalize(x, eps=k, out=w), w),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_calls_raise_as_in_eager(name):
    program = REFUSED[name]

    def calls():
        x, w = torch.arange(16.0).view(4, 4), torch.ones(4)
        weights = [w, w, w, w, w[:1], torch.ones(1, 1, 4)]
        yield from ((x, weight.clone(), 0.7 - 0.1 * i) for i, weight in enumerate(weights))
        yield x[:1, :2], torch.ones(2), 0.75

    dynamotor.reset()
    ours = _results(dynamotor.compile(program, backend="eager"), calls())
    for x, y in zip(ours, _results(program, calls()), strict=True):
        _same(x, y)


def test_texts_as_keys_are_read_where_the_program_looks():
    def program(x, n):
        table = {"loss_3": 1, f"loss_{n}": 2}
        table["loss_3"] = 5
        other = {f"a{n}": 0}
        other[f"b{n}"] = 1
        return x * table["loss_3"], len(table), table, other, list({f"c{n}": 2, "d": 3})

    dynamotor.reset()
    compiled = dynamotor.compile(program, backend="eager")
    for n in (5, 3, 4, 3):
        assert str(compiled(torch.ones(2), n)) == str(program(torch.ones(2), n))


@pytest.mark.parametrize(
    "name",
    [
        *("celu", "elu", "softplus", "threshold", "hardshrink", "softshrink", "hardtanh"),
        *("huber_loss", "smooth_l1_loss"),
    ],
)
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_gradients_are_eagers_where_values_are_not_finite(name, backend):
    def program(x, k):
        if name.endswith("loss"):
            number = {"huber_loss": "delta", "smooth_l1_loss": "beta"}[name]
            return getattr(F, name)(x, torch.zeros_like(x), reduction="none", **{number: k})
        return getattr(F, name)(x, *{"threshold": (k, 0.5), "hardtanh": (-k, k)}.get(name, (k,)))

    compiled = dynamotor.compile(program, backend=backend)
    for k in (0.4, 0.5, 0.6):
        found = []
        for run in (compiled, program):
            x = torch.tensor(
                [float("nan"), 200.0, -200.0, float("inf"), -float("inf"), 0.0, 0.1]
            ).requires_grad_()
            y = run(x, k)
            y.sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize("name", ["clamp", "clamp_", "clamp_min", "clamp_max", "normalize"])
def test_gradients_at_a_bound_are_eagers(name):
    """PyTorch 2.14 gives none to a value that equals the number that it is clamped to."""

    def program(x, k):
        if name == "normalize":
            return F.normalize(x, eps=k)
        return getattr(x + 0.0, name)(*{"clamp": (-k, k), "clamp_": (-k, k)}.get(name, (k,)))

    compiled = dynamotor.compile(program, backend="native")
    for k in (0.25, 0.5, 0.75, 1.0):
        found = []
        for run in (compiled, program):
            x = torch.tensor([[k, 0.0], [-k, 0.0], [0.0, 0.1], [2.0, float("nan")]], requires_grad=True)
            y = run(x, k)
            (y * torch.tensor([1.0, 2.0])).sum().backward()
            found.append((y.detach(), x.grad))
        torch.testing.assert_close(*found, equal_nan=True)


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels_last": lambda x: x[None].contiguous(memory_format=torch.channels_last)[0],
    "permuted": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}
FORMULAS = {
    "addmm": lambda x, k: torch.addmm(x[:, 0], x[:, 0], torch.eye(5), beta=k, alpha=k),
    "baddbmm": lambda x, k: torch.baddbmm(x, x, torch.eye(5).expand(3, 5, 5), beta=k),
    "rpow": lambda x, k: k**x,
    "layer_norm": lambda x, k: F.layer_norm(x, (5,), eps=k),
    "rms_norm": lambda x, k: F.rms_norm(x, (5,), eps=k),
    "instance_norm": lambda x, k: F.instance_norm(x, eps=k),
    "batch_norm": lambda x, k: F.batch_norm(x, None, None, training=True, eps=k),
    "renorm": lambda x, k: torch.renorm(x, 2, 0, k),
    "clamp": lambda x, k: x.clamp(max=k),
}


@pytest.mark.regression
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_lays_its_result_out_as_the_function(name):
    for layout in LAYOUTS.values():
        x = layout(torch.randn(3, 4, 5))
        dynamotor.reset()
        compiled = dynamotor.compile(FORMULAS[name], backend="aot_eager")
        for i in range(3):
            ours, eager = compiled(x, 1.03 + 0.13 * i), FORMULAS[name](x, 1.03 + 0.13 * i)
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()


@pytest.mark.regression
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_of_halves_compare_with_the_number_itself(dtype):
    """The number is between two numbers of the dtype, and the input the nearer one."""
    numbers = [1.03 + 0.13 * i for i in range(6)]

    def program(x, k):
        return F.threshold(x, k, 0.5) + F.hardtanh(x, -k, k) * 3 + F.hardshrink(x, k)

    compiled = dynamotor.compile(program, backend="aot_eager")
    for k in numbers:
        found = []
        for run in (compiled, program):
            x = torch.tensor([*numbers, *(-n for n in numbers)], dtype=dtype).requires_grad_()
            result = run(x, k)
            result.sum().backward()
            found.append((result.detach(), x.grad))
        assert all(map(torch.equal, *found))


@pytest.mark.regression
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [torch.lerp, lambda x, y, weight: x.clone().lerp_(y, weight)])
def test_a_weight_beside_halves_keeps_its_digits(fn: Any, dtype: torch.dtype) -> None:
    """bfloat16 has no number between 0.996 and 1."""
    compiled = dynamotor.compile(fn, backend="eager")
    for weight in (0.25, 0.999, 0.9995, 0.001, -0.5):
        x, y = (torch.linspace(*ends, 50).to(dtype).requires_grad_() for ends in ((500, 2000), (-1, 1)))
        results = [call(x, y, weight) for call in (fn, compiled)]
        wide = fn(x.double(), y.double(), weight)
        errors = [float(((found.double() - wide).abs() / (wide.abs() + 1)).max()) for found in results]
        assert errors[1] <= 4 * errors[0]
        torch.testing.assert_close(*[torch.autograd.grad(found.sum(), (x, y)) for found in results])


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_tensors_filled_with_a_number_count_no_write(backend: str) -> None:
    def program(x: torch.Tensor, k: float) -> tuple[torch.Tensor, ...]:
        return torch.full((2,), k), torch.full_like(x, k), x.new_full((3,), k), torch.as_tensor(k)

    compiled, x = dynamotor.compile(program, backend=backend), torch.ones(2, 3).t()
    for k in (0.5, 1.25, -0.0):
        for ours, eager in zip(compiled(x, k), program(x, k), strict=True):
            assert (ours._version, ours.stride()) == (eager._version, eager.stride())
            assert torch.equal(ours, eager) and torch.equal(ours.signbit(), eager.signbit())
