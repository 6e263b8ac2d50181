"""Sizes and numbers that data decides stay in the graph: one capture serves every count, 0 and 1 among them,
and gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.events import counters

T = torch.tensor
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
COUNTS = (3, 5, 0, 1, 6, 2)


@pytest.fixture(autouse=True)
def _anew() -> None:
    dynamotor.reset()


def _first(n: int) -> torch.Tensor:
    return torch.arange(6) < n


def masked(x: Any, m: Any) -> Any:
    y = (x.sin() * 2)[m & (x[:, 0] < 9)]
    return torch.relu(y @ x.new_ones(3, 4)) + 1, y.shape[0] * 2 + 1, y.sum(0), y.stride()


def masked_twice(x: Any, m: Any) -> Any:
    a, b = x[m], x.cos()[m]
    return ((a - b) ** 2).sum(), torch.cat([a, b]).sum(1), len(b)


def positions(x: Any) -> Any:
    i, j = torch.where(x > 0)
    k = (x > 0).nonzero()
    return x[i, j] * 2, i.float().sum(), k[:, 1] + k.size(0), k.t().shape


def selected(x: Any, m: Any) -> Any:
    return torch.masked_select(x * 2, m[:, None]).cumsum(0)


def repeated(x: Any, n: Any) -> Any:
    return x.sin().repeat_interleave(n, 0) * 2


def different(x: Any) -> Any:
    values, places = torch.unique(x, return_inverse=True)
    return values * 2, places + 1, values.shape[0], torch.bincount(x) + 1


def written(x: Any, m: Any) -> Any:
    y = x.clone()
    y[m] = 0.5
    return y[m] + 1, (y + 1).sum(1)


def number(x: Any, n: Any) -> Any:
    k = n.item()
    return x * k + 1, k + 2, x + int(n), k > 4, k // 2


def size(x: Any, n: Any) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0], lambda: f"{k} rows")
    return x[:k] * 2, torch.zeros(k) + 1, torch.arange(k).sum()


def held(x: Any) -> Any:
    loss = (x * 0.5).amax()
    return x * 2, {"loss": loss.item(), "large": (loss > 3).item()}, float(loss)


def listed(n: Any) -> Any:
    a, b = n.tolist()
    return torch.zeros(2, 3) + b * a, a - b


def columns(x: Any) -> Any:
    """What detectors do with the boxes that they keep."""
    boxes = x[x[:, 0] > 0]
    scores, places = boxes[:, 1].topk(min(3, boxes.shape[0]))
    best = boxes[places]
    width, first = best[:, 2] - best[:, 0], best[:, 0::3].clamp(max=0.5)
    return (
        scores,
        best[:, 0] + 0.5 * width,
        torch.exp(first) * width[:, None],
        best[:, 2:] > 0,
        boxes[:, :2] * 2,
    )


def filled(x: Any, n: Any) -> Any:
    kinds = (
        torch.full((2,), n),
        torch.full((2, 3), (x.sum() > 0)),
        torch.full((2,), x.mean(), dtype=torch.float64),
    )
    return (
        *kinds,
        torch.full_like(x, n),
        x.new_full((2, 2), fill_value=x.amax()),
        torch.full((), x.mean().item()),
    )


CASES: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    masked: [(X, _first(n)) for n in COUNTS],
    masked_twice: [(X, _first(n)) for n in COUNTS],
    positions: [(X - n,) for n in (0, 5, -5, 1, 0.5)],
    selected: [(X, _first(n)) for n in COUNTS],
    repeated: [(X, T([n, 1, 2, 0, 1, 1])) for n in COUNTS],
    different: [(T(v),) for v in ([1, 2, 1], [3, 3, 3], [1, 7, 6], [0, 0, 0])],
    written: [(X, _first(n)) for n in COUNTS],
    number: [(X, T(n)) for n in (5, 3, 0, 1, -4, 1 << 40)],
    size: [(X, T(n)) for n in (5, 3, 0, 1, 6, 7, -1)],
    held: [(X,), (X * 90,)],
    columns: [(X[:, [0, 1, 2]] + n,) for n in (0, 5, -5, 0.5)],
    filled: [(X, T(4)), (X * 3 - 9, T(-1))],
    listed: [(T([3, 4]),), (T([0, -1]),)],
}


def _outcome(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except RuntimeError as error:
        return str(error)


def _same(want: Any, got: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert want.stride() == got.stride()
        torch.testing.assert_close(got, want)
    elif isinstance(want, tuple):
        for a, b in zip(want, got, strict=True):
            _same(a, b)
    else:
        assert type(got) is type(want) and got == want


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_one_capture_serves_every_count(fn: Callable[..., Any]) -> None:
    for backend in ("eager", "native"):
        compiled = dynamotor.compile(fn, backend=backend, fullgraph=True)
        for args in CASES[fn]:
            _same(_outcome(fn, *args), _outcome(compiled, *args))
        assert len(compiled.entries) == 1
    assert counters["frames"]["parts compiled"] <= 6  # at most one for 0, for 1 and for all others


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 5), nn.LayerNorm(8)

    def forward(self, x: Any, m: Any, target: Any) -> Any:
        h = torch.relu(self.norm(self.a(x)))
        y = self.b(torch.tanh(h)[m] * 2)
        z = h.masked_select(h > 0.5)
        many = self.a(x).repeat_interleave(m.long() * 2, 0)
        loss = nn.functional.cross_entropy(y, target[m], reduction="sum")
        return loss + (z * z).sum() + self.b(many).cos().sum(), y


@pytest.mark.parametrize("backend", ["aot_eager", "native"])
def test_gradients_flow_through_what_was_chosen(backend: str) -> None:
    net = Net()
    compiled = dynamotor.compile(net, backend=backend, fullgraph=True)
    for n, batch in ((3, 7), (4, 9), (0, 7), (1, 9), (6, 8)):
        x, m, target = torch.randn(batch, 4), torch.arange(batch) < n, torch.randint(0, 5, (batch,))
        found = []
        for run in (net, compiled):
            net.zero_grad()
            leaf = x.clone().requires_grad_()
            loss, y = run(leaf, m, target)
            (loss + y.sum() * 0.3).backward()
            found.append([loss.detach(), y.detach(), leaf.grad, *[p.grad for p in net.parameters()]])
        torch.testing.assert_close(found[1], found[0])
    assert counters["frames"]["captured"] == 2  # the batch is a number, then a symbol


def _decides(x: Any, m: Any) -> Any:
    y = x[m]
    if y.shape[0] > 2:
        return y * 2
    return y - 1


def _broadcast(x: Any, m: Any) -> Any:
    return x[m] + x.new_ones(4, 3)  # right for 1 and for 4


def test_what_nothing_proves_breaks_the_graph_at_its_line() -> None:
    for fn in (_decides, _broadcast):
        compiled = dynamotor.compile(fn)
        for n in (4, 1):
            _same(fn(X, _first(n)), compiled(X, _first(n)))
        (reason,) = {e.info.data.reason for e in compiled.entries}
        assert reason.code == "DM210" and reason.where.filename == __file__
    _same(_decides(X, _first(3)), dynamotor.compile(_decides)(X, _first(3)))


def test_numbers_that_were_read_become_tensors() -> None:
    def counted(x: Any) -> Any:
        n = (x > 0).sum().item()
        return (
            torch.tensor([n, 2]) * 3,
            torch.tensor([[n], [n + 1]], dtype=torch.float32).sin(),
            torch.tensor(n),
        )

    before, compiled = counters["fallback"]["aot.DM210"], dynamotor.compile(counted, fullgraph=True)
    for x in (X, -X, X[:1].abs()):
        _same(counted(x), compiled(x))
    assert counters["fallback"]["aot.DM210"] == before  # the code after the number is compiled too


def test_what_a_check_says_is_proved() -> None:
    def checked(x: Any, n: Any) -> Any:
        k = n.item()
        torch._check(k > 3)
        return x * 2 if k > 2 else x

    compiled = dynamotor.compile(checked, fullgraph=True)
    for n in (4, 9):
        _same(checked(X, T(n)), compiled(X, T(n)))
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        compiled(X, T(3))


def test_a_check_with_an_error_of_its_own() -> None:
    """As libraries write checks: the condition may be a function, a tensor or a bool."""

    def demand(condition: Any, message: str) -> None:
        condition = condition() if callable(condition) else condition
        assert isinstance(condition, bool) and not isinstance(condition, torch.Tensor)
        torch._check_with(ValueError, condition, lambda: message)

    def checked(x: Any, n: Any) -> Any:
        k = n.item()
        demand(k >= 0, "too small")
        demand(k < 6, "too large")
        return x[: (k + 2) // 2].sum(0)

    compiled = dynamotor.compile(checked, fullgraph=True)
    for n in (4, 0, 5):
        _same(checked(X, T(n)), compiled(X, T(n)))
    for n, message in ((-1, "too small"), (6, "too large")):
        with pytest.raises(ValueError, match=message):
            compiled(X, T(n))
    assert len(compiled.entries) == 1


def test_numbers_for_all_sizes_break_as_before() -> None:
    compiled = dynamotor.compile(masked, dynamic=False)
    _same(masked(X, _first(2)), compiled(X, _first(2)))
    assert compiled.entries[0].info.data.reason.code == "DM210"


def test_a_number_is_that_of_the_moment_when_it_was_read() -> None:
    def reads(x: Any, total: Any) -> Any:
        before = float(total)
        total += x.sum()
        return before, total.item(), x * 2

    compiled = dynamotor.compile(reads, fullgraph=True)
    for _ in range(2):
        _same(reads(X, T(3.0)), compiled(X, T(3.0)))
    assert not counters["frames"]["parts compiled"]


def test_bodies_of_transforms_hold_no_such_sizes() -> None:
    def outer(x: Any, m: Any) -> Any:
        return torch.func.grad(lambda y: (y[m] * y[m].shape[0]).sum())(x)

    compiled = dynamotor.compile(outer)
    for n in (3, 0, 1):
        _same(outer(X, _first(n)), compiled(X, _first(n)))


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_sizes_that_data_decides(backend: str, dim: int) -> None:
    def fn(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.softmax(dim) * 2 for part in x.split(sizes.tolist(), dim)], dim)

    compiled, before = dynamotor.compile(fn, backend=backend, fullgraph=True), counters["frames"]["captured"]
    for a, b in ((5, 3), (4, 6), (0, 8), (1, 9), (7, 1), (2, 2)):
        x, sizes = torch.randn((a + b, 4) if dim == 0 else (4, a + b)), T([a, b])
        torch.testing.assert_close(compiled(x, sizes), fn(x, sizes))
    assert counters["frames"]["captured"] - before == 2
    for wrong in ([5, 4], [9, -1], [1, 1]):
        with pytest.raises(RuntimeError):
            compiled(torch.randn((8, 4) if dim == 0 else (4, 8)), T(wrong))


def test_other_ways_to_split_are_as_they_were() -> None:
    def fn(x: torch.Tensor) -> Any:
        return (
            torch.split(tensor=x, split_size_or_sections=2, dim=1),
            x.split([1, x.shape[0] - 1]),
            x.split(4),
        )

    compiled = dynamotor.compile(fn, backend="eager", fullgraph=True)
    for n in (5, 7, 8):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), fn(x))


def test_what_a_gpu_gives_lies_as_the_rules_say() -> None:
    """The rules follow the kernels of a CPU."""
    from dynamotor.autograd.stages import _turned

    rows, columns = torch.randn(5, 2), torch.randn(5, 2).t().contiguous().t()
    for given in (rows, columns):
        for row_major in (True, False):
            (found,) = _turned([given], {0: row_major})
            assert torch.equal(found, given) and found.is_contiguous() is row_major


def test_a_bool_that_an_inner_frame_looks_at_breaks_where_it_was_read() -> None:
    class Layer(nn.Module):
        def forward(self, x: Any, flag: bool) -> Any:
            y = x.sin()
            return (y * 2 if flag else y - 1).cos()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Any) -> Any:
            x = x + 1
            flag = (x > 0).any().item()
            for layer in self.layers:
                x = layer(x, flag)
            return x, flag

    net = Net()
    compiled = dynamotor.compile(net)
    for x in (X, X - 10, X, X - 10):
        got, want = compiled(x), net(x)
        torch.testing.assert_close(got[0], want[0])
        assert got[1] is want[1]
    assert (
        counters["capture"]["graphs"] == 3 and sum(counters["breaks"].values()) == 1
    )  # before it, and two behind


SUMS: dict[str, Callable[..., Any]] = {
    "sum": lambda a, b: a[0].item() + b[0].item() + a[1].item(),
    "difference and product": lambda a, b: (a[0].item() * 2.5 - b[1].item() * 3, a + 1),
    "reflected": lambda a, b: 1 - a[0].item(),
    "in place": lambda a, b: sum([v.item() for v in a]),
    "beyond the largest": lambda a, b: a.half()[0].item() * 1e300 * 1e300,
    "quotient": lambda a, b: a[0].item() / 2,
    "integer": lambda a, b: a.int()[0].item() + b[0].item(),
    "bool": lambda a, b: (a[0] > 0).item() + b[0].item(),
    "two integers": lambda a, b: [0 + a.int().sum().item(), a + 1],
    "two floats": lambda a, b: (1.5 - a.sum().item(), b.sum().item() > 2.0, 0.0 * a[0].item()),
    "large integer": lambda a, b: a[0].item() + 2**60,
    "shown": lambda a, b: f"{a[0].item() + 1:.3f}",
    "compared": lambda a, b: "more" if a[0].item() + b[0].item() > 0 else "less",
}


@pytest.mark.parametrize("program", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("backend", ["eager", lambda gm, inputs: gm.forward], ids=["ours", "other"])
def test_sums_of_floats_of_tensors(program: Callable[..., Any], backend: Any) -> None:
    compiled = dynamotor.compile(program, backend=backend)
    for _ in range(3):
        a, b = torch.randn(3), torch.randn(3)
        assert repr(compiled(a, b)) == repr(program(a, b))


def test_a_number_that_only_leaves_is_one_graph_for_any_backend() -> None:
    compiled = dynamotor.compile(
        lambda a: (a.sum().item(), a * 2), backend=lambda gm, i: gm.forward, fullgraph=True
    )
    assert repr(compiled(X)) == repr((X.sum().item(), X * 2))


def test_a_number_that_nobody_takes_leaves_no_copy() -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def program(a: torch.Tensor) -> torch.Tensor:
        a.add(1).add_(2).item()
        total = a.sum()
        total.item()
        return total / 2

    assert dynamotor.compile(program, backend=backend, fullgraph=True)(X[0, :1]).equal(X[0, :1].sum() / 2)
    assert not any(n.target == "clone" for n in graphs[0].graph.nodes)
