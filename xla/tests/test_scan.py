"""Loops on the device give the results of the unrolled Python loop, values and gradients."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

pytest.importorskip("jax")
from children import run_forked  # noqa: E402

import dynamotor.xla  # noqa: E402
from dynamotor.base.errors import DynamotorError  # noqa: E402
from dynamotor.xla import jax_call, metrics  # noqa: E402
from dynamotor.xla.experimental.assume_pure import PureModule, assume_pure  # noqa: E402
from dynamotor.xla.experimental.fori_loop import while_loop  # noqa: E402
from dynamotor.xla.experimental.gradient_accumulation import gradient_accumulation  # noqa: E402
from dynamotor.xla.experimental.scan import scan  # noqa: E402
from dynamotor.xla.experimental.scan_layers import scan_layers  # noqa: E402
from dynamotor.xla.jax_call import call_jax  # noqa: E402

F64 = torch.float64


def both(fn, init, xs, outside=()):
    """scan on the device and unrolled on the CPU: (values, gradients) of each."""
    results = []
    for device in ("cpu", "xla"):
        move = lambda t: t.detach().to(device).requires_grad_(t.requires_grad)  # noqa: E731, B023
        i, x, o = [move(t) for t in init], [move(t) for t in xs], [move(t) for t in outside]
        carry, ys = scan(lambda c, s: fn(c, s, *o), tuple(i), tuple(x))  # noqa: B023
        flat = [*carry, *ys]
        leaves = [t for t in i + x + o if t.requires_grad]
        loss = sum(((k + 1) * t * t).sum() for k, t in enumerate(flat) if t.is_floating_point())
        grads = torch.autograd.grad(loss, leaves) if leaves else []
        results.append([t.detach().cpu() for t in [*flat, *grads]])
    return results


def check(fn, init, xs, outside=()):
    cpu, xla = both(fn, init, xs, outside)
    assert len(cpu) == len(xla)
    for a, b in zip(cpu, xla):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a)


def leaf(*shape):
    return torch.randn(*shape, dtype=F64, requires_grad=True)


def test_cumulative_sum():
    check(lambda c, x: ((c[0] + x[0],), (c[0] + x[0],)), [leaf(3)], [leaf(5, 3)])


def test_recurrent_cell_with_captured_weights():
    def step(c, x, w, u):
        h = torch.tanh(x[0] @ w + c[0] @ u)
        return (h,), (h.sum(-1), h * 2)

    check(step, [leaf(2, 4)], [leaf(6, 2, 3)], [leaf(3, 4), leaf(4, 4)])


def test_integer_carry_and_inputs_that_need_no_gradient():
    def step(c, x):
        h, n = c
        return (h * x[0].sin(), n + 1), (n * 2, h + x[1])

    check(step, [leaf(3), torch.tensor(0)], [torch.randn(4, 3, dtype=F64), leaf(4, 3)])


def test_one_program_for_any_number_of_iterations():
    w = torch.randn(4, 4).to("xla")

    def count(length):
        before = metrics.counters["UncachedCompile"]
        scan(
            lambda c, x: (torch.tanh(c @ w + x), c),
            torch.zeros(4, device="xla"),
            torch.ones(length, 4, device="xla"),
        )[0].cpu()
        return metrics.counters["UncachedCompile"] - before

    count(5)
    assert count(5) == 0


def test_random_numbers_differ_and_the_backward_pass_sees_the_same():
    x = torch.ones(8, 1000, dtype=F64, device="xla", requires_grad=True)
    _, ys = scan(lambda c, x: (c, torch.nn.functional.dropout(x, 0.5)), torch.zeros(1, device="xla"), x)
    ys.sum().backward()
    values, grads = ys.detach().cpu(), x.grad.cpu()
    assert torch.equal(values, grads)
    assert len({tuple(row.tolist()) for row in values}) == 8
    assert 0.4 < (values == 0).double().mean() < 0.6


def test_layers_in_a_loop():
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4)) for _ in range(3)
    ).double()
    x = torch.randn(2, 4, dtype=F64)
    y = x
    for layer in layers:
        y = layer(y)
    y.pow(3).sum().backward()
    expected = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    layers = layers.to("xla")
    z = scan_layers(layers, x.to("xla"))
    z.pow(3).sum().backward()
    torch.testing.assert_close(z.detach().cpu(), y.detach())
    for p, g in zip(layers.parameters(), expected):
        torch.testing.assert_close(p.grad.cpu(), g)
    with pytest.raises(DynamotorError, match="DM674"):
        scan_layers([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)], x)
    with pytest.raises(DynamotorError, match="DM669"):
        scan_layers([torch.nn.BatchNorm1d(4).to("xla").double() for _ in range(2)], x.to("xla"))


def test_what_cannot_be_traced_is_refused():
    total = torch.zeros(3, device="xla")
    init, xs = torch.zeros(3, device="xla"), torch.ones(2, 3, device="xla")
    with pytest.raises(DynamotorError, match="DM669"):
        scan(lambda c, x: (c, total.add_(x)), init, xs)
    with pytest.raises(DynamotorError, match="DM669"):
        scan(lambda c, x: (c, x.add_(1)), init, xs)
    with pytest.raises(DynamotorError, match="DM669"):
        scan(lambda c, x: (c if x.sum().item() else x, x), init, xs)
    with pytest.raises(DynamotorError, match="DM671"):
        scan(lambda c, x: (c[:2], x), init, xs)
    with pytest.raises(DynamotorError, match="DM671"):
        scan(lambda c, x: (c, x[0]), init, (xs, torch.ones(3, 3, device="xla")))
    assert torch.equal(total.cpu(), torch.zeros(3))


def test_gradient_accumulation_equals_separate_backward_passes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).double()
    data, target = torch.randn(4, 6, 5, dtype=F64), torch.randint(0, 3, (4, 6))
    loss_fn = torch.nn.CrossEntropyLoss()
    total = 0.0
    for x, y in zip(data, target):
        loss = loss_fn(model(x), y) / 4
        loss.backward()
        total += loss.item()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model = model.to("xla")

    def step(x, y, n):
        return loss_fn(model(x), y), n + 10

    loss, n = gradient_accumulation(
        step, (data.to("xla"), target.to("xla")), model, torch.tensor(10).to("xla")
    )
    assert n.item() == 50 and loss.item() == pytest.approx(total, abs=1e-6)
    for p, g in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad.cpu(), g)
    gradient_accumulation(step, (data.to("xla"), target.to("xla")), model, torch.tensor(10).to("xla"))
    for p, g in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad.cpu(), 2 * g)


def test_literals_inside_traced_functions():
    x, c = torch.ones(3, 2, device="xla"), torch.zeros(2, device="xla")
    make = lambda: torch.tensor([1.0, 2.0], device="xla")  # noqa: E731
    assert scan(lambda c, x: (c + x * make(), x), c, x)[0].tolist() == [3, 6]
    assert scan(lambda c, x: (c + x * torch.tensor(2.0), x), c, x)[0].tolist() == [6, 6]
    w = torch.ones(2, device="xla", requires_grad=True)
    scan(lambda c, x: (c + x * w * make(), x), c, x)[0].sum().backward()
    assert w.grad.tolist() == [3, 6]
    start = torch.tensor(0, device="xla")
    assert while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + make()), (start, c))[1].tolist() == [3, 6]
    assert assume_pure(lambda x: x + make())(c).tolist() == [1, 2]


def test_a_carry_may_be_written_in_place():
    def total(carry, x):
        carry += x
        return carry, carry * 2

    init = torch.zeros(1, device="xla", requires_grad=True)
    xs = torch.tensor([1.0, 2.0, 3.0], device="xla", requires_grad=True)
    last, rows = scan(lambda c, x: total(c.clone(), x), init, xs)
    expected = torch.autograd.grad(last.sum() + rows.sum(), xs)[0]
    with torch.no_grad():
        assert scan(total, init, xs)[1].flatten().tolist() == [2, 6, 12]
    last, rows = scan(total, init, xs)
    assert torch.equal(torch.autograd.grad(last.sum() + rows.sum(), xs)[0], expected)


def test_a_y_may_have_no_tensors():
    x, c = torch.ones(3, 2, device="xla"), torch.zeros(2, device="xla")
    assert scan(lambda c, x: (c + x, None), c, x)[1] is None
    _, (rows, nothing) = scan(lambda c, x: (c + x, (c, None)), c, x)
    assert nothing is None and rows.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert scan(lambda c, x: (c + x, None), c.cpu(), x.cpu())[1] is None


def test_captured_tensors_live_no_longer_than_their_owners(collector_off):
    w = torch.randn(4, 4, device="xla", requires_grad=True)
    ref, zeros = weakref.ref(w), torch.zeros(4, device="xla")

    def loops(w):
        scan(lambda c, x: (c @ w + x, None), zeros, torch.ones(2, 4, device="xla"))[0].sum().backward()
        start = torch.tensor(0, device="xla")
        while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ w.detach()), (start, w * 1))

    loops(w)
    dynamotor.xla.sync()
    del w
    gc.collect(1)
    dynamotor.xla.sync()
    gc.collect(1)
    assert ref() is None


def test_a_pure_function_is_traced_once():
    traced = []

    def step(c, x):
        traced.append(1)
        return c + x, c * x

    x, c = torch.ones(3, 2, device="xla"), torch.zeros(2, device="xla")
    results = [scan(step, c, x, is_fn_pure=True)[0].tolist() for _ in range(3)]
    assert results == [[3, 3]] * 3 and len(traced) == 1


def test_pure_programs_follow_modes_of_pytorch_and_of_the_module():
    a = torch.randn(4, 4, device="xla")
    product = assume_pure(lambda a, b: a @ b)
    with torch.autocast("xla", torch.bfloat16):
        assert product(a, a).dtype is torch.bfloat16
    assert product(a, a).dtype is torch.float32

    class Doubles(torch.nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    module, x = PureModule(Doubles()), torch.ones(1, device="xla")
    assert module(x).item() == 2
    module.eval()
    assert module(x).item() == 1
    inner = Doubles()
    pure = assume_pure(inner)
    assert pure(x).item() == 2 and (inner.eval(), pure(x).item())[1] == 1


def test_pure_functions_in_pure_functions_and_seeds():
    square = assume_pure(lambda x: x * x)
    outer = assume_pure(lambda x: square(x) + 1)
    x = torch.tensor([3.0], device="xla", requires_grad=True)
    y = outer(x)
    y.backward()
    assert y.item() == 10 and x.grad.item() == 6
    noisy = assume_pure(lambda x: x + torch.rand_like(x), add_rng_seed_argument=True)
    one, same, other = (noisy(x, rng_seed=seed).item() for seed in (1, 1, 2))
    assert one == same != other and 3 <= one < 4


def test_functions_made_anew_are_the_same_jax_function():
    x = torch.ones(3, device="xla")
    before = len(jax_call.functions)
    for _ in range(4):
        assert call_jax(lambda x: x * 2, (x,)).tolist() == [2, 2, 2]
    for k in (2, 3):
        assert call_jax(functools.partial(lambda k, x: x * k, k), (x,)).tolist() == [k] * 3
    assert len(jax_call.functions) - before == 3


def test_layers_take_a_tuple_as_their_arguments():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x, y):
            return self.linear(y).sin(), x

    layers = [Pair().to("xla") for _ in range(3)]
    state = expected = (torch.ones(3, device="xla"), torch.zeros(3, device="xla"))
    for layer in layers:
        expected = layer(*expected)
    torch.testing.assert_close(scan_layers(layers, state), expected)


def test_a_pure_loop_is_traced_once_in_each_direction():
    traced = []

    def step(carry, x):
        traced.append(1)
        return carry + x, x.sin()

    xs = torch.ones(3, 2, device="xla", requires_grad=True)
    for _ in range(3):
        scan(step, torch.zeros(2, device="xla"), xs, is_fn_pure=True)[1].sum().backward()
    assert len(traced) == 2
    torch.testing.assert_close(xs.grad.cpu(), 3 * torch.ones(3, 2).cos())


def test_a_loop_keeps_what_its_backward_pass_reads():
    kept = []
    init = torch.ones(2, device="xla", requires_grad=True)
    xs = torch.ones(5, 2, device="xla", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        carry, ys = scan(lambda c, x: (c * 2, x.sin()), init, xs)
    assert [t for t in kept if t.shape == xs.shape] == [xs]
    (carry.sum() + ys.sum()).backward()
    torch.testing.assert_close(init.grad.cpu(), torch.full((2,), 32.0))
    torch.testing.assert_close(xs.grad.cpu(), torch.ones(5, 2).cos())


def test_errors_are_caught_as_torch_xlas():
    xs = torch.ones(2, 3, device="xla")
    with pytest.raises(ValueError, match="DM671"):
        scan(1000, xs[0], xs)
    with pytest.raises(ValueError, match="mismatched keys"):
        scan_layers([torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))], xs)
    with pytest.raises(AssertionError, match="DM669"):
        scan(lambda c, x: (c, x.add_(1)), xs[0], xs)
    with pytest.raises(AssertionError, match="rng_seed"):
        assume_pure(torch.rand_like, add_rng_seed_argument=True)(xs)


def test_a_traced_function_may_lay_its_argument_out():
    # In a process of its own: a mark turns SPMD mode on, which stays on.
    done = run_forked("""
        import torch
        import dynamotor.xla.start
        from dynamotor.xla.distributed.spmd import xla_sharding as xs
        from dynamotor.xla.experimental.assume_pure import assume_pure
        mesh = xs.Mesh([0], (1,), ("all",))
        x = torch.ones(4, 2, device="xla") * 3
        y = assume_pure(lambda t: xs.mark_sharding(t, mesh, ("all", None)))(x)
        assert torch.equal(y.cpu(), torch.full((4, 2), 3.0))
    """)
    assert done.returncode == 0, done.stderr
