"""Writes into memory that several elements share, or that an operand shares in part, raise as in eager; other
`out=` and writes work.
"""

import traceback
import warnings

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression

pytestmark = pytest.mark.usefixtures("sizes")

REFUSED = {
    "expanded add_": lambda x: x[:1].expand(3, -1).add_(1),
    "expanded mul_ of an intermediate": lambda x: (x[:1] * 1).expand(3, -1).mul_(2),
    "expanded copy_": lambda x: x[:1].expand_as(x).copy_(x * 2),
    "expanded out": lambda x: torch.add(x, 1, out=torch.empty_like(x[:1]).expand_as(x)),
    "shifted add_": lambda x: x[1:].add_(x[:-1]),
    "shifted copy_": lambda x: x[1:].copy_(x[:-1]),
    "shifted assignment": lambda x: x.__setitem__(slice(1, None), x[:-1]),
    "shifted out": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "transposed": lambda x: (y := x[:5, :5] * 1).add_(y.t()),
    "scatter of itself": lambda x: x.scatter_(0, torch.zeros_like(x, dtype=torch.int64), x),
    "scatter_add of itself": lambda x: x.scatter_add_(0, torch.zeros_like(x, dtype=torch.int64), x),
    "scatter_reduce": lambda x: x.scatter_reduce_(0, torch.zeros_like(x, dtype=torch.int64), x, "amax"),
    "index_add of itself": lambda x: x.index_add_(0, torch.arange(x.shape[0]), x),
    "index_copy of itself": lambda x: x.index_copy_(0, torch.arange(x.shape[0]), x),
    "index_put of itself": lambda x: x.index_put_((torch.arange(x.shape[0]),), x),
    "put of itself": lambda x: x.put_(torch.arange(x.numel()), x),
    "assignment by positions": lambda x: x.__setitem__(torch.arange(x.shape[0]), x),
    "index_select out": lambda x: torch.index_select(x, 0, torch.arange(x.shape[0]), out=x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fn = REFUSED[name]
    with pytest.raises(RuntimeError, match="unsupported operation"):
        fn(torch.randn(5, 6))
    fast = dynamotor.compile(fn)
    for rows, columns in ((5, 6), (7, 8), (9, 8)):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            fast(torch.randn(rows, columns))


@pytest.mark.parametrize(
    "fn", [torch.relu_, lambda x: x.add_(1), lambda x: x.mul_(x), lambda x: torch.add(x, 1, out=x)]
)
def test_an_expanded_input_is_not_written(fn):
    for run in (fn, dynamotor.compile(fn)):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            run(torch.randn(1, 6).expand(5, 6))


ALLOWED = {
    "itself": lambda x: x.add_(x),
    "another part": lambda x: x[:2].add_(x[2:4]),
    "every second": lambda x: x[:, ::2].mul_(x[:, 1::2]),
    "expanded fill_": lambda x: x[:1].expand(3, 6).fill_(2),
    "expanded zero_": lambda x: x[:1].expand(3, 6).zero_(),
    "copy of itself": lambda x: x.copy_(x),
    "an expanded operand": lambda x: x.add_(x.sum(0, keepdim=True).expand(5, 6)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    before = counters["fallback"]["aot.DM229"]
    fn, x = ALLOWED[name], torch.randn(5, 6)
    a, b = x.clone(), x.clone()
    want, got = fn(a), dynamotor.compile(fn)(b)
    torch.testing.assert_close((got, b), (want, a))
    assert "fill_" in name or "zero_" in name or counters["fallback"]["aot.DM229"] == before


OUTS = {
    "sort": lambda x, v, i: torch.sort(x, out=(v, i)),
    "max": lambda x, v, i: torch.max(x, 1, out=(v, i)),
    "topk": lambda x, v, i: torch.topk(x, 2, out=(v, i)),
    "add": lambda x, v, i: torch.add(x, 1, out=v),
    "mm": lambda x, v, i: torch.mm(x, x.t(), out=v),
    "cat": lambda x, v, i: torch.cat([x, x], out=v),
    "sum": lambda x, v, i: torch.sum(x, 0, out=v),
    "inv": lambda x, v, i: torch.linalg.inv(x[:, :5], out=v),
}


@pytest.mark.parametrize("size", [(0,), (3, 3), (50, 60)])
@pytest.mark.parametrize("name", OUTS)
def test_out_of_another_size(name, size):
    fn, fast = OUTS[name], dynamotor.compile(OUTS[name])
    x = torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager warns when it resizes memory that is not empty
        for _ in range(2):
            made = [(torch.empty(size), torch.empty(size, dtype=torch.int64)) for _ in range(2)]
            want, got = fn(x, *made[0]), fast(x, *made[1])
            torch.testing.assert_close(
                tuple(got) if isinstance(got, tuple) else got,
                tuple(want) if isinstance(want, tuple) else want,
            )
            assert [t.shape for t in made[1]] == [t.shape for t in made[0]]
            torch.testing.assert_close(made[1][0], made[0][0], equal_nan=True)


@pytest.mark.parametrize("name", OUTS)
def test_the_shape_behind_out_of_another_size(name):
    """It was that of before, for whoever asked in the same function: `out.numel()` was 0."""
    write = OUTS[name]

    def fn(x):
        v, i = torch.empty(0), torch.empty(0, dtype=torch.int64)
        write(x, v, i)
        return v.shape, i.shape, v.stride(), v.numel(), v.sum() / v.shape[0]

    x = torch.rand(5, 6) + torch.eye(5, 6)
    torch.testing.assert_close(dynamotor.compile(fn, backend="eager")(x), fn(x))


def leaf():
    return torch.ones(4, requires_grad=True)


def unbound():
    return torch.ones(3, 4, requires_grad=True).unbind(0)[0]


def without_gradients():
    with torch.no_grad():
        return leaf().view(2, 2)


def of_inference():
    with torch.inference_mode():
        return torch.ones(3, 4)


def assigned(x, y):
    x[0] = 2


def inside(x, y):
    def scale(part):
        part.mul_(y.sum())

    scale(x[0])


def caught(x, y):
    try:
        x.mul_(y)
    except RuntimeError:
        return y.view(7)


WRITTEN = {
    "a view of a leaf": lambda: (leaf().expand(3, 4), torch.ones(4)),
    "a piece": lambda: (unbound(), leaf()),
    "a view made without gradients": lambda: (without_gradients(), leaf()[:2] * 1),
    "a tensor of inference mode": lambda: (of_inference(), torch.ones(4)),
    "one that overlaps": lambda: (x := torch.ones(4, 4), x.t()),
    "one without gradients": lambda: (torch.ones(3, 4), torch.ones(4)),
}


def raised(fn, args):
    try:
        fn(*args)
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        notes = getattr(error, "__notes__", [])
        return (
            repr(error),
            repr(error.__context__),
            notes,
            [(t.name, t.line) for t in lines if t.filename == __file__ and t.name != "raised"],
        )


@pytest.mark.parametrize("fn", [assigned, inside, caught])
def test_refused_at_the_programs_line(fn):
    fast = dynamotor.compile(fn, backend="eager")
    for _ in range(2):  # the first call's entry does not serve the others' tensors
        for name in reversed(WRITTEN):
            assert raised(fast, WRITTEN[name]()) == raised(fn, WRITTEN[name]()), name


LOG: list[int] = []


def a_base_that_becomes_a_leaf(x, y):
    x.requires_grad_()
    LOG.append(1)
    y.add_(1)


def a_view_that_becomes_a_leaf(x, y):
    part = (x * 2)[0]
    part.requires_grad_()
    LOG.append(2)
    part.add_(1)


def a_piece_that_becomes_a_leaf(x, y):
    part = (x * 2).unbind(0)[1]
    part.requires_grad_()
    part.add_(1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize(
    "fn", [a_base_that_becomes_a_leaf, a_view_that_becomes_a_leaf, a_piece_that_becomes_a_leaf]
)
def test_a_tensor_that_becomes_a_leaf_inside(fn, backend):
    """Effects before the write are done, and the error says which of them is a leaf, which a view of one."""
    dynamotor.reset()
    fast = dynamotor.compile(fn, backend=backend)
    for _ in range(2):
        told = []
        for one in (fn, fast):
            LOG.clear()
            base = torch.ones(3, 4)
            told.append((raised(one, (base, base[0])), list(LOG), base))
        assert str(told[0]) == str(told[1])
    if fn is a_base_that_becomes_a_leaf:  # the same program with tensors that share nothing
        x, y = torch.ones(3, 4), torch.ones(4)
        assert raised(fast, (x, y)) is None and x.requires_grad and torch.equal(y, torch.full((4,), 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_a_write_to_what_a_graph_wrote_and_saved(backend):
    """Eager saves the buffer itself, so it refuses the backward after a second write; it does not where it saves another
    tensor with the same values."""

    def counts(x, held):
        held.add_(1)
        return x * held

    def counts_in_a_part(x, held):
        held[0].add_(1)
        return x * held

    def clones(x, held):
        held.add_(1)
        return x * held.clone()

    def copies_out(x, held):
        held.add_(1)
        return x * torch.empty_like(held).copy_(held)

    def copies_in(x, held):
        h = (x * 2).exp_()
        held.copy_(h.detach())
        return h * h.sin()

    for fn in (counts, counts_in_a_part, clones, copies_out, copies_in):
        dynamotor.reset()
        fast = dynamotor.compile(fn, backend=backend)
        for _ in range(2):
            x, held = torch.ones(2, 3, requires_grad=True), torch.full((2, 3), 2.0)
            refused = []
            for one in (fn, fast):
                y = one(x, held).sum()
                one(x, held)  # as a second micro-batch does
                refused.append(raised(y.backward, ()) is not None)
            assert refused == [fn in (counts, counts_in_a_part)] * 2, fn.__name__
