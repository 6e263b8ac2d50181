"""Sizes and integers that differ between calls: one program for all of them, right at each, with guards that
can be read.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import random_sizes
import torch
from programs import PROGRAMS
from test_programs import same
from torch import nn
from warned import text_of

import dynamotor
from dynamotor.backends import backends
from dynamotor.base.events import collect, counters
from dynamotor.capture.dispatch import compile_program
from dynamotor.capture.source import Arg
from dynamotor.capture.symbolic_inputs import SizePolicy, TraceSizes
from dynamotor.graph.sizes import maximum, minimum


@pytest.fixture(autouse=True)
def _symbolic() -> Iterator[None]:
    dynamotor.reset()
    with dynamotor.config.patch(symbolic_sizes=True):
        yield


def _copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    """The result, or the class of the exception."""
    try:
        return fn(*[_copy(a) if isinstance(a, torch.Tensor) else a for a in args])
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        return type(error)


def check(fn: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> Any:
    """Compile, compare each call with eager's, and give the dispatcher."""
    compiled = dynamotor.compile(fn, **{"backend": "eager", **options})
    for args in calls:
        want, got = outcome(fn, *args), outcome(compiled, *args)
        assert same(want, got), (args, want, got)
    return compiled


def guards(compiled: Any) -> list[str]:
    """The assumptions of the general entry that was used last."""
    entry = next(e for e in compiled.entries if e.general)
    return [repr(g) for g in entry.info.guards[-1].assumed]


def tensors(*shapes: tuple[int, ...]) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(*shape),) for shape in shapes]


