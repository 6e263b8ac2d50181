"""Writes into buffers: the part that is written is touched, the rest is neither read nor copied, and no read
finds a later value.
"""

import pytest
import torch

import dynamotor
from dynamotor.base.errors import InternalError
from dynamotor.base.events import collect
from dynamotor.graph.sizes import hint
from dynamotor.lower import claim, in_place

K, X, P = torch.randn(4, 8, 32, 16), torch.randn(16), torch.tensor([3, 5])
WRITES = {}
COPIES = {}


def write(*args, into=WRITES):
    """Add a program of these arguments (default: a buffer and a row)."""
    return lambda fn: into.setdefault(fn.__name__, (fn, args or (K, X)))


@write(K, X[None, None], P)
def index_copy(k, x, p):
    k.index_copy_(2, p[:1], x.expand(4, 8, 1, 16))


@write(K, P)
def index_put(k, p):
    k[:, p] = 2.0
    k.index_put_((p - 3, p), torch.ones(2, 32, 16), accumulate=True)


@write(K, P)
def equal_positions(k, p):
    k.index_add_(0, p * 0, torch.ones(2, 8, 32, 16), alpha=2)
    k.index_put_((p * 0 + 1, p * 0), torch.ones(2, 32, 16), accumulate=True)
    k.scatter_add_(1, (p * 0)[None, :, None, None].expand(4, 2, 32, 16), torch.ones(4, 2, 32, 16))


@write()
def chained_views(k, x):
    k[1].select(0, 2)[3:5] = x
    k.transpose(1, 2)[0, 3] = x
    k.view(k.shape[0] * k.shape[1], -1)[3].mul_(2)
    k.permute(3, 2, 1, 0)[0].add_(1)


@write()
def one_view_twice(k, x):
    view = k[1]
    view[2] = 1
    view[3, 4] = x
    k[0] += 1


@write()
def steps_and_diagonals(k, x):
    k[:, ::2] = 3.0
    k[0, 0, :16].diagonal().fill_(5)
    k.as_strided((3, 4), (64, 1), 5).fill_(3)
    k.split(2)[1][0].mul_(3)
    k.unbind(1)[2].copy_(x)


@write()
def read_before_and_after(k, x):
    before = k[0, 0] * 2
    total = k.sum()
    k[0] = 1
    return before + k[0, 0], total + k.sum()


@write()
def from_beside_and_from_itself(k, x):
    k[0] = k[1]
    k[2, 0, 1:] = k[2, 0, :-1].clone()
    a = k[0, 0].clone()
    k[0, 0] = k[0, 1]
    k[0, 1] = a


@write()
def returned_view(k, x):
    k[0] = 1
    return k[1], k


@write(torch.randn(8, 64, 16)[:, ::2], X)
def memory_with_holes(k, x):
    k[1, 3] = x
    k.index_fill_(1, torch.tensor([2]), 4.0)


@write(torch.randn(8, 16).bfloat16(), P)
def sums_in_half_precision(k, p):
    k.index_put_((p,), torch.full((2, 16), 1.125, dtype=torch.bfloat16), accumulate=True)
    k[3] = torch.arange(16)


@write(K, torch.rand(32, 16) > 0.5, P)
def by_kernels_of_aten(k, mask, p):
    k[1, 2].masked_scatter_(mask, torch.ones(32, 16))
    k.index_reduce_(0, p - 2, torch.ones(2, 8, 32, 16), "amax")
    k.scatter_reduce_(1, p[None, :, None, None].expand(4, 2, 32, 16), torch.ones(4, 2, 32, 16), "amin")
    k.put_(p, torch.ones(2))


@write(X)
def row_by_row(x):
    made = torch.zeros(64, 16) + x
    for i in range(20):
        made[i] = made[i + 1] * i
    return made, made.sum(0)


@write(into=COPIES)
def old_value_is_returned(k, x):
    old = k.clone()
    k[0] = 1
    return old


@write(into=COPIES)
def new_value_is_returned(k, x):
    k[0] = 1
    return k.clone()


@write(into=COPIES)
def both_are_returned(k, x):
    new = k.index_fill(0, torch.tensor([2]), 1.0)
    other = k.index_fill(0, torch.tensor([3]), 1.0)
    return new + other, k.sum()


def call(fn, args, **settings):
    """(result of eager, result, programs, the call), arguments compared."""
    mine, eager = [t.clone() for t in args], [t.clone() for t in args]
    mine[0], eager[0] = (
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in args[:1] * 2
    )
    compiled = dynamotor.compile(fn, **settings)
    with torch.no_grad(), collect("code") as events:
        result, want = compiled(*mine), fn(*eager)
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, eager)
        compiled(*mine), fn(*eager)  # on other contents
        torch.testing.assert_close(mine, eager)
    return [e.data["program"] for e in events if e.kind == "code"]


def large(programs, args):
    """Buffers beside inputs that are at least as large as half of the first argument."""
    return [
        b
        for p in programs
        for b in p.buffers.values()
        if b.kind != "input" and 2 * hint(b.spec.numel) > args[0].numel() > 64
    ]


