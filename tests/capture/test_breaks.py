"""A graph break anywhere gives eager's result: programs are cut at many instructions, and at the usual
causes.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import OrderedDict, deque

import pytest
import torch
from programs import PROGRAMS
from programs_odd import PROGRAMS as ODD
from test_programs import Recorder, same
from warned import text_of

import dynamotor
from dynamotor.base.errors import CaptureError
from dynamotor.base.events import collect
from dynamotor.capture import frontend
from dynamotor.capture.trace import Trace


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cut_at_many_instructions(name, monkeypatch, recwarn):
    fn = PROGRAMS[name]
    for steps in (1, 7, 23, 61, 150):
        monkeypatch.setattr(frontend, "Trace", functools.partial(Trace, max_steps=steps))
        compiled = dynamotor.compile(fn, backend=Recorder())
        for _ in range(2):
            x = torch.randn(2, 3, dtype=torch.float64)
            assert same(fn(x), compiled(x)), steps
    assert "DM90" not in text_of(recwarn)


@pytest.mark.parametrize("name", ODD)
def test_odd_programs(name, capfd, recwarn):
    """In one graph or several, without a mistake of the capture's own."""
    fn = ODD[name]
    compiled = dynamotor.compile(fn, backend=Recorder())
    for _ in range(2):
        x = torch.randn(2, 3, dtype=torch.float64)
        assert same(fn(x), compiled(x))
    assert not capfd.readouterr().err and not text_of(recwarn)


def prints(x):
    y = x * 2
    print("between")
    return y + 1


def inner(x):
    print("inner")
    return x + 1


def breaks_in_calls(x):
    return inner(inner(x * 2)) - inner(x)


def decides_on_data(x):
    y = x + 1
    if y.sum() > 0:
        y = y * 2
    else:
        y = y - 3
    return y * x


def loop_with_break_inside(x):
    for i in range(3):
        x = x + i
        print(i)
    return x


def while_on_data(x):
    n = 0
    while x.sum() < 40:
        x = x + 1
        n += 1
    return x, n


def item_of_a_tensor(x):
    return x * x.sum().item()


def inside_no_grad(x):
    with torch.no_grad():
        y = x * 2
        print(torch.is_grad_enabled())
        z = y + 1
    return z, z.requires_grad, (x * 2).requires_grad


def inside_try(x):
    log = []
    try:
        y = x * 2
        print("try")
        raise ValueError("a")
    except ValueError as error:
        print("except", error)
        log.append(str(error))
        y = x + 1
    finally:
        print("finally")
        log.append("finally")
    return y, log


def natively_raised(x):
    try:
        return torch.ones(2) + x[5:].reshape(7, 7)
    except RuntimeError as error:
        return type(error).__name__


def inside_closures(x):
    total = x
    seen = []

    def add(k):
        nonlocal total
        total = total + k
        print("add")
        seen.append(k)
        return total

    return add(1) + add(2), seen, total


def inside_comprehension(x):
    return [inner(x + i) for i in range(2)]


def key_function(x):
    return sorted([3, 1, 2], key=lambda k: (print(k), k)[1]), x + 1


def generator_that_prints(x):
    def items():
        for i in range(2):
            print(i)
            yield x + i

    return list(items())


class Holder:
    def __init__(self):
        self.seen = []

    @property
    def noisy(self):
        print("property")
        return len(self.seen)


def effects_before_and_after(x, holder):
    holder.seen.append(1)
    print(len(holder.seen))
    holder.seen.append(x)
    return x + holder.noisy


ONE_ARGUMENT = [
    prints,
    breaks_in_calls,
    decides_on_data,
    loop_with_break_inside,
    while_on_data,
    item_of_a_tensor,
    inside_no_grad,
    inside_try,
    natively_raised,
    inside_closures,
    inside_comprehension,
    key_function,
    generator_that_prints,
]


@pytest.mark.parametrize("fn", ONE_ARGUMENT)
def test_usual_causes(fn, capsys):
    compiled = dynamotor.compile(fn, backend=Recorder())
    for sign in (1, -1, 1):
        x = (torch.rand(3, dtype=torch.float64) * sign).requires_grad_()
        want = fn(x)
        text = capsys.readouterr().out
        got = compiled(x)
        assert same(want, got) and capsys.readouterr().out == text


def test_effects_on_both_sides_of_a_break():
    compiled = dynamotor.compile(effects_before_and_after, backend=Recorder())
    for _ in range(2):
        ours, theirs, x = Holder(), Holder(), torch.randn(2)
        assert same(compiled(x, ours), effects_before_and_after(x, theirs)) and same(ours.seen, theirs.seen)