def _views(x: Any) -> Any:
    b, n = x.shape
    return (
        x.view(b * n)[: n // 2] + x.size(0),
        x.transpose(0, 1).reshape(n, -1),
        torch.arange(n) * len(x),
        x.expand(3, b, n).sum(),
    )


def _containers(x: Any) -> Any:
    sizes = {"all": x.shape, "last": x.shape[-1:]}
    total = sum([n * 2 for n in sizes["all"]]) + max(*x.shape, 5)
    return (
        x.new_zeros(sizes["all"] + (2,)).shape,
        total,
        torch.Size([total, 2]),
        (*sizes["last"], x.numel()),
        [x.stride(0)],
    )


def _nested(x: Any) -> Any:
    def halves(t: Any, n: int) -> Any:
        return t[:, :n] if n % 2 else t[:, n:]

    def both(n: int) -> Any:
        return halves(x, n // 2), divmod(n, 3), -n, n**2, abs(4 - n), isinstance(n, int), int(n), n is None

    return both(x.shape[1])


def _in_place(x: Any) -> Any:
    x[: x.shape[0] // 2] += 1
    x.mul_(x.shape[1])
    return x, x.shape == (x.size(0), x.size(1)), x.is_contiguous()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", [_views, _containers, _nested, _in_place])
def test_one_general_program_serves_all_sizes(fn: Callable[..., Any], backend: str) -> None:
    calls = tensors((9, 8), (12, 17), (7, 10), (16, 12), (31, 9), (15, 64))
    compiled = check(fn, calls, backend=backend)
    most = 3 if fn in (_nested,) else 2
    assert len(compiled.entries) <= most and counters["breaks"] == {}
    check(fn, tensors((0, 3), (1, 4), (5, 1), (2, 2), (3, 5), (4, 4)), backend=backend)


def test_the_first_call_is_special_and_stays() -> None:
    compiled = check(lambda x: x * 2, tensors((4,), (5,), (6,), (4,), (7,), (4,)))
    assert [(e.general, e.hits) for e in compiled.entries] == [(False, 2), (True, 2)]
    compiled = check(lambda x: x * 2, tensors((4,), (5,), (6,)), dynamic=True)
    assert [e.general for e in compiled.entries] == [True]
    compiled = check(lambda x: x * 2, tensors((4,), (5,), (6,)), dynamic=False)
    assert [e.general for e in compiled.entries] == [False] * 3


def test_a_branch_on_a_size_is_a_guard_with_its_line() -> None:
    def fn(x: Any) -> Any:
        if x.shape[0] > 100:
            return x + 1
        return x - 1

    with collect("recompile") as events:
        compiled = check(fn, tensors((4,), (50,), (100,), (101,), (3,), (1000,)))
    assert len(compiled.entries) == 3 and guards(compiled) == ["s0 >= 101"]
    reason = events[-1].data["reasons"][-1]
    assert (
        "s0 <= 100 does not hold: s0 = x.shape[0] is 101, was 50" in reason
        and "if x.shape[0] > 100:" in reason
    )


def test_equal_sizes_share_a_symbol_until_they_differ() -> None:
    def fn(x: Any, y: Any) -> Any:
        return x.sum() + y.sum(), x.shape[0] - y.shape[0]

    pairs = [(8, 8), (9, 9), (5, 5), (6, 7), (9, 2), (3, 3)]
    compiled = check(fn, [(torch.randn(a), torch.randn(b)) for a, b in pairs])
    assert len(compiled.entries) == 3
    shared, apart = (
        next(e for e in compiled.entries if e.general and e.info.data.inputs.__len__() == n).info.data
        for n in (3, 4)
    )
    assert "y.shape[0] == s0" in shared.sizes.report() and apart.sizes.row().facts == ()


def test_strides_are_expressions_of_the_sizes() -> None:
    def fn(x: Any) -> Any:
        return x.stride(), x + 1

    forms = [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(2, 0, 3, 1),
    ]
    for form in forms:
        compiled = check(fn, [(form(torch.randn(2, 3, n, m)),) for n, m in ((4, 5), (6, 7), (9, 8))])
        assert len(compiled.entries) <= 2
    wide = torch.randn(10, 64)
    compiled = check(
        fn, [(wide[:n, :m],) for n, m in ((4, 5), (6, 7), (9, 8))]
    )  # rows of one buffer keep their stride
    assert len(compiled.entries) <= 2
    compiled = check(fn, [(torch.randn(9, n)[:, :5],) for n in (8, 10, 12, 20)])  # only the stride differs
    assert len(compiled.entries) <= 2


def test_integers_that_change_become_symbols() -> None:
    def fn(x: Any, n: int, lengths: list[int]) -> Any:
        parts, start = [], 0
        for length in lengths:
            parts.append(x[start : start + length].sum(0))
            start += length
        return torch.stack(parts), x[n:], x * n, n > 3

    cases = [(7, [2, 3, 4]), (9, [5, 2, 6]), (11, [3, 3, 2]), (20, [7, 8, 9])]
    compiled = check(fn, [(torch.randn(30, 2), n, lengths) for n, lengths in cases])
    assert len(compiled.entries) <= 3

    class Counter:
        def __init__(self) -> None:
            self.steps = 0

    def count(x: Any, counter: Counter) -> Any:
        counter.steps += 1
        return x + 1

    counter, compiled = Counter(), dynamotor.compile(count, backend="eager")
    for _ in range(6):
        compiled(torch.ones(2), counter)
    assert counter.steps == 6 and len(compiled.entries) == 2


def test_sizes_live_across_a_graph_break() -> None:
    def fn(x: Any) -> Any:
        b, n = x.shape
        y = random_sizes.outside(x, 1)[0]
        return y.view(b * n) * n, b, y.shape

    with collect("capture") as events:
        check(fn, tensors((3, 4), (5, 6), (7, 8), (9, 4), (12, 10)))
    assert len(events) <= 5


def test_marks_make_symbols_at_the_first_call_and_keep_numbers() -> None:
    for mark in (
        lambda x: dynamotor.mark_dynamic(x, 0, min=3, max=50),
        lambda x: setattr(x, "_dynamo_dynamic_indices", {0}),
    ):
        first = torch.randn(4, 5)
        mark(first)
        compiled = check_uncloned(lambda x: x * x.shape[0], [first, torch.randn(6, 5), torch.randn(9, 5)])
        assert len(compiled.entries) == 1
    x = torch.randn(4, 5)
    dynamotor.mark_static(x, 0)
    compiled = check_uncloned(lambda x: x + 1, [x], dynamic=True)
    assert [str(s) for s in compiled.entries[0].info.inputs] == ["x.shape[1]", "x"]
    with pytest.raises(IndexError):
        dynamotor.mark_dynamic(x, 2)
    x = torch.randn(4, 5)
    dynamotor.mark_dynamic(x, [0, -1])
    compiled = check_uncloned(lambda x: x + 1, [x, torch.randn(7, 9)])
    assert len(compiled.entries) == 1


@pytest.mark.parametrize("dims", [[0, 1], (0, 1), [0, -1], (-2, -1)], ids=str)
@pytest.mark.parametrize(
    "mark",
    [
        dynamotor.mark_dynamic,
        torch._dynamo.mark_dynamic,
        torch._dynamo.maybe_mark_dynamic,
        torch._dynamo.decorators.mark_unbacked,
        functools.partial(torch._dynamo.decorators.mark_unbacked, strict=True),
    ],
    ids=["ours", "dynamo", "maybe", "unbacked", "strict unbacked"],
)
def test_marks_of_several_dimensions(mark: Any, dims: Any) -> None:
    x = torch.randn(4, 5)
    mark(x, dims)
    torch._dynamo.mark_static(x, 0)  # has less weight
    for dynamic in (None, False):
        compiled = check_uncloned(lambda x: x * 2, [x, torch.randn(6, 7)], dynamic=dynamic)
        assert len(compiled.entries) == 1


@pytest.mark.parametrize("mark", [dynamotor.mark_dynamic, torch._dynamo.mark_dynamic], ids=["ours", "dynamo"])
def test_bounds_of_several_dimensions(mark: Any) -> None:
    x = torch.randn(4, 5)
    mark(x, [0, -1], min=3, max=7)
    compiled = check_uncloned(lambda x: x * 2, [x, torch.randn(7, 3)])
    assert len(compiled.entries) == 1
    assert compiled(torch.ones(7, 8)).equal(torch.ones(7, 8) * 2) and len(compiled.entries) == 2


@pytest.mark.parametrize("mark", [dynamotor.mark_static, torch._dynamo.mark_static], ids=["ours", "dynamo"])
@pytest.mark.parametrize("dims", [None, [0, 1], (1, 0)], ids=str)
def test_static_marks_of_several_dimensions(mark: Any, dims: Any) -> None:
    a, b = torch.randn(4, 5), torch.randn(6, 7)
    mark(a, dims)
    mark(b, dims)
    compiled = check_uncloned(lambda x: x * 2, [a, b], dynamic=True)
    assert [list(map(str, e.info.inputs)) for e in compiled.entries] == [["x"]] * 2


def test_marks_inside_of_the_function_keep_numbers_too() -> None:
    for mark in (dynamotor.mark_static, torch._dynamo.mark_static):

        def fn(x: Any, mark: Any = mark) -> Any:
            y = x * 2
            mark(y, 0)
            return y + 1

        compiled = check_uncloned(fn, [torch.randn(4, 5), torch.randn(6, 5), torch.randn(6, 7)], dynamic=True)
        assert [list(map(str, e.info.inputs)) for e in compiled.entries] == [["x.shape[1]", "x"]] * 2


def test_an_integer_that_equals_a_size_is_another_one_until_the_program_needs_it() -> None:
    for fn, entries in (
        (lambda x, n: x.sum() + x.new_zeros(n), 1),
        (lambda x, n: x[:n] * n, 1),
        (lambda x, n: x + x.new_zeros(n), 2),
    ):
        compiled = dynamotor.compile(fn, backend="eager", dynamic=True)
        for size, n in ((3, 3), (4, 4), (6, 6)):
            assert torch.equal(compiled(torch.ones(size), n), fn(torch.ones(size), n))
        assert len(compiled.entries) == 1
        for size, n in ((5, 5), (5, 1), (7, 7)) if entries == 2 else ((5, 3), (6, 5)):
            assert torch.equal(compiled(torch.ones(size), n), fn(torch.ones(size), n))
        assert len(compiled.entries) == entries


def check_uncloned(fn: Callable[..., Any], calls: list[torch.Tensor], **options: Any) -> Any:
    """As `check`, for tensors whose marks must arrive."""
    compiled = dynamotor.compile(fn, backend="eager", **options)
    for x in calls:
        assert torch.equal(compiled(x), fn(x))
    return compiled


def test_what_needs_the_number_is_specialised_and_explained() -> None:
    def fn(x: Any) -> Any:
        for i in range(x.shape[0]):
            x = x + i
        return x, f"{x.shape[1]}"

    compiled = check(fn, tensors((3, 9), (4, 9), (5, 9), (3, 9)))
    assert [e.general for e in compiled.entries] == [False] * 3
    report = str(dynamotor.explain(fn, backend="eager", dynamic=True)(torch.randn(3, 9)))
    assert (
        "x.shape[0] is a number in this program: s0 == 3" in report
        and "for i in range(x.shape[0]):" in report
    )
    report = str(
        dynamotor.explain(lambda x: x[: x.shape[0] // 2], backend="eager", dynamic=True)(torch.randn(8))
    )
    assert "s0 = x.shape[0], 8 at the capture, 2 <= s0" in report


def test_a_recompile_says_what_made_a_number_of_the_size() -> None:
    def fn(x: Any) -> Any:
        return sum(x[i] for i in range(x.shape[0]))

    with collect("recompile") as events:
        check(fn, tensors((3, 9), (4, 9), (5, 9)))
    first, second = [event.data["reasons"] for event in events]
    assert first == ["argument `x` has size 4 at dimension 0, was 3"]
    (general,) = [reason for reason in second if "was 4" in reason]
    assert "(a number there, asked at" in general and "for i in range(x.shape[0])" in general


def test_sizes_of_a_parameter_beside_symbols() -> None:
    w = torch.randn(4, 9)

    def fn(x: Any) -> Any:
        return w.expand((x.shape[0],) + w.shape) * x, (x.shape[0], 9) == w.shape, x.shape[:1] + w.shape

    assert len(check(fn, tensors((2, 4, 9), (3, 4, 9), (5, 4, 9), (7, 4, 9))).entries) == 2


@pytest.mark.parametrize("rows", [True, False])
def test_views_that_meet_at_some_sizes_are_written_as_eager_does(rows: bool) -> None:
    """At three elements the parts share one: eager refuses rows, and reads the written columns."""

    def fn(x: Any) -> Any:
        y = x.clone() if rows else x.t().clone(memory_format=torch.contiguous_format).t()
        y[-2:] = y[:2]
        return y

    compiled = check(fn, tensors((8, 4), (9, 4), (3, 4), (7, 4), (2, 4), (4, 4)))
    assert len(compiled.entries) == 3


def test_the_batch_is_learnt_with_the_length() -> None:
    """The first two batches may be equally large by chance: that costs no third program."""

    def fn(ids: Any, mask: Any, weights: Any) -> Any:
        return (weights[ids] * mask[..., None]).sum(1)

    weights = torch.randn(20, 4)
    calls = [
        (torch.randint(0, 20, size), torch.ones(size), weights) for size in ((8, 5), (8, 7), (3, 7), (6, 9))
    ]
    compiled = check(fn, calls)
    assert len(compiled.entries) == 2 and "weights" not in " ".join(
        compiled.entries[-1].info.data.sizes.report()
    )
    compiled = check(lambda x: x.relu(), tensors((8, 3, 9, 9), (8, 3, 7, 5), (2, 3, 4, 4)))
    assert len(compiled.entries) == 2
    compiled = check(
        lambda x: [row.sum() for row in x], tensors((4, 9), (4, 7), (4, 5))
    )  # unrolled: the batch is a number again
    assert len(compiled.entries) == 2


def test_at_the_limit_the_warning_names_the_size_and_what_to_do(recwarn: pytest.WarningsRecorder) -> None:
    with dynamotor.config.patch(cache_size_limit=2):
        check(lambda x: [x] * x.shape[0], tensors((3,), (4,), (5,)))
    text = text_of(recwarn)
    assert "x.shape[0] differs between calls and is needed as a number at" in text


def _bumped(x: Any) -> Any:
    y = (x.sin() * 2).relu()
    z = y.detach().clone()
    bump(z, z.detach())
    return (y * z).cos() + 1


@torch.library.custom_op("dm_test_sizes::bump", mutates_args={"x"})
def bump(x: torch.Tensor, seen: torch.Tensor) -> None:
    """It writes what another argument shows: no functional op does that."""
    x.add_(1)


bump.register_fake(lambda x, seen: None)


def test_general_graphs_are_cut_around_an_op_without_a_functional_form() -> None:
    compiled = dynamotor.compile(_bumped, backend="aot_eager")
    for n in (5, 7, 9, 40):
        x = torch.randn(n, requires_grad=True)
        for want, got in zip(*[torch.autograd.grad(f(x).sum(), x) for f in (_bumped, compiled)]):
            torch.testing.assert_close(got, want)
    assert sorted(e.general for e in compiled.entries) == [False, True]
    assert not any(e.info.data.left_to_eager for e in compiled.entries)
    assert counters["frames"]["parts compiled"] == 2  # before the op, and after it


def test_sizes_stay_numbers_where_the_backend_fails_on_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers_only(gm: Any, inputs: list[Any]) -> Any:
        if "shape_env" in gm.meta:
            raise NotImplementedError("symbols")
        return gm.forward

    monkeypatch.setitem(backends._rules, "eager", numbers_only)
    compiled = check(lambda x: x + 1, tensors((3,), (4,), (5,), (1,)))
    assert [e.general for e in compiled.entries] == [False] * 4
    assert "NotImplementedError: symbols" in str(dynamotor.explain(compiled)(torch.randn(5)))


def test_sizes_stay_numbers_on_request() -> None:
    compiled = check(lambda x: x + 1, tensors((3,), (4,), (5,)), options={"symbolic_sizes": False})
    assert [e.general for e in compiled.entries] == [False] * 3


def test_parameters_stay_fixed_and_training_is_right_at_every_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    compiled = dynamotor.compile(model, backend="aot_eager")
    for n in (4, 7, 9, 16, 1, 33):
        x = torch.randn(n, 6, dtype=torch.float64, requires_grad=True)
        grads = [
            torch.autograd.grad((m(x) ** 2).mean() * n, [x, *model.parameters()]) for m in (model, compiled)
        ]
        for want, got in zip(*grads):
            torch.testing.assert_close(got, want)
    assert counters["frames"]["captured"] == 3  # the first, the general one, and a batch of one


@pytest.mark.parametrize("seed", [3, 20, 35])
def test_random_programs_have_the_gradients_of_eager(seed: int) -> None:
    fn, pick = random_sizes.program(seed), random.Random(seed)
    compiled = dynamotor.compile(fn, backend="aot_eager", dynamic=(None, True)[seed % 2])

    def gradients(f: Callable[..., Any], *args: torch.Tensor) -> Any:
        x, y = (a.clone().requires_grad_() for a in args)
        outs = [t for t in f(x, y, 5) if isinstance(t, torch.Tensor) and t.requires_grad]
        return torch.autograd.grad(sum((t**2).sum() for t in outs), [x, y], allow_unused=True)

    for _ in range(8):
        b, n = pick.choice(random_sizes.SIZES[3:]), pick.choice(random_sizes.SIZES[3:])
        args = torch.randn(b, n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
        for want, got in zip(gradients(fn, *args), gradients(compiled, *args)):
            assert (want is None) == (got is None) and (want is None or torch.allclose(want, got))


def test_the_c_program_and_the_rows_agree() -> None:
    pick = random.Random(0)
    x = Arg(0, "x")
    for _ in range(60):
        a, b = (pick.randrange(2, 20) for _ in range(2))
        sizes = TraceSizes(SizePolicy(dynamic=True), lambda: None, {})
        sizes.read(x, torch.empty(a, b))
        match = sizes.guard(x, torch.empty(a, b))
        env = sizes.env
        pool = [*[type(sizes._specs[x].shape[0])({(s,): 1}, env) for s in env.symbols], 3, 2, -5]
        for _ in range(5):
            op = pick.choice(
                [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, minimum, maximum]
            )
            left, right = pick.sample(pool, 2)
            if (
                op in (operator.floordiv, operator.mod)
                and type(right) is int
                and right == 0
                or type(left) is type(right) is int
            ):
                continue
            pool.append(op(env, left, right) if op in (minimum, maximum) else op(left, right))
            pick.choice([operator.lt, operator.eq, operator.ge, operator.ne])(pool[-1], pick.choice(pool))
        row = sizes.row()
        program = compile_program([match, row], [])
        for _ in range(20):
            args = (torch.empty(pick.randrange(0, 20), pick.randrange(0, 20)),)
            try:
                holds = match.check(args) and row.check(args)
            except ZeroDivisionError:
                holds = False
            assert (program.check(args) is not None) is holds, (sizes.report(), args[0].shape)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_python_programs_are_right_at_other_sizes(name: str) -> None:
    torch.manual_seed(0)
    shapes = [(2, 3), (4, 3), (8, 16), (1, 3), (0, 3), (17, 9)]
    check(PROGRAMS[name], [(torch.randn(*shape, dtype=torch.float64),) for shape in shapes])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs_with_size_arithmetic(seed: int) -> None:
    pick, sizes = random.Random(seed), random_sizes.SIZES
    calls = []
    for _ in range(20):
        b, n = pick.choice(sizes), pick.choice(sizes)
        calls.append(
            (
                torch.randn(b, n, dtype=torch.float64),
                torch.randn(n, dtype=torch.float64),
                pick.choice((2, 2, 5, 9, -3, 0, 1)),
            )
        )
    check(
        random_sizes.program(seed),
        calls,
        backend="aot_eager" if seed % 6 == 0 else "eager",
        dynamic=(None, True)[seed % 2],
    )


def test_a_growing_cache_is_general_from_its_first_call() -> None:
    def step(x: Any, cache: Any) -> Any:
        keys = x if cache is None else torch.cat([cache["keys"], x], 1)
        return (x @ keys.transpose(1, 2)).softmax(-1) @ keys, {"keys": keys}

    compiled = dynamotor.compile(step, backend="eager")
    for prompt in (5, 9, 7):
        x, cache, eager_cache = torch.randn(2, prompt, 4), None, None
        for _ in range(6):
            (y, cache), (want, eager_cache) = compiled(x, cache), step(x, eager_cache)
            assert torch.equal(y, want) and torch.equal(cache["keys"], eager_cache["keys"])
            x = y[:, -1:].contiguous()
    assert counters["frames"]["captured"] == 3  # a prompt, a step with a cache, other prompts


def test_a_trace_that_fails_alike_with_numbers_is_not_made_for_ever():
    def refused(x, y, n):
        x *= torch.rand_like(y)
        try:
            x.add_(torch.ones(9))
        except RuntimeError as error:
            raise ValueError(n) from error

    compiled = dynamotor.compile(refused, backend="eager")
    for x, n in (
        (torch.randn(3, 4), 5),
        (torch.randn(6, 4)[::2], 5),
        (torch.randn(3, 4), 1),
        (torch.randn(3, 4), 0),
    ):
        with pytest.raises(ValueError, match=str(n)):
            compiled(x, torch.randn(4), n)


HOW = [
    ("nearest", {"size": None}),
    ("bilinear", {"scale_factor": 2}),
    ("nearest-exact", {"scale_factor": 0.5}),
]


@pytest.mark.parametrize(("mode", "how"), HOW)
def test_interpolation_keeps_symbols(mode: str, how: dict[str, Any]) -> None:
    """PyTorch's own entry takes plain sizes only; layouts are found again with what the graph holds of
    sizes.
    """

    def fn(x: Any, like: Any) -> Any:
        options = {"size": like.shape[-2:]} if "size" in how else how
        return (
            torch.nn.functional.interpolate(
                torch.nn.functional.conv2d(x, weight).relu(), mode=mode, **options
            )
            + 1
        )

    weight, compiled = torch.randn(4, 3, 3, 3), dynamotor.compile(fn, backend="native")
    with torch.no_grad():
        for n, m in ((9, 12), (12, 17), (14, 9), (21, 40)):
            x, like = torch.randn(2, 3, n, n + 4), torch.randn(1, 1, m, m + 1)
            torch.testing.assert_close(compiled(x, like), fn(x, like))
    assert len(compiled.entries) == 2


def test_pools_and_activations_keep_symbols() -> None:
    """A pool to one place is laid out by `as_strided`; PyTorch has no tag for `hardswish`."""

    def fn(x: Any) -> Any:
        return torch.nn.functional.hardswish(torch.nn.functional.adaptive_avg_pool2d(x, 1) * 2, inplace=True)

    for form in (torch.contiguous_format, torch.channels_last):
        compiled = check(
            fn, [(torch.randn(b, 4, 7, 7).to(memory_format=form),) for b in (3, 5, 4, 7)], backend="aot_eager"
        )
        assert len(compiled.entries) == 2


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_where_a_tensor_begins_in_its_storage(backend: str) -> None:
    base, before = torch.randn(60), counters["frames"]["captured"]
    fn = lambda x: (x * x.storage_offset(), x.storage_offset() // 2 + x.shape[0])  # noqa: E731
    compiled = dynamotor.compile(fn, backend=backend)
    with collect("recompile") as events:
        for n in (5, 7, 9, 12, 3):
            x = base[n : 2 * n]
            want, got = fn(x), compiled(x)
            assert same(want, got)
        assert same(fn(base[1:9]), compiled(base[1:9]))
    assert counters["frames"]["captured"] - before <= 3
    assert any("x.storage_offset() is 7" in r or "at dimension 0" in r for r in events[0].data["reasons"])


QUOTIENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "ceil": lambda x: x[: math.ceil(x.shape[0] / 3)] * 2,
    "floor": lambda x: x[: math.floor(x.shape[0] / 2)] + math.floor((x.shape[0] - 20) / 3),
    "int": lambda x: x[: int(x.shape[0] / 2)] + int(x.shape[0] * 0.25) + int(0.5 * x.shape[0]),
    "trunc": lambda x: x.new_zeros(math.trunc((x.shape[0] + 3) / 4) + 1),
    "same padding": lambda x: torch.nn.functional.pad(
        x, (0, 0, 0, max((math.ceil(x.shape[0] / 4) - 1) * 4 + 5 - x.shape[0], 0))
    ),
    "in place": lambda x: x[: math.ceil(_halved(x.shape[0]))] + 1,
}


def _halved(n: float) -> float:
    n /= 2
    return n


@pytest.mark.parametrize("name", QUOTIENTS)
def test_rounded_quotients_of_sizes_are_sizes(name: str) -> None:
    fn, before = QUOTIENTS[name], counters["frames"]["captured"]
    compiled = dynamotor.compile(fn, backend="eager")
    for n in (22, 31, 24, 37, 25, 29, 40):
        x = torch.randn(n, 3)
        assert same(fn(x), compiled(x)), n
    assert counters["frames"]["captured"] - before <= 3  # padded or not


def test_a_quotient_that_is_no_size_is_a_number() -> None:
    fn = lambda x: (x * (x.shape[0] / 3), x.shape[0] / 4, round(x.shape[0] / 2), f"{x.shape[0] / 2}")  # noqa: E731
    compiled = dynamotor.compile(fn, backend="eager")
    for n in (5, 7, 6, 9):
        x = torch.randn(n, 3)
        assert same(fn(x), compiled(x))
    asked = dynamotor.compile(
        lambda x: x * 2 if x.shape[0] / 2 > 3 and x.shape[0] / 2 is not None else x, backend="eager"
    )
    for n in (5, 7, 6, 9):
        x = torch.randn(n, 3)
        assert torch.equal(asked(x), x * 2 if n / 2 > 3 else x)


def test_tensors_of_sizes_take_every_size() -> None:
    """Each size had a program of its own; where the numbers are read again, it still has."""

    def stays(x: torch.Tensor) -> Any:
        return torch.tensor([x.shape[0], 2]) * 2, torch.tensor(x.shape), x * torch.tensor(x.shape[0])

    def reads(x: torch.Tensor) -> Any:
        sizes = torch.as_tensor([x.shape[0], 1])
        return x.view(sizes.tolist()), int(sizes[0]) + 1

    for fn, programs in ((stays, 2), (reads, 4)):
        counters["capture"].clear()
        check(fn, [(torch.rand(n),) for n in (3, 5, 7, 9)])
        assert counters["capture"]["graphs"] == programs


@pytest.mark.parametrize("dims", [2, 3])
def test_one_program_samples_grids_of_all_sizes(dims):
    def sample(x, grid):
        return torch.nn.functional.grid_sample(x, grid, align_corners=False)

    compiled = dynamotor.compile(sample, backend="aot_eager")
    counters.clear()
    for n in (4, 5, 7):
        x = torch.randn(2, 3, *[6] * dims, requires_grad=True)
        grid = (torch.rand(2, *[n + k for k in range(dims)], dims) * 2 - 1).requires_grad_()
        found = [
            (out, *torch.autograd.grad(out.square().sum(), (x, grid)))
            for out in (compiled(x, grid), sample(x, grid))
        ]
        torch.testing.assert_close(*found)
    assert counters["frames"]["captured"] == 2
    with pytest.raises(RuntimeError, match="same batch size"):
        compiled(torch.randn(3, 3, *[6] * dims), torch.rand(2, *[5] * dims, dims))


def test_a_divisor_that_becomes_zero_compiles_anew():
    def fn(x):
        return x.diagonal().chunk(2, 0)[-1] + 1

    compiled = dynamotor.compile(fn, dynamic=True)
    for shape in ((2, 3), (64, 3), (65, 65), (1, 0), (0, 3)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), fn(x))