@pytest.mark.parametrize("name", WRITES)
def test_touches_what_is_written(name):
    fn, args = WRITES[name]
    assert not large(call(fn, args), args)


@pytest.mark.parametrize("name", WRITES)
def test_sizes_that_differ(name):
    fn, args = WRITES[name]
    assert not large(call(fn, args, dynamic=True), args)


@pytest.mark.parametrize("name", COPIES)
def test_keeps_a_value_that_is_needed(name):
    fn, args = COPIES[name]
    assert len(large(call(fn, args), args)) <= 3


def test_position_out_of_range_leaves_what_eager_leaves():
    for write in (
        lambda k, i, s: k.index_copy_(0, i, s),
        lambda k, i, s: k.index_put_((i,), s),
        lambda k, i, s: k.index_put_((i,), s, accumulate=True),
        lambda k, i, s: k.scatter_(0, i[:, None].expand(3, 4), s),
    ):
        mine, eager = torch.zeros(8, 4), torch.zeros(8, 4)
        args = torch.tensor([1, 99, 2]), torch.ones(3, 4)
        errors = []
        for fn, k in ((dynamotor.compile(write), mine), (write, eager)):
            with pytest.raises((IndexError, RuntimeError)) as raised:
                fn(k, *args)
            errors.append((raised.type, str(raised.value)))
        assert mine.equal(eager) and errors[0] == errors[1]


def test_a_copy_that_stays_says_why():
    def fn(k):
        return k.index_fill(0, torch.tensor([2]), 1.0), k.index_copy_(
            0, torch.tensor([1]), torch.ones(1, 8, 32, 16)
        )

    with torch.no_grad():
        text = dynamotor.lower(fn, K.clone()).schedule
    assert "65536 bytes" in text or "copy for index_fill" in text


def test_a_read_behind_the_write_is_found(monkeypatch):
    """Planted: memory is shared although the old value is read later."""

    def fn(k, x):
        old = k.clone()
        k[0] = 1
        return old.sum(0) + k[0]

    monkeypatch.setattr(in_place, "_why_stale", lambda *_: None)
    monkeypatch.setattr(claim, "_is_read_later", lambda *_: False)
    with (
        torch.no_grad(),
        dynamotor.config.patch(strict=True),
        pytest.raises(InternalError, match="is read when"),
    ):
        dynamotor.compile(fn)(K.clone(), X)


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
def test_each_write_is_one_version(backend):
    def fn(k, x):
        k[0] = x
        k.mul_(2)
        k[1, 2].add_(1)

    mine, eager = K.clone(), K.clone()
    dynamotor.compile(fn, backend=backend)(mine, X)
    fn(eager, X)
    assert mine._version == eager._version


def test_a_copy_into_itself_leaves_the_memory_between_elements():
    def fn(x):
        x.copy_(x)
        return x.as_strided((1,), (1,), x.storage_offset() + 1) * 2

    x = torch.randn(4, 6)[:, ::2]
    torch.testing.assert_close(dynamotor.compile(fn)(x), fn(x))


def test_empty_buffers_are_written_by_kernels_of_aten():
    def fn(x):
        y = x + 1
        return x.relu_().scatter_reduce_(0, (y > 0).long(), y, "amax")

    compiled = dynamotor.compile(fn, dynamic=True)
    for size in (33, 3, 0, 5):
        mine = torch.randn(size, size).bfloat16()
        eager = mine.clone()
        assert compiled(mine).equal(fn(eager)) and mine.equal(eager)


def test_an_empty_input_that_its_own_write_reads_stays_an_input():
    def fn(x):
        x.masked_scatter_(x > 0, x)
        return x * 2

    compiled = dynamotor.compile(fn, dynamic=True)
    for shape in ((3, 5), (4, 7), (15, 0), (16, 0), (0, 5)):
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        mine = torch.empty_strided(x.shape, x.stride()).copy_(x)
        assert compiled(mine).equal(fn(x)) and mine.equal(x)


def whole_part_of_a_view(x):
    view = x[2:3]
    before = view.clone()
    view[0] = (view + 1)[0]
    return before


def whole_part_beside_its_old_value(x):
    view = x[1:2, 1:]
    before = view.clone()
    view[0, 0:] = view[0] * 2 - before[0]
    view[:1] += 1
    return view.view(-1), before


@pytest.mark.parametrize("function", [whole_part_of_a_view, whole_part_beside_its_old_value])
def test_a_part_that_is_the_whole_of_a_view_is_written_where_the_view_is(function):
    """The view's old value is read later, so it is copied first: the write does not follow it into the copy."""
    given = (
        torch.arange(12.0).reshape(4, 3) if function is whole_part_beside_its_old_value else torch.arange(4)
    )
    ours = given.clone()
    want, found = function(given), dynamotor.compile(function)(ours)
    torch.testing.assert_close(found, want)
    assert torch.equal(ours, given)