def test_a_break_gives_two_graphs_a_reason_and_no_recompilation():
    backend = Recorder()
    with collect("break", "recompile") as events:
        compiled = dynamotor.compile(prints, backend=backend)
        for _ in range(3):
            compiled(torch.ones(2))
    assert len(backend.graphs) == 2 and [e.kind for e in events] == ["break"]
    reason = events[0].data["reason"]
    assert reason.code == "DM211" and reason.where.function == "prints"


def test_fullgraph_refuses_with_the_line():
    with pytest.raises(CaptureError, match="DM211"):
        dynamotor.compile(prints, backend=Recorder(), fullgraph=True)(torch.ones(2))


def test_many_breaks_do_not_grow_the_stack():
    def f(x, n):
        i = 0
        while x.sum() < n:
            x = x + 1
            i += 1
        return x

    dynamotor.config.cache_size_limit, before = 64, dynamotor.config.cache_size_limit
    try:
        assert dynamotor.compile(f, backend=Recorder())(torch.zeros(1), 50).item() == 50
    finally:
        dynamotor.config.cache_size_limit = before


def test_a_loop_on_data_reuses_its_graphs():
    def f(x):
        while x.sum() < 300:
            x = x + 1
        return x

    backend = Recorder()
    assert dynamotor.compile(f, backend=backend)(torch.zeros(1)).item() == 300
    assert len(backend.graphs) <= 3


def test_numbers_that_are_only_returned_are_not_guarded():
    def rest(x):
        y = x * 2
        return (y, y.sum().item())

    compiled = dynamotor.compile(rest)
    with collect("capture") as events:
        for n in range(4):
            assert compiled(torch.full((2,), n / 3))[1] == pytest.approx(4 * n / 3)
    assert len(events) == 1


def test_what_a_call_gives_and_nobody_takes_is_not_guarded():
    def rest(x):
        y = x.sum()
        y.tolist()
        return x / y

    backend = Recorder()
    compiled = dynamotor.compile(rest, backend=backend)
    for n in range(1, 4):
        assert compiled(torch.full((2,), n / 3)).tolist() == pytest.approx([0.5, 0.5])
    assert len(backend.graphs) == 2


class Failure(Exception):
    def __init__(self, code):
        super().__init__(f"failure {code}")


def test_a_c_method_of_a_base_stays_that_of_the_base():
    def fails(x):
        print(end="")
        raise Failure(1)

    with pytest.raises(Failure, match="^failure 1$"):
        dynamotor.compile(fails)(torch.ones(2))


@pytest.mark.parametrize("lock", (threading.Lock, threading.RLock))
def test_locks_cost_no_recompilation(lock):
    def fn(x, lock):
        with lock:
            y = x + 1
        return y * 2

    compiled = dynamotor.compile(fn, backend="eager")
    for captures in (2, 0):
        dynamotor.counters["capture"].clear()
        x = torch.randn(2)
        assert torch.equal(compiled(x, lock()), (x + 1) * 2)
        assert dynamotor.counters["capture"].total() == captures


def test_c_methods_that_are_new_at_each_read_are_captured_once():
    def fn(x, method, argument):
        return x + 1, method(argument)

    class Ordered(OrderedDict):
        above = property(lambda self: super().__contains__)

    compiled = dynamotor.compile(fn, backend="eager")
    x, captures = torch.ones(2), dynamotor.counters["capture"]
    for make in (
        lambda: [1.0].append,
        lambda: x.add,
        lambda: dict.fromkeys,
        lambda: deque([2]).__contains__,
        lambda: OrderedDict(a=1).get,
        lambda: Ordered().above,
    ):
        argument = (1,) if make() == dict.fromkeys else 1
        compiled(x, make(), argument)
        captures.clear()
        assert repr(compiled(x, make(), argument)) == repr(fn(x, make(), argument))
        assert not captures


def test_buffers_that_are_set_anew_cost_no_recompilation():
    class Range(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.zeros(1))

        def forward(self, x):
            if self.low.max() > 9:
                return x
            self.low = self.low * 0.9 + x.min()
            return x * self.low

    model = torch.nn.Sequential(Range(), Range())
    eager, compiled = copy.deepcopy(model), dynamotor.compile(model, backend="aot_eager")
    for call in range(5):
        if call == 3:
            dynamotor.counters["capture"].clear()
        x = torch.randn(3)
        assert torch.equal(compiled(x), eager(x)) and torch.equal(model[1].low, eager[1].low)
    assert not dynamotor.counters["capture"]


def test_a_break_has_a_cure_even_where_its_rule_names_none():
    def draws(x):
        return x * random.random()

    def runs_backward(x):
        (x * torch.ones(3, requires_grad=True)).sum().backward()
        return x + 1

    for fn, said in ((draws, "torch.rand"), (runs_backward, "outside of the compiled function")):
        with pytest.raises(CaptureError, match="what to do: .*" + said):
            dynamotor.compile(fn, fullgraph=True)(torch.ones(3))
