"""Calls that the CPU refuses are refused: types when an op is recorded, values under `config.xla_debug`; rules that
come late or wrong.
"""

import pytest
import torch
from warned import text_of

jax = pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.base.events import forget_warnings  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.lowering import lowerings, op  # noqa: E402

F = torch.nn.functional


def ones(*shape, dtype=torch.float32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


REFUSED = {
    "float @ long": lambda d: ones(2, 2)(d) @ ones(2, 2, dtype=torch.long)(d),
    "linear of half and float": lambda d: F.linear(ones(2, 2, dtype=torch.half)(d), ones(2, 2)(d)),
    "conv of half and float": lambda d: F.conv1d(ones(1, 2, 2, dtype=torch.half)(d), ones(2, 2, 1)(d)),
    "addmm": lambda d: torch.addmm(ones(2, dtype=torch.double)(d), ones(2, 2)(d), ones(2, 2)(d)),
    "mv": lambda d: ones(2, 2)(d) @ ones(2, dtype=torch.double)(d),
    "float indices": lambda d: F.embedding(ones(2)(d), ones(2, 2)(d)),
    "scatter of another type": lambda d: ones(2)(d).scatter(
        0, ones(2, dtype=torch.long)(d) * 0, ones(2, dtype=torch.double)(d)
    ),
    "index_add of another type": lambda d: ones(2)(d).index_add(
        0, torch.zeros(1, dtype=torch.long, device=d), ones(1, dtype=torch.double)(d)
    ),
    "group norm of two types": lambda d: F.group_norm(ones(1, 2, 3)(d), 2, ones(2, dtype=torch.double)(d)),
    "group norm of doubles with floats": lambda d: F.group_norm(
        ones(1, 2, 3, dtype=torch.double)(d), 2, ones(2)(d)
    ),
    "group norm of halves with a float bias": lambda d: F.group_norm(
        ones(1, 2, 3, dtype=torch.bfloat16)(d), 2, ones(2, dtype=torch.bfloat16)(d), ones(2)(d)
    ),
    "relu of booleans": lambda d: ones(2, dtype=torch.bool)(d).relu(),
    "argmax of booleans": lambda d: ones(2, dtype=torch.bool)(d).argmax(),
    "1 - booleans": lambda d: 1 - ones(2, dtype=torch.bool)(d),
    "integers to a negative power": lambda d: ones(2, dtype=torch.long)(d) ** -1,
    "softmax of integers": lambda d: ones(2, dtype=torch.long)(d).softmax(0),
    "and of floats": lambda d: ones(2)(d) & 1,
    "bce with integers": lambda d: F.binary_cross_entropy(ones(2)(d), ones(2, dtype=torch.long)(d)),
    "attention of two types": lambda d: F.scaled_dot_product_attention(
        *[ones(1, 1, 2, 2, dtype=t)(d) for t in (torch.float, torch.half, torch.float)]
    ),
    "floor_divide by 0": lambda d: ones(2, dtype=torch.long)(d) // 0,
    "remainder of 0": lambda d: ones(2, dtype=torch.long)(d) % 0,
    "fmod of 0": lambda d: torch.fmod(ones(2, dtype=torch.int32)(d), 0),
    "div by 0": lambda d: torch.div(ones(2, dtype=torch.long)(d), 0, rounding_mode="trunc"),
    "div_ by 0": lambda d: ones(2, dtype=torch.long)(d).floor_divide_(0),
    "a number beyond a type": lambda d: ones(2, dtype=torch.int8)(d).fill_(200),
    "a float beyond a type": lambda d: torch.full((2,), 7e4, dtype=torch.half, device=d),
    "a mask's number beyond a type": lambda d: ones(2, dtype=torch.half)(d).masked_fill_(
        ones(2)(d) > 0, -1e9
    ),
    "bounds beyond a type": lambda d: ones(2, dtype=torch.uint8)(d).clamp(max=300),
    "an unsigned -2": lambda d: ones(2, dtype=torch.uint8)(d).fill_(-2.5),
    "a complex number in a float": lambda d: ones(2, dtype=torch.double)(d).fill_(1j),
    "a number less True": lambda d: ones(2)(d) - True,
    "order of a complex number": lambda d: ones(2)(d) < 1j,
    "integers in place to a negative power": lambda d: ones(2, dtype=torch.long)(d).pow_(-1),
    "randint of nothing": lambda d: torch.randint(5, 5, (3,), device=d),
    "randint beyond a type": lambda d: torch.randint(0, 300, (3,), dtype=torch.uint8, device=d),
    "a chance of 1.5": lambda d: ones(2)(d).bernoulli_(1.5),
    "uniform between crossed ends": lambda d: ones(2)(d).uniform_(2, 1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_cpu_refuses_is_refused(what):
    for device in ("cpu", "xla"):
        with pytest.raises((RuntimeError, TypeError)):
            REFUSED[what](device)


NUMBERS = {
    "an infinite half": lambda d: torch.where(ones(2)(d) > 2, ones(2, dtype=torch.half)(d), -1e9),
    "a small truth": lambda d: torch.full((2,), -1e-300, dtype=torch.bool, device=d),
    "a truth below 1": lambda d: ones(2, dtype=torch.bool)(d).masked_fill(ones(2)(d) > 0, 0.1),
    "a long integer": lambda d: torch.addcmul(*[ones(2, dtype=torch.long)(d)] * 3, value=16777217.0),
    "a remainder of halves": lambda d: torch.tensor([0.1, 3.0], device=d).bfloat16() % 0.1,
    "quotients of halves": lambda d: 0.1 // torch.tensor([0.1, 3.0], device=d).half(),
    "powers of complex zeros": lambda d: torch.zeros(2, device=d) ** (1 + 2j),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_beside_tensors_mean_what_they_mean_on_the_cpu(what):
    torch.testing.assert_close(NUMBERS[what]("xla").cpu(), NUMBERS[what]("cpu"), rtol=0, atol=0)


def test_the_default_dtype_is_read_at_each_operation():
    def results(device):
        whole = torch.arange(3, device=device)
        return [whole / 2, whole.sin(), torch.ones(2, device=device), torch.rand(2, device=device) * 0]

    before = results("xla")
    torch.set_default_dtype(torch.float64)
    try:
        wide, expected = results("xla"), results("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for got, want in zip(wide, expected):  # computed after the default was set back
        torch.testing.assert_close(got.cpu(), want)
    assert [x.dtype for x in (*before, *results("xla"))] == [torch.float32] * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint16])
def test_types_that_only_some_cpu_kernels_have_are_the_devices_own_affair(dtype):
    x = torch.arange(4).to("xla").to(dtype)
    assert (x + x).cpu().to(torch.int64).tolist() == [0, 2, 4, 6]


def test_integers_divided_by_an_array_with_zeros_do_not_stop_the_process():
    x, y = torch.tensor([7, 8, -9], device="xla"), torch.tensor([2, 0, 4], device="xla")
    for result, expected in ((x // y, [3, -3]), (x % y, [1, 3]), (torch.fmod(x, y), [1, -1])):
        assert result.cpu()[::2].tolist() == expected


@pytest.mark.parametrize("repeats", [[1, 2, 0], [0, 0, 0]])
def test_repeat_interleave_takes_a_tensor(repeats):
    for x in (torch.arange(6.0).view(3, 2), None):
        counts = torch.tensor(repeats)
        if x is None:
            found, expected = torch.repeat_interleave(counts.to("xla")), torch.repeat_interleave(counts)
        else:
            found, expected = (
                x.to("xla").repeat_interleave(counts.to("xla"), 0),
                x.repeat_interleave(counts, 0),
            )
        assert torch.equal(found.cpu(), expected)


def test_gradients_flow_through_repeat_interleave_with_a_tensor():
    def grad(device):
        x = torch.arange(3.0, requires_grad=True, device=device)
        (x.repeat_interleave(torch.tensor([2, 0, 3], device=device)) ** 2).sum().backward()
        return x.grad.cpu()

    torch.testing.assert_close(grad("xla"), grad("cpu"))


# -- values under xla_debug ----------------------------------------------------------------------------------


def index(*values):
    return torch.tensor(values, device="xla")


WRONG = {
    "index": lambda x: x[index(0, 5)],
    "negative index": lambda x: x[index(-4)],
    "second index": lambda x: x[:, index(3)],
    "index_put": lambda x: x.index_put((index(3),), x[0]),
    "index_put_": lambda x: x.index_put_((index(3),), x[0]),
    "index_select": lambda x: x.index_select(1, index(-1)),
    "gather": lambda x: x.gather(0, index(3, 0).view(1, 2)),
    "scatter": lambda x: x.scatter(0, index(3, 0).view(1, 2), 1.0),
    "embedding": lambda x: F.embedding(index(3), x),
    "take": lambda x: x.take(index(6)),
    "target": lambda x: F.cross_entropy(x, index(0, 1, 2)),
    "divisor": lambda x: index(4, 5) // index(1, 0),
    "remainder": lambda x: index(4, 5) % index(1, 0),
}


LAZY_AND_BRIDGE = [
    *((what, False) for what in WRONG),
    *((what, True) for what in ("index", "target", "index_put_")),
]


@pytest.mark.parametrize("what, compiled", LAZY_AND_BRIDGE)
def test_a_wrong_value_raises_with_its_line_under_debug(what, compiled):
    run = dynamotor.compile(WRONG[what], backend="xla") if compiled else WRONG[what]
    with dynamotor.config.patch(xla_debug=True):
        with pytest.raises(XlaError, match="DM676") as caught:
            run(torch.zeros(3, 2, device="xla")).sum().item()
        assert compiled or "test_recorded_checks.py" in str(caught.value)
        assert torch.ones(2, device="xla").sum().item() == 2


def test_right_values_pass_under_debug():
    with dynamotor.config.patch(xla_debug=True):
        x = torch.arange(6.0, device="xla").view(3, 2)
        assert x[index(-3, 2)].sum().item() == 10
        assert x[torch.tensor([True, False, True], device="xla")].shape == (2, 2)
        F.cross_entropy(x, index(0, -100, 1)).item()


# -- rules ---------------------------------------------------------------------------------------------------


@pytest.fixture
def library():
    with torch.library._scoped_library("xla_test", "DEF") as made:
        yield made
    for target in [t for t in lowerings if "xla_test" in str(t)]:
        del lowerings._rules[target]


def test_a_rule_registered_after_its_op_was_met_is_used(library):
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")
    x = torch.ones(2, device="xla")
    metrics.clear()
    assert torch.ops.xla_test.twice(x).tolist() == [2, 2] and metrics.counters["xla_test::twice"] == 1
    op(torch.ops.xla_test.twice)(lambda x: x + x)
    assert torch.ops.xla_test.twice(x).tolist() == [2, 2] and metrics.counters["xla_test::twice"] == 1


def test_a_rule_gives_the_shape_where_no_meta_kernel_does(library):
    library.define("pair(Tensor x) -> (Tensor, Tensor)")
    library.impl("pair", lambda x: (x[:1] * 3, x.double()), "CPU")
    op(torch.ops.xla_test.pair)(lambda x: (x[:1] * 3, x.astype("float64")))
    metrics.clear()
    one, other = torch.ops.xla_test.pair(torch.ones(2, device="xla"))
    assert one.tolist() == [3] and other.dtype is torch.float64 and metrics.counters["xla_test::pair"] == 0


def test_a_rule_with_a_wrong_shape_is_named_once(library, recwarn):
    forget_warnings()
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    library.impl("same", lambda x: torch.empty_like(x), "Meta")
    op(torch.ops.xla_test.same)(lambda x: x[:1])
    for size in (2, 3):
        assert torch.ops.xla_test.same(torch.ones(size, device="xla")).tolist() == [1] * size
    assert text_of(recwarn).count("xla_test") == 1


def unsolved(x):
    return torch.linalg.inv(x) + 1


@pytest.mark.parametrize("f", [unsolved, dynamotor.compile(unsolved, backend="xla")], ids=["lazy", "bridge"])
def test_what_has_no_solution_is_said_at_the_barrier(f):
    metrics.clear()
    whole = torch.eye(2, device="xla")
    assert f(whole).sum().item() == 6
    with pytest.raises(torch.linalg.LinAlgError, match=r"DM678.*diagonal element 1 is zero"):
        f(whole * 0).cpu()
    assert not [key for key in metrics.all_counters() if key.startswith("aten::")]
    for solve in (torch.linalg.cholesky, lambda a: torch.linalg.solve(a + a, a), torch.linalg.lu_factor):
        with pytest.raises(XlaError, match="DM678"):
            torch.utils._pytree.tree_map(torch.Tensor.cpu, solve(whole * 0 - 0.0))
    assert f(whole).sum().item() == 6


def test_a_mask_that_picks_another_number_of_elements_than_are_put_is_said_at_the_barrier():
    def put(device, count):
        x = torch.arange(6.0, device=device).view(2, 3)
        x[x > 2] = torch.arange(float(count), device=device)
        x[:, x[0] > 0] = torch.ones(2, 2, device=device)
        return x.cpu()

    assert torch.equal(put("xla", 3), put("cpu", 3))
    with pytest.raises(XlaError, match="DM680"):
        put("xla", 2)
    with pytest.raises(RuntimeError):
        put("cpu", 2)


def test_the_last_element_with_a_chance_is_the_last_that_is_drawn():
    weights = torch.tensor([0.3, 0.7, 0.0], device="xla").repeat(64, 1)
    assert torch.multinomial(weights, 512, replacement=True).max() == 1
