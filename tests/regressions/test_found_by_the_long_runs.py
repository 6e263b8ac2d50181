"""Programs that campaigns of the fuzzers found and cut down: refused as wrong although they were right, or
wrong.
"""

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor.graph.shapes import infer_spec
from dynamotor.graph.spec import TensorSpec

INF = float("inf")


def _pad_of_a_row(x):
    values, _ = x.cummin(1)
    return F.pad(values, (0, 1, 2, 0), value=1.0)[0].add_(1)


def _write_behind_a_negative_pad(x):
    y = F.pad(x, (-1, 1))
    y[..., -1] *= 2
    return y


def _join_of_a_join(x, y):
    joined = torch.hstack([x.cummin(2)[0], y])
    return torch.cat([joined.flatten(), y.sum().flatten()])


def _join_with_its_transpose(x, y):
    return torch.cat([x.flatten(), x.T.flatten()]), F.mse_loss(x, y)


def _end_of_a_join(x, y):
    return torch.cat([x, y], 0)[-2:], x.diff(dim=-1)


# Parts of these lie behind conditions that never hold, or that say something of each loop.
CONDITIONS = {
    "pad": (_pad_of_a_row, (2, 2)),
    "pad that cuts": (_write_behind_a_negative_pad, (2,)),
    "a row of a join": (lambda x: torch.vstack([x, x]).index_select(0, torch.tensor([0])), (2, 2)),
    "a join rolled": (lambda x, y: torch.vstack([x, y]).roll(1, -2), (2, 2), (2,)),
    "a join of a join": (_join_of_a_join, (1, 8, 2), (1, 8, 2)),
    "a join with its transpose": (_join_with_its_transpose, (8, 1, 8), ()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_that_say_where_a_part_is_read(name):
    function, *shapes = CONDITIONS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with dynamotor.config.patch(verify=True):
        got = dynamotor.compile(function)(*inputs)
    torch.testing.assert_close(got, function(*inputs))


def test_a_part_that_is_never_read_where_its_loop_runs():
    x, y = torch.randn(2, requires_grad=True), torch.randn(2)
    torch.autograd.backward(dynamotor.compile(_end_of_a_join)(x, y), [torch.ones(2), torch.ones(1)])
    assert x.grad.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_gelu_of_large_negative_halves_is_zero(dtype, isa):
    if isa == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has no AVX-512: its kernels cannot run here")
    x = torch.tensor([-65504.0, -3e4, -300.0, -7.0, 65504.0] * 7).to(dtype)
    with dynamotor.config.patch(isa=isa):
        got = dynamotor.compile(F.gelu)(x)
    torch.testing.assert_close(got, F.gelu(x))


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_arrives_at_a_loss_of_infinities():
    x, y = torch.tensor([[INF, 1.0], [2.0, 3.0]], requires_grad=True), torch.randn(2, 2, requires_grad=True)

    def both(x, y):
        return F.mse_loss(y.sum(1), x), torch.cat([y, y[..., :1]], -1)

    (want,) = torch.autograd.grad(both(x, y)[1].sum(), y)
    (got,) = torch.autograd.grad(dynamotor.compile(both)(x, y)[1].sum(), y)
    torch.testing.assert_close(got, want)


def _scattered_twice(x):
    return torch.slice_scatter(x, x[1:] * 2, 0, 1), torch.slice_scatter(x, x[1:] * 2, 0, 1)


def _scattered_after_a_write(x):
    x[[0, -1]] = 1
    return torch.slice_scatter(x, x[1:] * 2, 0, 1)


def _scattered_then_written(x):
    return torch.slice_scatter(x, x[1:] * 2, 0, 1).mul_(2)


def _scattered_between(x):
    x = x.unsqueeze(0).as_strided((1, 2, 1, 5), (75, 3, 25, 5))
    return torch.slice_scatter(x, x[1:] * 1, 0, 1)


@pytest.mark.parametrize("function", [_scattered_twice, _scattered_after_a_write, _scattered_then_written])
@pytest.mark.parametrize("columns", [2, 3])
def test_what_is_scattered_into_a_slice_has_its_holes(function, columns):
    first = torch.randn(2, columns)
    second = first.clone()
    want, got = function(first[..., ::2]), dynamotor.compile(function)(second[..., ::2])
    for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (want, got)), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _selected_between(x):
    x = x[:12].view(2, 2, 3)[..., ::2]
    return torch.select_scatter(x, x.select(-1, 0) + 1, -1, -1)


@pytest.mark.parametrize("function", [_scattered_between, _selected_between])
def test_slices_that_interleave_in_memory(function):
    x = torch.randn(80)
    compiled = dynamotor.compile(function)
    with dynamotor.config.patch(verify=True):
        assert torch.equal(compiled(x), function(x))
    assert "DM913" not in str(dynamotor.explain(function)(x).eager)


def _strided_part_of_a_join(x):
    x = x.reshape(1, 1) * 2
    return torch.cat([x, torch.as_strided_copy(x, (1, 1), (1, 1)), x], 1)


def test_what_was_written_whole_lies_elsewhere_than_the_memory():
    x, weight = torch.randn((), requires_grad=True), torch.randn(1, 3)
    want, got = (
        torch.autograd.grad(f(x), x, weight)
        for f in (_strided_part_of_a_join, dynamotor.compile(_strided_part_of_a_join))
    )
    torch.testing.assert_close(got, want)


def _strided_after_a_write(x):
    x.view(6, 3)[..., -1].add_(1)
    return x.as_strided(x.shape, x.stride()) * 2


def test_memory_with_holes_that_was_written_is_addressed_by_eager():
    first, second = torch.randn(2, 3, 6)[..., ::2], torch.randn(2, 3, 6)[..., ::2]
    second.copy_(first)
    torch.testing.assert_close(
        dynamotor.compile(_strided_after_a_write)(second), _strided_after_a_write(first)
    )
    torch.testing.assert_close(second, first)


def _norm_of_halves(x):
    return F.rms_norm((x * x.atan2(x + 1)).unfold(1, 2, 1), (2,))


def test_halves_of_a_norm_are_rounded_in_both_directions():
    x = torch.tensor([[3.0, 0.0], [0.0, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    got = torch.autograd.grad(dynamotor.compile(_norm_of_halves)(x), x, torch.ones(2, 1, 2, dtype=x.dtype))
    assert got[0].diagonal().abs().max() < 1e-6  # the norm of one number beside a zero does not depend on it


def _specs(*args):
    return tuple([TensorSpec.of(a) if isinstance(a, torch.Tensor) else a for a in args])


def _strides(x):
    return [
        step for step, n in zip(x.stride() if isinstance(x, torch.Tensor) else x.stride, x.shape) if n > 1
    ]


@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 3), (2, 2, 1, 1), (2, 1, 2, 2), (1, 2, 1, 2), (2, 3, 2, 1), (1, 1, 2, 2)]
)
def test_strides_of_batch_norm_where_sizes_of_one_fit_two_formats(shape):
    aten, n = torch.ops.aten, torch.rand(shape[1])
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0)]:
        x = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(4)])
        args = (x, n, n, n, n, True, 0.1, 1e-5)
        out, mean, rstd = aten.native_batch_norm(*args)
        assert _strides(infer_spec(aten.native_batch_norm.default, _specs(*args), {})[0]) == _strides(out)
        for grad in (torch.randn_like(out), torch.randn(shape)):
            args = (grad, x, n, n, n, mean, rstd, True, 1e-5, [True] * 3)
            assert _strides(
                infer_spec(aten.native_batch_norm_backward.default, _specs(*args), {})[0]
            ) == _strides(aten.native_batch_norm_backward(*args)[0])


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 3), (2, 2, 1), (2, 2, 3)])
def test_strides_of_a_convolution_in_one_dimension(shape):
    for x in (torch.randn(shape), torch.randn(shape[0], shape[2], shape[1]).mT):
        args = x, torch.randn(2, shape[1], 1), None, [1], [2], [2], False, [0], 1
        assert _strides(infer_spec(torch.ops.aten.convolution.default, _specs(*args), {})) == _strides(
            torch.ops.aten.convolution(*args)
        )


