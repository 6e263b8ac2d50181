"""The result of an op is compared with its shape rule: another size, dtype or None is an error,
never a read of other memory.
"""

import pytest
import torch

import dynamotor
from dynamotor.base.errors import BackendError
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression

_library = torch.library.Library("dm_results", "FRAGMENT")


def define(name, schema, real, fake):
    """An op whose fake may differ from its kernel."""
    _library.define(f"{name}{schema}")
    _library.impl(name, real, "CPU")
    torch.library.register_fake(f"dm_results::{name}", fake, lib=_library)
    return getattr(torch.ops.dm_results, name)


WRONG = {
    "smaller": (lambda x: x[:40].clone(), lambda x: torch.empty_like(x)),
    "larger": (lambda x: torch.cat([x, x]), lambda x: torch.empty_like(x)),
    "dtype": (lambda x: x.double(), lambda x: torch.empty_like(x)),
    "half_dtype": (lambda x: x.half(), lambda x: torch.empty_like(x)),
    "rank": (lambda x: x[None].clone(), lambda x: torch.empty_like(x)),
    "empty_for_scalar": (lambda x: x.new_empty(0), lambda x: x.new_empty(())),
    "one_for_scalar": (lambda x: x[:1].clone(), lambda x: x.new_empty(())),
    "scalar_for_one": (lambda x: x.sum(), lambda x: x.new_empty(1)),
    "scalar_dtype": (lambda x: x.sum().double(), lambda x: x.new_empty(())),
    "meta": (lambda x: torch.empty_like(x, device="meta"), lambda x: torch.empty_like(x)),
    "sparse": (lambda x: x.to_sparse(), lambda x: torch.empty_like(x)),
    "packed": (lambda x: x[None].to_mkldnn(), lambda x: torch.empty_like(x)[None]),
}
OPS = {name: define(name, "(Tensor x) -> Tensor", *both) for name, both in WRONG.items()}


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_fake_is_a_coded_error_that_names_the_op(name):
    op = OPS[name]
    fast = dynamotor.compile(lambda x: op(x) * 2 + 1)
    for _ in range(2):
        with pytest.raises(BackendError, match=f"DM404.*dm_results.{name}"):
            fast(torch.randn(4096))


@pytest.mark.parametrize("name", ["smaller", "dtype", "empty_for_scalar"])
def test_a_wrong_fake_whose_result_is_returned_as_it_is(name):
    op = OPS[name]
    with pytest.raises(BackendError, match="DM404"):
        dynamotor.compile(lambda x: (op(x), x + 1))(torch.randn(64))


def test_the_error_names_the_users_line():
    def program(x):
        y = x + 1
        return OPS["smaller"](y) * 2

    with pytest.raises(BackendError, match=r"test_results_that_differ.*\n.*OPS\[.smaller.\]"):
        dynamotor.compile(program)(torch.randn(4096))


def test_one_of_several_results():
    op = define(
        "two",
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x + 1, x[:3].clone()),
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
    )
    with pytest.raises(BackendError, match="DM404"):
        dynamotor.compile(lambda x: op(x)[0] * op(x)[1])(torch.randn(64))
    first = dynamotor.compile(lambda x: op(x)[0] * 2)  # the wrong one is unread
    torch.testing.assert_close(first(torch.ones(5)), torch.full((5,), 4.0))


def test_none_where_a_tensor_is_foretold_and_a_tensor_where_none_is():
    op = define(
        "maybe",
        "(Tensor x) -> (Tensor, Tensor?)",
        lambda x: (x + 1, x * 2),
        lambda x: (torch.empty_like(x), None),
    )
    with pytest.raises(BackendError, match="DM404.*Tensor.*None"):
        dynamotor.compile(lambda x: op(x))(torch.randn(8))
    op = define(
        "never",
        "(Tensor x) -> (Tensor, Tensor?)",
        lambda x: (x + 1, None),
        lambda x: (torch.empty_like(x), torch.empty_like(x)),
    )
    with pytest.raises(BackendError, match="DM404"):
        dynamotor.compile(lambda x: op(x)[1] + 1)(torch.randn(8))


def test_other_strides_are_laid_out_anew_and_counted():
    op = define(
        "turned", "(Tensor x) -> Tensor", lambda x: x.t().contiguous().t(), lambda x: torch.empty_like(x)
    )
    before = counters["restrided"]["dm_results.turned.default"]
    x = torch.randn(5, 7)
    torch.testing.assert_close(dynamotor.compile(lambda x: op(x) * 2)(x), x * 2)
    assert counters["restrided"]["dm_results.turned.default"] == before + 1


def test_lazily_negated_and_conjugated_results_are_resolved():
    op = define(
        "lazy", "(Tensor x) -> Tensor", lambda x: torch._neg_view(x.clone()), lambda x: torch.empty_like(x)
    )
    x = torch.randn(100)
    torch.testing.assert_close(dynamotor.compile(lambda x: op(x) * 2)(x), -2 * x)
    z = torch.randn(100, dtype=torch.complex64)
    torch.testing.assert_close(dynamotor.compile(lambda z: z.conj().imag * 2)(z), z.conj().imag * 2)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_list_of_another_length(n):
    op = define(
        f"list{n}", "(Tensor x) -> Tensor[]", lambda x: [x + 1] * n, lambda x: [torch.empty_like(x)] * 2
    )
    with pytest.raises(BackendError, match="DM404"):
        dynamotor.compile(lambda x: op(x)[0] * op(x)[1])(torch.randn(8))


def test_distances_between_batches_that_are_broadcast():
    def program(x, y):
        return torch.cdist(y, x)

    found = []
    for function in (program, dynamotor.compile(program)):
        torch.manual_seed(3)
        x, y = torch.randn(2, 3, requires_grad=True), torch.randn(4, 5, 3, requires_grad=True)
        function(x, y).sum().backward()
        found += [x.grad, y.grad]
    torch.testing.assert_close(found[2:], found[:2])
