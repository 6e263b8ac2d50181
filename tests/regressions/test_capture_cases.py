"""Mistakes of the capture that models and odd programs have found, as small cases."""

from __future__ import annotations

import enum
import functools
import operator

import pytest
import torch
from torch import nn

import dynamotor


def eager_backend(gm, example_inputs):
    return gm.forward


def test_inputs_of_equal_names_stay_apart():
    """T5: one parameter's name with an index appended was the name of another input."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.w_1, self.inner = (
                nn.Parameter(torch.ones(2)),
                nn.Parameter(torch.ones(2) * 2),
                nn.Linear(2, 2),
            )

        def forward(self, x, w, w_1):
            return x * self.w + self.w_1 * w + w_1

    model, x = Twice(), torch.randn(2)
    compiled = dynamotor.compile(model, backend=eager_backend, fullgraph=True)
    assert torch.equal(compiled(x, x + 1, x + 2), model(x, x + 1, x + 2))


def test_equal_keys_keep_the_first():
    compiled = dynamotor.compile(
        lambda x: (list({True: 1, 1: x}), x + 1),  # noqa: F601
        backend=eager_backend,
        fullgraph=True,
    )
    assert compiled(torch.ones(1))[0][0] is True


def test_a_comprehension_cut_in_the_middle_keeps_its_items():
    """Backward hooks: the list of a resumed comprehension lost what was appended after the break."""

    def f(x):
        return [t for t in (x, x + 1, x + 2) if t.sum() > 0]

    compiled = dynamotor.compile(f, backend=eager_backend)
    for x in (torch.ones(2), torch.ones(2) * -1.5):
        assert len(compiled(x)) == len(f(x))


def test_a_break_inside_iter_does_not_stand_for_the_call():
    """The frame of `__iter__`, entered by the rule of `enumerate`, was resumed as if its result were the
    call's.
    """

    class Rows:
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            print(end="")
            return iter(self.rows)

    def f(x, rows):
        return [x + i + v for i, v in enumerate(rows)]

    compiled, x = dynamotor.compile(f, backend=eager_backend), torch.ones(2)
    for _ in range(2):
        assert all(
            torch.equal(a, b) for a, b in zip(compiled(x, Rows([1, 2])), f(x, Rows([1, 2])), strict=True)
        )


def test_an_attribute_that_is_a_class_is_no_bound_method():
    """`typing.List[int].__origin__` and `(1).__class__` are classes, not methods."""
    compiled = dynamotor.compile(
        lambda x: ((1).__class__, functools.partial(int).func, x), backend=eager_backend, fullgraph=True
    )
    assert compiled(torch.ones(1))[:2] == (int, int)


def test_an_exception_of_a_with_block_that_only_the_trace_raised_has_a_traceback():
    """CPython's WITH_EXCEPT_START crashes on a raised exception without one."""

    class Swallow:
        def __enter__(self):
            return self

        def __exit__(self, kind, value, traceback):
            print(end="")
            return True

    def f(x):
        with Swallow():
            raise KeyError("gone")
        return x + 1

    compiled = dynamotor.compile(f, backend=eager_backend)
    assert compiled(torch.ones(1)).item() == 2 == compiled(torch.ones(1)).item()


def test_a_tensor_named_self() -> None:
    def function(self, other):
        return (self @ other).relu()

    a, b = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(
        dynamotor.compile(function, backend="eager", fullgraph=True)(a, b), function(a, b)
    )


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Half(float, enum.Enum):
    VALUE = 0.5


class Letter(enum.StrEnum):
    A = "a"


class Whole(int):
    pass


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "op",
    [
        *(operator.lt, operator.gt, operator.le, operator.ge, operator.eq, operator.ne, operator.add),
        *(operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
        *(operator.and_, operator.contains, divmod),
    ],
)
def test_numbers_of_enums_and_subclasses_meet_those_of_other_types(op):
    """`Level.LOW == 1.0` was false, and `Level.LOW < 1.5` and `"a" * Whole(3)` raised."""
    values = [
        Level.LOW,
        Level.HIGH,
        Half.VALUE,
        Whole(3),
        "a",
        3,
        1.5,
        1.0,
        True,
        [1.0],
        (3,),
        {1: 2},
    ]

    def outcome(run, *args):
        try:
            return repr(run(*args))
        except Exception as error:
            return type(error), str(error)

    def each(op, left):
        return [outcome(op, left, right) for right in values], left == Letter.A, Letter.A + "a"

    compiled = dynamotor.compile(each, backend=eager_backend)
    with dynamotor.config.patch(cache_size_limit=1000):
        for left in values:
            assert compiled(op, left) == each(op, left), (op, left)


def test_a_set_is_looked_for_as_its_items():
    compiled = dynamotor.compile(
        lambda x, s: (x + 1, {1, 2} in s, s.discard({3})), backend=eager_backend, fullgraph=True
    )
    assert compiled(torch.ones(1), {frozenset({1, 2}), 5})[1] is True


def test_a_view_whose_base_asks_for_a_gradient_can_ask_for_its_own():
    def f(x, y):
        for t in (x, y):
            t.requires_grad_()
        return y

    x = torch.randn(3, 4)
    y = dynamotor.compile(f, backend=eager_backend)(x, x[0])
    y.square().sum().backward()
    assert y.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_results_that_were_written_have_their_versions(grad):
    def f(x):
        a, b = x * 2, x.relu()
        a.add_(1).mul_(2)
        c = b.view(-1)
        c[0] = 5
        print(end="")
        return a, b, c, x + a._version + b._version, (a * x).sum()

    x = torch.randn(3, 4, requires_grad=grad)
    want, got = f(x), dynamotor.compile(f)(x)
    assert [t._version for t in got] == [t._version for t in want]
    torch.testing.assert_close(got, want)
    if grad:
        gradients = [torch.autograd.grad(outs[-1] + outs[3].sum(), x)[0] for outs in (got, want)]
        torch.testing.assert_close(*gradients)