def test_a_loss_of_each_pixel_is_row_major():
    x, y = torch.randn(2, 3, 5, 4), torch.zeros(2, 4, 5, dtype=torch.int64).mT
    got = dynamotor.compile(lambda x, y: F.cross_entropy(x, y, reduction="none"))(x, y)
    assert got.stride() == F.cross_entropy(x, y, reduction="none").stride()


@pytest.mark.parametrize("values", [(3, 3), (4,), (2, 2, 3)])
def test_values_that_do_not_fit_where_they_are_put(values):
    def put(x, at, values):
        return x.index_put((at,), values)

    with pytest.raises((RuntimeError, IndexError), match="shape mismatch"):
        dynamotor.compile(put)(torch.randn(5, 3), torch.tensor([0, 2]), torch.randn(values))


def _write_all(x):
    y = x * 2
    a, b = y.unbind(0)
    a.add_(1)
    return b


def _write_one(x):
    a, _ = (x * 2).chunk(2)
    a[0] = 1
    return a


@pytest.mark.parametrize("function", [_write_all, _write_one])
def test_views_that_come_several_at_once_are_not_written(function):
    errors = []
    for call in (function, dynamotor.compile(function)):
        with pytest.raises(RuntimeError) as error:
            call(torch.randn(2, 2, requires_grad=True))
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_integers_with_a_history():
    def write(x, y):
        x[0] = y
        return x.bitwise_not()

    def args():
        return torch.zeros(1, 1, dtype=torch.int64), torch.tensor(1.5, requires_grad=True)

    assert torch.equal(dynamotor.compile(write)(*args()), write(*args()))


