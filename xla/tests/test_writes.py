"""Single cases of views, writes, `out=`, indexing and autograd: the xla device gives the CPU's results, or
refuses the calls that the CPU refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("jax", reason="the xla device needs jax")

import dynamotor.xla  # noqa: E402, F401
from dynamotor.base.errors import XlaError  # noqa: E402
from dynamotor.xla import sync  # noqa: E402

CASES: list[Callable[[torch.Tensor], Any]] = []


def case(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    CASES.append(function)
    return function


@case
def _unsqueeze_in_place(x):
    y = x[0]
    x.unsqueeze_(0)
    x.add_(1)
    return (x, y)


@case
def _t_in_place(x):
    y = x[:, 1]
    x.t_()
    x[0].add_(1)
    return (x, y)


@case
def _transpose_in_place(x):
    x.transpose_(0, 1)
    return (x, x.sum(0))


@case
def _squeeze_of_a_view_in_place(x):
    y = x[:1]
    z = y.squeeze_(0)
    z.add_(1)
    return (x, y, z)


@case
def _swapdims_in_place(x):
    x.swapdims_(0, 1)
    return x


@case
def _resize(x):
    x.resize_(2, 2)
    return x


@case
def _out_is_a_view(x):
    y = torch.zeros(5, 4, dtype=x.dtype, device=x.device)
    torch.mul(x, 2, out=y[1:4])
    return y


@case
def _out_is_resized(x):
    y = torch.zeros(0, dtype=x.dtype, device=x.device)
    torch.mm(x, x.t(), out=y)
    return y


@case
def _out_of_an_op_that_takes_a_dtype(x):
    y = torch.zeros(3, dtype=torch.float64, device=x.device)
    torch.norm(x, 2, [1], False, dtype=torch.float64, out=y)
    return y


@case
def _two_outs(x):
    v = torch.zeros(3, dtype=x.dtype, device=x.device)
    i = torch.zeros(3, dtype=torch.long, device=x.device)
    torch.max(x, 1, out=(v, i))
    return (v, i)


@case
def _integers(x):
    y = (x * 10).long()
    y.add_(3)
    y[0].mul_(2)
    y.div_(2, rounding_mode="floor")
    return y


@case
def _view_as_real_both_ways(x):
    c = torch.complex(x, x + 1)
    r = torch.view_as_real(c)
    r[..., 0].add_(1)
    c.mul_(2)
    return (c, r)


@case
def _conjugate_view(x):
    c = torch.complex(x, x + 1)
    d = c.conj()
    d.add_(1j)
    return (c, d, d.resolve_conj())


@case
def _imaginary_part(x):
    c = torch.complex(x, x + 1)
    c.imag.zero_()
    return c


@case
def _real_part(x):
    c = torch.complex(x, x + 1)
    c.real[0] = 5
    return (c, c.real, c.imag)


@case
def _same_bytes_as_integers(x):
    y = x.float()
    z = y.view(torch.int32)
    z.add_(1)
    z[0].bitwise_and_(4294901760 - 2**32)
    return (y, z)


@case
def _same_bytes_as_smaller_integers(x):
    y = x.clone()
    z = y.view(torch.uint8)
    z[..., 7] ^= 128
    return y


@case
def _setitem_mask(x):
    x[x > 0] = 0
    return x


@case
def _setitem_mask_by_values(x):
    m = x > 0
    x[m] = x[m] * 2
    return x


@case
def _setitem_lists(x):
    x[[0, 2], [1, -1]] = 7
    return x


@case
def _setitem_slice_and_list(x):
    x[1:, [0, 3]] += 1
    return x


@case
def _getitems(x):
    return (
        x[1:, [0, 3]],
        x[None, ..., 1],
        x[[True, False, True]],
        x[torch.tensor([1, 0], device=x.device)],
        x[::2, ::3],
    )


@case
def _index_on_the_cpu(x):
    return x[torch.tensor([1, 0])]


@case
def _setitem_index_on_the_cpu(x):
    x[torch.tensor([1, 0])] = 1
    return x


@case
def _setitem_mask_on_the_cpu(x):
    x[torch.tensor([True, False, True])] = 1
    return x


@case
def _putcpu(x):
    x[0] = (
        torch.ones(4, dtype=x.dtype) if x.device.type == "cpu" else torch.ones(4, dtype=x.dtype, device="xla")
    )
    return x


@case
def _setscalart(x):
    x[0, 0] = torch.tensor(3.0)
    return x


@case
def _write_to_an_expanded_view_is_an_error(x):
    y = x[:1].expand(3, 4)
    y.add_(1)
    return y


@case
def _write_to_a_view_with_one_more_dimension(x):
    y = x[0].expand(1, 4)
    y.add_(1)
    return x


@case
def _write_to_the_base_of_an_expanded_view(x):
    y = x.expand(2, 3, 4)
    x.add_(1)
    return y


@case
def _as_strided(x):
    y = x.as_strided((2, 2), (4, 1), 1)
    y.mul_(3)
    return (x, y)


@case
def _as_strided_overlapping(x):
    return torch.as_strided(x, (3, 2), (1, 1))


@case
def _data_set(x):
    y = x[0]
    x.data = x.data * 2
    y.add_(100)
    return (x, y)


@case
def _detach(x):
    y = x * 2
    y.detach_()
    return y


@case
def _swap(x):
    a = x[0].clone()
    x[0] = x[1]
    x[1] = a
    return x


@case
def _copyself(x):
    x[1:].copy_(x[:-1].clone())
    return x


@case
def _overlapcopy(x):
    x[:, 1:] = x[:, :-1].clone()
    return x


@case
def _flipadd(x):
    x += x.flip(0)
    return x


@case
def _selfadd(x):
    x.add_(x)
    x.mul_(x)
    return x


@case
def _rowadd(x):
    x.add_(x[0].clone())
    x.add_(x[:, :1].clone())
    return x


@case
def _rowadd_noclone(x):
    x[1:].add_(x[0])
    return x


@case
def _scat(x):
    x.scatter_(1, torch.tensor([[0], [1], [2]], device=x.device), 9.0)
    x.scatter_add_(0, torch.zeros(1, 4, dtype=torch.long, device=x.device), x[:1].clone())
    return x


@case
def _multi(x):
    a, b = x.split([1, 2])
    a.add_(1)
    b.mul_(2)
    c, *_ = x.unbind(1)
    c.zero_()
    return (x, a, b, c)


@case
def _chunked(x):
    for p in x.chunk(2, 1):
        p.mul_(2)
    return x


@case
def _diagw(x):
    x.diagonal().zero_()
    x.diagonal(1)[1] = 5
    x.fill_diagonal_(3)
    return x


@case
def _movd(x):
    y = x.view(3, 2, 2).movedim(0, -1)
    y[0].add_(1)
    return x


@case
def _flat(x):
    y = x.flatten()
    y.add_(1)
    return (x, y)


@case
def _unflat(x):
    y = x.unflatten(1, (2, 2))
    y[:, 0].add_(1)
    return (x, y)


@case
def _narrowed(x):
    y = x.narrow(1, 1, 2)
    y.copy_(torch.zeros(2, device=x.device, dtype=x.dtype))
    return x


@case
def _foreach(x):
    ps = [x[0], x[1]]
    torch._foreach_add_(ps, 1.0)
    torch._foreach_mul_(ps, [2.0, 3.0])
    return x


@case
def _foreach2(x):
    ps = [x[0].clone(), x[1].clone()]
    torch._foreach_lerp_(ps, [x[2], x[2]], 0.5)
    return ps


@case
def _where_out(x):
    return torch.where(x > 0, x, 0.0)


@case
def _typesview(x):
    y = x.view_as(x)
    y += 1
    z = x.expand_as(x)
    return (x, z)


@case
def _real_of_real(x):
    y = x.real
    y.add_(1)
    return x


@case
def _to_same(x):
    y = x.to(x.dtype)
    y.add_(1)
    return (x, y)


@case
def _contiguous_same(x):
    y = x.contiguous()
    y.add_(1)
    return (x, y)


@case
def _idxadd_alias(x):
    v = x.view(-1)
    v.index_add_(
        0, torch.tensor([0, 0, 5], device=x.device), torch.ones(3, dtype=x.dtype, device=x.device), alpha=2
    )
    return x


@case
def _idxput_acc(x):
    x.index_put_(
        (torch.tensor([0, 0], device=x.device),),
        torch.ones(4, dtype=x.dtype, device=x.device),
        accumulate=True,
    )
    return x


@case
def _masked_scatter(x):
    x.masked_scatter_(x > 0, torch.arange(12.0, dtype=x.dtype, device=x.device))
    return x


@case
def _put(x):
    x.put_(torch.tensor([1, -1], device=x.device), torch.tensor([5.0, 6.0], dtype=x.dtype, device=x.device))
    return x


@case
def _take(x):
    return x.take(torch.tensor([[1, -1]], device=x.device))


@case
def _baddbmm(x):
    y = x.view(1, 3, 4).clone()
    y[:, :, :3].baddbmm_(y[:, :, :3].clone(), y[:, :, :3].clone())
    return y


@case
def _empty_views(x):
    y = x[:0]
    y.add_(1)
    return (x, y, x[3:], x[:, 4:].sum())


@case
def _zero_d(x):
    y = x.sum()
    z = y.view(1)
    z.add_(1)
    y.mul_(2)
    return (y, z)


@case
def _autog_leaf(x):
    w = x.clone().requires_grad_()
    y = (w * 2)[0]
    y = y * 3
    with torch.no_grad():
        w.add_(1)
    y.sum().backward()
    return (w, w.grad)


@case
def _autog_ver(x):
    w = x.clone().requires_grad_()
    y = w.sin()
    with torch.no_grad():
        w.add_(1)
    y.sum().backward()
    return w.grad


@case
def _autog_data(x):
    w = x.clone().requires_grad_()
    y = w * w
    w.data.add_(1)
    y.sum().backward()
    return w.grad.sum() * 0


@case
def _autog_view_inplace(x):
    w = x.clone().requires_grad_()
    y = w * 1
    z = y[0]
    y.mul_(2)
    z.add_(y[1])
    (z.sum() + y.pow(2).sum()).backward()
    return w.grad


@case
def _autog_view_inplace2(x):
    w = x.clone().requires_grad_()
    y = w * 1
    z = y.view(2, 6)[:, 1:]
    z.mul_(w.view(2, 6)[:, 1:])
    y.t()[0].sigmoid_()
    y.square().sum().backward()
    return w.grad


@case
def _leaf_inplace_err(x):
    w = x.clone().requires_grad_()
    w.add_(1)
    return w


@case
def _leafview_inplace_err(x):
    w = x.clone().requires_grad_()
    w[0].add_(1)
    return w


@case
def _retain(x):
    w = x.clone().requires_grad_()
    y = w * 2
    y.retain_grad()
    z = y[0]
    z.mul_(3)
    y.sum().backward()
    return (y.grad, w.grad)


@case
def _double(x):
    w = x.clone().requires_grad_()
    (g,) = torch.autograd.grad((w.sin() * w).sum(), w, create_graph=True)
    g.square().sum().backward()
    return w.grad


@case
def _inplace_on_slice_of_index(x):
    y = x[[0, 1]]
    y[0].add_(1)
    return (x, y)


@case
def _numel0(x):
    return (torch.cat([x[:0], x]), x[:0].sum(0))


@case
def _set_requires(x):
    y = x[0]
    y.requires_grad_()
    (y * 2).sum().backward()
    return y.grad


@case
def _addmm(x):
    y = torch.zeros(3, 3, dtype=x.dtype, device=x.device)
    y.addmm_(x, x.t())
    y[0].addmv_(y, y[1])
    return y


@case
def _tri(x):
    y = x[:, :3].clone()
    y.triu_()
    y[1:].tril_()
    return y


@case
def _cum(x):
    x[0].cumsum_(0)
    x.cumprod_(1)
    return x


@case
def _logic(x):
    m = x > 0
    m.logical_not_()
    m[0] &= True
    m |= x > 1
    m[1].fill_(False)
    return m


@case
def _eqinpl(x):
    x.eq_(x)
    x.gt_(0.5)
    return x


@case
def _powinp(x):
    x.pow_(2)
    x.sqrt_()
    x.clamp_(min=0.1).log_()
    return x


@case
def _select_neg(x):
    x.select(-1, -1).fill_(1)
    x[-1, -2] = 4
    return x


@case
def _copy_dtype(x):
    x[0].copy_(torch.arange(4, device=x.device))
    y = (x * 3).int()
    y[0].copy_(x[1])
    return (x, y)


@case
def _copy_bcast(x):
    x.copy_(torch.ones(4, device=x.device, dtype=x.dtype))
    return x


@case
def _fill_t(x):
    x[0].fill_(x[1, 1])
    return x


def _run(
    function: Callable[[torch.Tensor], Any], start: torch.Tensor, device: str
) -> tuple[Exception | None, list[Any]]:
    try:
        results = tree_leaves(function(start.clone().to(device)))
    except (RuntimeError, IndexError) as error:
        return error, []
    return None, [r.detach().cpu().clone() if isinstance(r, torch.Tensor) else r for r in results]


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__.strip("_"))
def test_case(function: Callable[[torch.Tensor], Any]) -> None:
    start = torch.randn(3, 4, dtype=torch.float64)
    error, want = _run(function, start, "cpu")
    refused, got = _run(function, start, "xla")
    assert (error is None) == (refused is None), (error, refused)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [4, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_memory_is_never_shared_with_the_cpu_or_with_a_clone(n: int, dtype: torch.dtype) -> None:
    source = (torch.arange(n) % 3).to(dtype)
    want, x = source.clone(), source.to("xla")
    source.fill_(1)
    host = x.cpu()
    assert torch.equal(host, want)
    host.fill_(1)
    assert torch.equal(x.cpu(), want)
    host, copy, alias = x.cpu(), x.clone(), x.detach()
    x.zero_()
    sync.sync(wait=True)  # may reuse the memory of the old value of x
    assert torch.equal(host, want) and torch.equal(copy.cpu(), want)
    assert not alias.cpu().any()


def test_a_written_view_beyond_what_it_is_a_view_of_has_no_gradient() -> None:
    def gradient(device: str, reach: int) -> torch.Tensor:
        x = torch.arange(25.0, device=device).view(5, 5).requires_grad_()
        whole = x * 1
        rows = whole.narrow(0, 1, 3)
        view = rows.as_strided((2, 2), (1, 2), reach)
        view.mul_(2)
        (whole.sum() + view.square().sum()).backward()
        return x.grad.cpu()

    torch.testing.assert_close(gradient("xla", 6), gradient("cpu", 6))
    with pytest.raises(XlaError, match="DM620"):
        gradient("xla", 1)
