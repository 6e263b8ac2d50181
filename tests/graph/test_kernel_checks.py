"""What eager refuses is refused: compiled functions raise eager's error for dtypes, numbers that do not fit
and shared memory.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.graph import kernel_checks
from dynamotor.graph.kernel_checks import meet
from dynamotor.graph.spec import TensorSpec

pytestmark = pytest.mark.usefixtures("sizes")


def numbers(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def mask(*shape):
    return torch.ones(shape, dtype=torch.bool)


INDEX = torch.zeros(1, dtype=torch.int64)
OVERLAPS = {
    "write of an expanded input": (lambda x: x.add_(1), lambda: numbers(2).expand(3, 2)),
    "copy into an expanded input": (lambda x: x.copy_(torch.ones(3, 2)), lambda: numbers(2).expand(3, 2)),
    "write of an expanded view": (lambda x: x[:1].expand(3, 2).mul_(2), lambda: numbers(2, 2)),
    "sum with the neighbour": (lambda x: x[1:].add_(x[:-1]), lambda: numbers(5)),
    "product with the neighbour": (lambda x: x[:-1].mul_(x[1:]), lambda: numbers(5)),
    "copy to the neighbour": (lambda x: x[1:].copy_(x[:-1]), lambda: numbers(5)),
    "assignment to the neighbour": (lambda x: x.__setitem__(slice(1, None), x[:-1]), lambda: numbers(5)),
    "sum with the transposed": (lambda x: x.add_(x.t()), lambda: numbers(3, 3)),
    "out is a view of the input": (lambda x: torch.add(x[1:], 1, out=x[:-1]), lambda: numbers(5)),
}
BOOLEANS = {
    "1 - mask": lambda x: 1 - x,
    "mask - 1": lambda x: x - 1,
    "mask - mask": lambda x: x - x,
    "-mask": lambda x: -x,
    "1.0 - mask": lambda x: 1.0 - x,
    "rsub": lambda x: torch.rsub(x, 1),
    "True - mask": lambda x: True - x,
    "float - mask": lambda x: x.float() - x,
    "mul_": lambda x: x.mul_(2),
    "sqrt of a mask's inverse": lambda x: (~x).sub_(x),
}
BYTES = {
    "fill_": lambda x: torch.zeros(3, dtype=torch.uint8).fill_(300),
    "below": lambda x: torch.zeros_like(x).fill_(-300),
    "full": lambda x: torch.full((3,), 300, dtype=torch.uint8),
    "full_like": lambda x: torch.full_like(x, 300),
    "new_full": lambda x: x.new_full((2,), 300),
    "masked_fill": lambda x: x.masked_fill(x > 1, 300),
    "clamp": lambda x: x.clamp(-5, 300),
    "where": lambda x: torch.where(x > 1, x, 300),
    "scatter": lambda x: x.scatter(0, INDEX, 300),
    "index_fill": lambda x: x.index_fill(0, INDEX, 300),
    "pad": lambda x: F.pad(x, (1, 1), value=300),
    "nan": lambda x: x.int().fill_(float("nan")),
    "complex": lambda x: x.float().fill_(1j),
    "half": lambda x: x.half().masked_fill(x > 1, -1e9),
    "full of halves": lambda x: torch.full((3,), 1e10, dtype=torch.half),
    "range of a draw": lambda x: x.float().uniform_(5, 2),
    "deviation of a draw": lambda x: x.float().normal_(5, -2),
    "alpha": lambda x: torch.add(x, x, alpha=2.5),
    "iadd of floats": lambda x: x.__iadd__(torch.ones(3)),
}
DTYPES = {
    "softmax": lambda x: F.softmax(x, -1),
    "gelu": lambda x: F.gelu(x),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "dropout": lambda x: F.dropout(x, 0.5),
    "linear": lambda x: F.linear(x, torch.ones(2, 3)),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "product": lambda x: x @ torch.ones(3, 2),
    "norm of two dtypes": lambda x: F.layer_norm(x.float(), (3,), torch.ones(3).double()),
    "norm over nothing": lambda x: torch.native_layer_norm(x.float(), (), None, None, 1e-5),
    "norm over another size": lambda x: F.layer_norm(x.float(), (2,)),
    "norm with a weight of another size": lambda x: torch.native_layer_norm(
        x.float(), (3,), torch.ones(2, 3), None, 1e-5
    ),
    "put of two dtypes": lambda x: x.float().index_put((INDEX,), torch.ones(1).double()),
    "sum at places of two dtypes": lambda x: x.float().index_add(0, INDEX, torch.ones(1, 3).double()),
    "mask of floats": lambda x: x.float().masked_fill(x.float(), 1.0),
    "several values": lambda x: x.masked_fill(x > 1, torch.ones(2)),
    "bias": lambda x: F.linear(x.float(), torch.ones(2, 3), INDEX),
    "condition of floats": lambda x: torch.where(x.float(), x, x),
    "index of floats": lambda x: x[torch.zeros(1)],
    "embedding of floats": lambda x: torch.nn.functional.embedding(torch.zeros(1), x.float()),
    "gather of floats": lambda x: x.float().gather(0, torch.zeros(1, 1)),
    "index_select of floats": lambda x: x.float().index_select(0, torch.zeros(1)),
    "roll": lambda x: x.roll((1, 2), (0,)),
    "roll along nothing": lambda x: x.roll(1, 5),
    "division by zero": lambda x: x // 0,
    "remainder": lambda x: x % 0,
    "factorisation": lambda x: torch.linalg.cholesky(-x[:2, :2].double()),
    "inverse": lambda x: torch.linalg.inv(x[:2, :2] * 0.0),
}
CASES = {
    **OVERLAPS,
    **{f"booleans: {name}": (fn, lambda: mask(2)) for name, fn in BOOLEANS.items()},
    **{f"bytes: {name}": (fn, lambda: numbers(3, dtype=torch.uint8)) for name, fn in BYTES.items()},
    **{f"integers: {name}": (fn, lambda: numbers(2, 3, dtype=torch.int64)) for name, fn in DTYPES.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_eagers_error_is_raised(name):
    fn, make = CASES[name]
    with pytest.raises(Exception) as eager:  # noqa: PT011
        fn(make())
    with pytest.raises(type(eager.value)) as compiled:
        dynamotor.compile(fn)(make())
    assert type(compiled.value) is type(eager.value) and str(compiled.value) == str(eager.value)


@pytest.mark.parametrize("classes", [2, 5, 9])
@pytest.mark.parametrize(
    "x", [torch.tensor([0, 4, 1]), torch.tensor([[3, -1]]), torch.tensor([1], dtype=torch.int32)]
)
def test_one_hot_looks_at_its_classes(x, classes):
    def fn(x):
        return F.one_hot(x, classes) * 2

    try:
        want = fn(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as raised:
            dynamotor.compile(fn)(x)
        assert str(raised.value) == str(error)
    else:
        assert torch.equal(dynamotor.compile(fn, fullgraph=True)(x), want)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x[:, :2].add_(x[:, 2:]),
        lambda x: x[::2].mul_(x[1::2]),
        lambda x: x.add_(x),
        lambda x: x[0].copy_(x[1]),
        lambda x: x.t().add_(x.t()),
        lambda x: x[1:, 1:].fill_(3),
    ],
)
def test_views_that_do_not_meet_are_written_in_the_graph(fn):
    x, y = numbers(4, 4), numbers(4, 4)
    assert torch.equal(dynamotor.compile(fn, fullgraph=True)(x), fn(y)) and torch.equal(x, y)


def test_windows_that_share_elements_are_written_in_eagers_order():
    def fn(x):
        return x.unfold(0, 2, 1).mul_(2).clone()

    x, y = numbers(5), numbers(5)
    assert torch.equal(dynamotor.compile(fn)(x), fn(y)) and torch.equal(x, y)


def test_whether_views_meet():
    chance = random.Random(0)

    def view():
        shape = tuple(chance.choice([1, 2, 3]) for _ in range(2))
        return TensorSpec(
            shape,
            chance.choice([(1, 1), (4, 1), (1, 4), (6, 2), (0, 1)]),
            torch.float32,
            offset=chance.randrange(8),
        )

    def places(spec):
        return {
            spec.offset + sum(i * s for i, s in zip(index, spec.stride, strict=True))
            for index in itertools.product(*map(range, spec.shape))
        }

    seen = set()
    for _ in range(2000):
        a, b = view(), view()
        if a != b:
            truth = bool(places(a) & places(b))
            assert meet(a, b) or not truth
            nested = a.stride != b.stride or a.stride in ((4, 1), (1, 4), (6, 2))
            assert meet(a, b) == truth or not nested
            seen.add(truth)
    assert seen == {True, False}


def test_what_swaps_the_rows_that_its_numbers_name_is_not_asked():
    """LAPACK looks at no bounds: made-up pivots broke the heap."""
    matrix, pivots = torch.eye(3), torch.tensor([1, 2, 3], dtype=torch.int32)
    kernel_checks.check(torch.ops.aten.linalg_ldl_solve.default, (matrix, pivots, matrix), {})
    assert not any(key[0] is torch.ops.aten.linalg_ldl_solve.default for key in kernel_checks._answers)


@pytest.mark.regression
def test_a_convolution_without_output_channels_is_refused() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(x, w, padding=1) * 2

    for call in (fn, dynamotor.compile(fn)):
        with pytest.raises(RuntimeError, match="at least 1 at dimension 0"):
            call(torch.zeros(1, 0), torch.zeros(0, 1, 0))