def test_a_name_that_a_closure_keeps_is_deleted_once():
    def twice(x, n=2):
        for _ in range(3):

            def inner():
                return n  # noqa: F821

            del n
        return inner

    with pytest.raises(UnboundLocalError, match="'n'"):
        dynamotor.compile(twice, backend="eager")(torch.ones(1))


class _Held:
    named = property(lambda self: 4.0)


_Held.unnamed = property(lambda self: 4.0)


@pytest.mark.parametrize("name", ["named", "unnamed"])
def test_a_property_without_a_setter_says_what_it_was_told(name):
    def write(x, held):
        setattr(held, name, 1)
        return x

    messages = []
    for call in (write, dynamotor.compile(write, backend="eager")):
        with pytest.raises(AttributeError) as error:
            call(torch.ones(1), _Held())
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("stride", [1, 2])
def test_an_input_of_a_convolution_that_is_written_afterwards(stride: int) -> None:
    """The write went into the channels-last copy that the convolution had been given."""

    def f(x, weight, factor):
        y = torch.nn.functional.conv2d(x, weight, stride=stride)
        x.mul_(factor)
        return y, x + 1

    found = []
    for run in (f, dynamotor.compile(f, fullgraph=True)):
        x = torch.arange(128.0).view(2, 4, 4, 4)
        found.append((run(x, torch.ones(4, 4, 1, 1), torch.tensor(3.0)), x))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_copies_that_address_memory_outside_of_a_view(backend: str) -> None:
    """73001:17803: behind a write into an input, a copy by addresses saw the view's elements alone."""

    def nothing_of_it(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.ge_(y)
        return torch.as_strided_copy(F.layer_norm(x, (1,))[-4:-6:2, :], (1,), (1,))

    def before_it(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.ge_(y)
        return torch.as_strided_copy((x + 3)[1:], (2,), (1,), 0)

    for f, n in ((nothing_of_it, 1), (before_it, 1), (before_it, 3)):
        x = torch.randn(n + 1 if f is before_it else n, 1)
        y = torch.randn(())
        assert torch.equal(dynamotor.compile(f, backend=backend)(x.clone(), y), f(x.clone(), y))
