"""aot_compile against eager on small programs, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import Compiled, check, twins

import dynamotor
from dynamotor.base.config import config


def rand(*shape, grad=False, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def test_pointwise_chain_trains():
    check(lambda x, w: ((x * w).sin().exp() + 1,), rand(3, 4, grad=True), rand(4, grad=True))


def test_linear_layer_norm_softmax():
    def f(x, w, b, g, h):
        return (F.softmax(F.layer_norm(F.linear(x, w, b), (5,), g, h), -1),)

    check(f, rand(2, 3, 4), rand(5, 4, grad=True), rand(5, grad=True), rand(5, grad=True), rand(5, grad=True))


def test_inference_without_grad_inputs():
    compiled = check(lambda x, y: (x @ y, x.t()), rand(3, 3), rand(3, 3))
    assert set(compiled.graphs) == {"inference"}


def test_inference_under_no_grad_with_params():
    with torch.no_grad():
        compiled = check(lambda x, w: (F.linear(x, w),), rand(3, 3), rand(3, 3, grad=True))
    assert set(compiled.graphs) == {"inference"}


def test_batch_norm_updates_its_statistics():
    def f(x, w, b, mean, var, count):
        count.add_(1)
        return (F.batch_norm(x, mean, var, w, b, True, 0.1),)

    compiled = check(
        f,
        rand(4, 3, 5, 5, grad=True),
        rand(3, grad=True),
        rand(3, grad=True),
        torch.zeros(3).double(),
        torch.ones(3).double(),
        torch.tensor(0),
        calls=3,
    )
    assert compiled.ops("forward").count("aten.copy_.default") == 3


def test_batch_norm_eval_and_without_statistics():
    check(
        lambda x, w, b, m, v: (F.batch_norm(x, m, v, w, b, False, 0.1),),
        rand(4, 3, 5, grad=True),
        rand(3, grad=True),
        rand(3, grad=True),
        rand(3),
        rand(3).abs(),
    )
    check(
        lambda x, w, b: (F.batch_norm(x, None, None, w, b, True, 0.1),),
        rand(4, 3, 5, grad=True),
        rand(3, grad=True),
        rand(3, grad=True),
    )


def test_convolution_pool_flatten():
    def f(x, w, b):
        return (F.max_pool2d(F.relu(F.conv2d(x, w, b, padding=1)), 2).flatten(1),)

    check(f, rand(2, 3, 8, 8, grad=True), rand(4, 3, 3, 3, grad=True), rand(4, grad=True))


def test_channels_last_convolution_keeps_strides():
    x = rand(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    check(lambda x, w: (F.relu(F.conv2d(x, w, padding=1)),), x, rand(4, 3, 3, 3, grad=True))


def test_attention_flash_and_math():
    q = [rand(2, 2, 5, 8, grad=True) for _ in range(3)]
    check(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v),), *q)
    check(lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, is_causal=True),), *q)
    check(
        lambda q, k, v, m: (F.scaled_dot_product_attention(q, k, v, attn_mask=m),), *q, torch.rand(5, 5) > 0.3
    )


def test_embedding_and_cross_entropy():
    def f(i, e, w, t):
        return (F.cross_entropy(F.linear(F.embedding(i, e), w).view(-1, 7), t.view(-1)),)

    check(
        f,
        torch.randint(0, 6, (2, 3)),
        rand(6, 4, grad=True),
        rand(7, 4, grad=True),
        torch.randint(0, 7, (2, 3)),
    )


# -- writes --------------------------------------------------------------------------------------------------


def test_in_place_on_a_temporary():
    check(lambda x: (x.sin().mul_(2).add_(x),), rand(3, 4, grad=True))


def test_write_through_a_view_of_a_temporary():
    def f(x):
        y = x * 2
        y[0].mul_(3)
        y[:, 1:3] = x[:, :2]
        y.t()[1] += 1
        return (y,)

    check(f, rand(3, 4, grad=True))


def test_views_see_writes_to_their_base():
    def f(x):
        y = x.clone()
        v = y.view(-1)[2:]
        y.add_(1)
        w = v * 2
        v.mul_(5)
        return (w, y)

    check(f, rand(3, 4, grad=True))


def test_view_kinds_are_written_through():
    def f(x):
        y = x + 0
        y.permute(2, 0, 1)[1].fill_(3)
        y.unsqueeze(0).squeeze(0).transpose(0, 1)[0].zero_()
        torch.diagonal(y, 0, 0, 1).mul_(2)
        y.reshape(-1)[::3] *= 7
        return (y,)

    check(f, rand(3, 3, 4, grad=True))


def test_fills():
    def f(x, v):
        y = x * 2
        y[0].fill_(v)
        y[1] = 3.0
        y[2] = x[0]
        z = torch.empty_like(x).fill_(v.detach())
        return (y, z)

    check(f, rand(3, 4, grad=True), rand(1, grad=True)[0].detach().requires_grad_())


def test_parts_of_a_split_are_written_through():
    def f(x):
        y = x + 0
        a, b = y.split([1, 3], dim=2)
        b.mul_(a)
        p, *_ = y.unbind(1)
        p.add_(1)
        return (y,)

    check(f, rand(3, 3, 4))


def test_inputs_are_mutated_as_in_eager():
    def f(x, buf, w):
        buf[1:].add_(x.sum(0))
        buf.mul_(2)
        return (x * w + buf[0],)

    check(f, rand(2, 3), rand(4, 3), rand(3, grad=True), calls=3)


def test_saved_input_that_is_mutated_later():
    def f(x, buf, w):
        y = (buf.clone() * w).sum()
        buf.add_(x)
        return (y, buf * 2)

    check(f, rand(3), rand(3), rand(3, grad=True), calls=3)


def test_two_inputs_swap_contents():
    def f(a, b):
        t = a.clone()
        a.copy_(b)
        b.copy_(t)
        return (a + 1,)

    check(f, rand(3), rand(3), calls=3)


def test_mutated_input_is_returned():
    def f(x, w):
        x.add_(1)
        return (x, x * w)

    ours, _ = twins([rand(3), rand(3, grad=True)])
    compiled = Compiled(f, ours, 2)
    assert compiled.run(*ours)[0] is ours[0]
    check(f, rand(3), rand(3, grad=True))


def test_mutation_of_a_leaf_under_no_grad_before_its_use():
    def f(x, w):
        with torch.no_grad():
            w.mul_(0.9)
        return (x * w,)

    check(f, rand(3), rand(3, grad=True))


def test_input_that_gains_a_gradient_falls_back():
    def f(x, w):
        x.add_(w)
        return (x * 2,)

    ours, theirs = twins([rand(3), rand(3, grad=True)])
    compiled = Compiled(f, ours, 1, strict=False)
    compiled.run(*ours)[0].sum().backward()
    f(*theirs)[0].sum().backward()
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)
    torch.testing.assert_close(ours[0], theirs[0])


def test_aliased_inputs_that_are_mutated_fall_back():
    base, other = rand(4), rand(4)
    other.copy_(base)

    def f(a, b):
        a.add_(1)
        return (b * 2,)

    compiled = Compiled(f, [base, base[1:]], 1, strict=False)
    torch.testing.assert_close(compiled.run(base, base[1:])[0], f(other, other[1:])[0])


def test_metadata_of_temporaries_changes_in_place():
    check(
        lambda x: (x.sin().t_().unsqueeze_(0).mul_(2).squeeze_(0).transpose_(0, 1) * 2,),
        rand(3, 4, grad=True),
    )


def test_metadata_of_inputs_changes_in_place_by_falling_back():
    check(lambda x: (x.t_().sin(),), rand(3, 4), calls=1, fallback=True)
    check(lambda x: (x.resize_(2).sin(),), rand(3, 4), calls=1, fallback=True)


def test_channels_last_adaptive_pool():
    x = rand(2, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    check(lambda x: (F.adaptive_avg_pool2d(x, 1) * 2,), x)


# -- aliases -------------------------------------------------------------------------------------------------


def test_output_that_is_an_input_is_that_object():
    x, w = rand(3), rand(3, grad=True)
    out = Compiled(lambda x, w: (x, w, x * w), [x, w], 3).run(x, w)
    assert out[0] is x and out[1] is w


def test_views_of_inputs_share_memory():
    x, w = rand(3, 4), rand(4, grad=True)
    out = Compiled(lambda x, w: (x.t()[1], w[1:], w.detach(), x + w), [x, w], 4).run(x, w)
    assert out[0].data_ptr() == x.t()[1].data_ptr()
    assert out[1].requires_grad and not out[2].requires_grad and out[2].data_ptr() == w.data_ptr()
    check(lambda x, w: (x.t()[1], w[1:], w.detach(), x + w), x, w)


def test_outputs_that_share_memory_share_it_after_compilation():
    def f(x):
        y = x * 2
        return y, y.t(), y.view(-1)[1:], y.detach()

    x = rand(3, 4, grad=True)
    out = Compiled(f, [x], 4).run(x)
    assert len({t.untyped_storage().data_ptr() for t in out}) == 1
    check(f, x)


def test_split_outputs():
    def f(x, w):
        return F.linear(x, w).chunk(3, -1)

    check(f, rand(2, 4), rand(6, 4, grad=True))
    check(f, rand(2, 4), rand(6, 4))


def test_clones_do_not_alias():
    x = rand(3)
    a, b, c = Compiled(lambda x: (x.clone(), x.clone().view(3, 1), x.clone()), [x], 3).run(x)
    assert len({t.data_ptr() for t in (a, b, c, x)}) == 4


def test_same_output_twice_is_one_object():
    x = rand(3, grad=True)

    def f(x):
        y = x * 2
        return y, y

    a, b = Compiled(f, [x], 2).run(x)
    assert a is b or a.data_ptr() == b.data_ptr()


# -- autograd surroundings -----------------------------------------------------------------------------------


def test_no_grad_region_detaches():
    def f(x, w):
        with torch.no_grad():
            scale = (x * w).abs().max()
        return (x * w / scale, scale)

    check(f, rand(3), rand(3, grad=True))


def test_unused_and_integer_inputs():
    check(lambda x, i, u: (x[i],), rand(4, 3, grad=True), torch.tensor([0, 2, 2]), rand(5, grad=True))


def test_tied_parameters():
    w = rand(4, 4, grad=True)
    v = w.detach().clone().requires_grad_()
    x = rand(2, 4)

    def f(x, a, b):
        return (F.linear(F.linear(x, a).tanh(), b),)

    out = Compiled(f, [x, w, w], 1).run(x, w, w)[0]
    out.sum().backward()
    f(x, v, v)[0].sum().backward()
    torch.testing.assert_close(w.grad, v.grad)


def test_autocast_region_and_autocast_around():
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (F.linear(F.linear(x, w).relu(), w).sum(-1),)

    check(f, rand(3, 4, dtype=torch.float32), rand(4, 4, grad=True, dtype=torch.float32))

    def g(x, w):
        return (F.linear(F.linear(x, w).relu(), w),)

    with torch.autocast("cpu", torch.bfloat16):
        check(g, rand(3, 4, dtype=torch.float32), rand(4, 4, grad=True, dtype=torch.float32))


def test_some_outputs_get_no_gradient():
    x, y = twins([rand(3, grad=True)])
    f = lambda x: (x * 2, x.sin(), (x > 0).sum())  # noqa: E731
    out = Compiled(f, x, 3).run(*x)
    out[0].sum().backward()
    f(*y)[0].sum().backward()
    torch.testing.assert_close(x[0].grad, y[0].grad)


def test_retain_graph_and_backward_twice():
    x, y = twins([rand(3, grad=True)])
    out = Compiled(lambda x: (x.sin().exp(),), x, 1).run(*x)[0]
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    torch.testing.assert_close(x[0].grad, 2 * torch.autograd.grad(y[0].sin().exp().sum(), y)[0])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_gradients_have_memory_of_their_own():
    a, b, g = rand(3, grad=True), rand(3, grad=True), rand(3)
    Compiled(lambda a, b: (a + b,), [a, b], 1).run(a, b)[0].backward(g)
    assert len({t.untyped_storage().data_ptr() for t in (a.grad, b.grad, g)}) == 3


def test_tangent_of_other_strides():
    x, y = twins([rand(3, 4, grad=True)])
    out = Compiled(lambda x: (x.sin(),), x, 1).run(*x)[0]
    tangent = torch.randn(4, 3, dtype=torch.float64).t()
    out.backward(tangent)
    y[0].sin().backward(tangent)
    torch.testing.assert_close(x[0].grad, y[0].grad)


def test_in_place_change_of_a_saved_output_is_caught():
    x = rand(3, grad=True)
    out = Compiled(lambda x: (x.exp(),), [x], 1).run(x)[0]
    with torch.no_grad():
        out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_non_leaf_inputs():
    a, b = twins([rand(3, grad=True)])
    f = lambda x: (x * x,)  # noqa: E731
    compiled = Compiled(f, [a[0] * 2], 1)
    compiled.run(a[0] * 2)[0].sum().backward()
    f(b[0] * 2)[0].sum().backward()
    torch.testing.assert_close(a[0].grad, b[0].grad)


def test_constants_of_the_program():
    def f(x):
        return (x * torch.tensor(2.5) + torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * torch.arange(3),)

    check(f, rand(3, grad=True))


def test_leaves_made_inside_fall_back():
    check(
        lambda x: (x * torch.ones(3, dtype=torch.float64, requires_grad=True),),
        rand(3),
        calls=1,
        fallback=True,
    )
    check(lambda x: (x.requires_grad_() * 2,), rand(3), calls=1, fallback=True)


def test_gradient_inside_the_program():
    def f(x, w):
        y = (x * w).sin().sum()
        (g,) = torch.autograd.grad(y, w, create_graph=True)
        return (g.pow(2).sum(), y)

    check(f, rand(3), rand(3, grad=True))


def test_lazy_conjugates_fall_back():
    x = torch.randn(3, dtype=torch.complex128).conj()
    compiled = Compiled(lambda x: (x * 2,), [x], 1, strict=False)
    assert not compiled.graphs
    torch.testing.assert_close(compiled.run(x)[0], x * 2)


def test_lazy_conjugates_of_temporaries():
    def f(x):
        y = x * 2
        z = y.conj()
        y.add_(1)
        return (torch.view_as_real(z.resolve_conj()), (z * x).imag)

    check(f, torch.randn(3, dtype=torch.complex128).requires_grad_())


@pytest.mark.regression
@pytest.mark.parametrize("number", [2j, 1 - 3j])
def test_gradients_of_products_with_a_complex_number(number):
    x = torch.randn(3, dtype=torch.complex64).requires_grad_()
    check(lambda x: (torch.view_as_real(x * number), torch.view_as_real(number / x)), x)


def test_as_strided_counts_from_the_storage():
    def f(x):
        y = x.clone()
        y.as_strided((2,), (2,), 1).mul_(3)
        return (y.as_strided((2, 2), (2, 3), 1), y.as_strided((2, 2), (1, 2)) * 2, x * y)

    check(f, rand(20)[5:15].requires_grad_())
    check(lambda x: (x.clone().as_strided((2, 2), (2, 3), 1),), rand(20)[5:15].requires_grad_())


def test_strided_outputs_keep_their_holes():
    check(lambda x: (x.clone()[:, ::2], (x * 2)[1:, ::2]), rand(4, 6))


def test_inference_mode():
    with torch.inference_mode():
        check(lambda x, y: (x.add_(y) * 2,), rand(3), rand(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lstm(dtype):
    lstm = torch.nn.LSTM(3, 4, batch_first=True).to(dtype)

    def f(x, *weights):
        out, (h, c) = torch.func.functional_call(lstm, dict(zip(names, weights)), (x,))
        return out, h, c

    names, weights = zip(*lstm.named_parameters())
    x = rand(2, 5, 3, dtype=dtype)
    check(f, x, *weights, fallback=dtype is torch.float32)
    with torch.no_grad():
        check(f, x, *weights)


# -- randomness ----------------------------------------------------------------------------------------------


def test_dropout_with_eagers_numbers():
    def f(x, w):
        y = F.dropout(x * w, 0.3)
        return (F.dropout(F.linear(y, w), 0.5) + torch.rand(3) + torch.randn_like(y),)

    with config.patch(fallback_random=True):
        check(f, rand(3, 3), rand(3, 3, grad=True), calls=3)


def test_dropout_with_eagers_numbers_in_other_layouts():
    x = rand(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    with config.patch(fallback_random=True):
        check(lambda x: (F.dropout(x, 0.3),), x)
        check(lambda x: (F.dropout(x.t() * 2, 0.3, inplace=True),), rand(3, 4, grad=True))
        check(lambda x: (torch.rand_like(x.t()) + torch.randn_like(x.t()) + x.t(),), rand(3, 4, grad=True))


def test_dropout_repeats_with_the_seed_and_saves_no_mask():
    x = torch.ones(1000, 100, requires_grad=True)
    compiled = Compiled(lambda x: (F.dropout(x, 0.25),), [x], 1)
    torch.manual_seed(3)
    a = compiled.run(x)[0]
    a.sum().backward()
    torch.manual_seed(3)
    b = compiled.run(x)[0]
    c = compiled.run(x)[0]
    assert torch.equal(a, b) and not torch.equal(b, c)
    assert abs((a == 0).float().mean().item() - 0.25) < 0.01
    torch.testing.assert_close(x.grad, a.detach())
    outputs = next(iter(reversed(compiled.graphs["forward"].graph.nodes))).args[0]
    assert [n.meta["val"].nbytes for n in outputs[1:]] == [8]


def test_streams_differ():
    x = torch.ones(1000)
    a, b = Compiled(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), [x], 2).run(x)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
@pytest.mark.parametrize("named", [False, True])
def test_as_strided_of_an_input_inside_of_memory_follows_writes(backend, named):
    def fn(x):
        start = x.storage_offset()
        v = x.as_strided((4,), (1,), storage_offset=start) if named else x.as_strided((4,), (1,), start)
        x.copy_(x.cumsum(0))
        v.add_(5)
        x.mul_(2)
        return v * 1, x * 1

    ours, eager = (torch.arange(60.0).view(5, 4, 3)[1:] for _ in range(2))
    assert all(map(torch.equal, dynamotor.compile(fn, backend=backend)(ours), fn(eager)))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_as_strided_sees_what_lies_between_the_elements_of_an_input(backend):
    def fn(x):
        x.as_strided((1,), (1,), 0).add_(1)
        x[..., 1] = 7
        v = x.as_strided((4,), (1,), 0)
        v.mul_(2)
        return v + 0, x * 1

    ours, eager = (torch.arange(16.0).view(4, 4)[..., ::2] for _ in range(2))
    assert all(map(torch.equal, dynamotor.compile(fn, backend=backend)(ours), fn(eager)))
    assert torch.equal(ours._base, eager._base)


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_running_statistics_have_eagers_versions(backend):
    norm, other = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = torch.randn(5, 4)
    norm(x), dynamotor.compile(other, backend=backend)(x)
    assert [b._version for b in other.buffers()] == [b._version for b in norm.buffers()]
    torch.testing.assert_close(other.running_mean, norm.running_mean)
