"""A generator that has not started when the graph breaks is made again by its call, and one of an open `with` block
where it waits: `with` blocks go on captured.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import dynamotor
from dynamotor.base.events import counters

log = []


@contextlib.contextmanager
def region(a, *rest, k=1, **more):
    print(end="")
    log.append((a, rest, k, sorted(more.items())))
    try:
        yield a + k
    finally:
        log.append("out")
        print(end="")


def in_a_region(x):
    with region(1, 2, 3, k=4, z=5) as v:
        y = (x * v).sin()
    return y + 1


def steps(n, scale=2):
    for i in range(n):
        yield i * scale


def made_before_a_break(x):
    made = steps(3)
    print(end="")
    for i in made:
        x = x + i
    return x


def attention(x):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def check(function, x):
    log.clear()
    expected = function(x)
    once = list(log)
    compiled = dynamotor.compile(function)
    for _ in range(2):
        log.clear()
        torch.testing.assert_close(compiled(x), expected)
        assert log == once
    return dynamotor.explain(function)(x).graph_count


def test_a_region_whose_entry_breaks():
    assert check(in_a_region, torch.randn(3)) == 2


def test_a_generator_made_before_a_break():
    check(made_before_a_break, torch.randn(3))


def test_the_choice_of_attention_kernels():
    assert check(attention, torch.randn(1, 2, 4, 8)) == 1


@contextlib.contextmanager
def told(said, swallows=()):
    said.append("in")
    try:
        yield said
    except swallows as error:
        said.append(str(error))
    finally:
        said.append("out")


def in_one_region(x, said, fails):
    x = x + 1
    with told(said, ValueError):
        x = x * 2
        if x.sum() > 0:
            x = x + 3
        said.append("body")
        if fails:
            raise fails("no")
        x = x.relu()
    return x - 1


def in_two_regions(x, said, fails):
    with torch.no_grad(), told(said) as outer:
        y = x.sin()
        with told(outer, ValueError):
            if y.sum() > 0:
                y = y + 3
            if fails:
                raise fails("no")
        y = y.cos()
    return x * y


@pytest.mark.parametrize("fn", [in_one_region, in_two_regions])
@pytest.mark.parametrize("fails", [None, ValueError, KeyError])
def test_a_break_inside_of_a_region_is_cut_around(fn, fails):
    """The whole function ran in eager, since a suspended generator cannot be rebuilt."""
    compiled = dynamotor.compile(fn, backend="eager")
    counters.clear()
    for value in (1.0, -4.0, 2.0):
        x = torch.full((3,), value, requires_grad=True)
        found = []
        for run in (compiled, fn):
            said = []
            try:
                result = run(x, said, fails)
                found.append((result.tolist(), result.requires_grad, torch.is_grad_enabled(), said))
            except KeyError as error:
                found.append((str(error), torch.is_grad_enabled(), said))
        assert found[0] == found[1]
    assert counters["capture"]["graphs"] >= 2
    assert not counters["frames"]["eager"] and not counters["frames"]["recompiled"] > 3


def decodes(x, said, steps):
    early = any(n > 1 for n in steps)  # leaves its generator where it found one
    with told(said, ValueError):
        done = False
        while not done:
            x = x * 1.5 + early
            said.append(len(said))
            done = bool(x.sum() > 20)
    return x - 1


def test_a_loop_in_a_region_goes_on_captured_where_another_generator_waits():
    """`any` leaves a generator behind: the cut was looked for at that one, and the function ran in eager."""
    compiled = dynamotor.compile(decodes, backend="eager")
    for start in (0.5, 0.75):
        before = dict(counters["frames"])
        found = []
        for run in (compiled, decodes):
            said = []
            found.append((run(torch.full((3,), start), said, [1, 2, 3]).tolist(), said))
        assert found[0] == found[1]
        assert counters["frames"]["eager"] == before.get("eager", 0)
    counts = []
    for total in (20.0, 200.0):

        def outer(x, limit=total):
            return decodes_in(x, limit)

        counts.append(dynamotor.explain(outer)(torch.full((3,), 0.5)).graph_count)
    assert counts[0] == counts[1]  # one program for all rounds


def decodes_in(x, limit):
    said = []
    early = next((n for n in (1, 2, 3) if n > 1), None)
    with told(said, ValueError):
        while x.sum() < limit:
            x = x * 1.5 + early
    return x - 1


class Counted:
    """A manager by a method, whose generator has cells, a loop and a block of its own."""

    def __init__(self, said):
        self.said, self.depth = said, 0

    @contextlib.contextmanager
    def level(self, *names, step=1):
        def rise(by):
            self.depth += by
            seen.append(self.depth)
            return seen

        seen = list(names)
        for _ in range(1):
            with told(self.said, ()):
                try:
                    yield rise(step)
                finally:
                    rise(-step)
                    self.said.append((names, tuple(seen)))


def with_cells(x, said, fails):
    counted = Counted(said)
    with counted.level("a", "b", step=2) as seen, counted.level() as other:
        x = x * (len(seen) + counted.depth)
        if x.sum() > 0:
            seen.append("positive")
            x = x + 1
        other.append(seen)
        if fails:
            raise fails("no")
        if x.sum() > 5:
            x = x - 2
    said.append((seen is other[-2], counted.depth, seen[:]))
    return x * counted.depth + len(seen)


@contextlib.contextmanager
def scaled(x, said):
    y = x * 3
    yield y
    said.append("no try")  # not reached where the block raises
    said.append((y + x).tolist())


def with_tensors(x, said, fails):
    with scaled(x.sin(), said) as y, scaled(y, said) as z:
        y.add_(1)
        if y.sum() > 0:
            z = z + y
        if fails:
            raise fails("no")
    return z


@contextlib.contextmanager
def handling(said):
    try:
        raise LookupError("inside")
    except LookupError:
        yield said  # waits in a handler
        said.append("handled")


def with_a_handler(x, said, fails):
    with handling(said):
        x = x + 1
        if x.sum() > 0:
            x = x * 2
        if fails:
            raise fails("no")
    return x


@contextlib.contextmanager
def keeping_locals(said):
    before = locals()
    later = 3
    yield later
    said.append((sorted(locals()), sorted(before), before is locals()))


def with_locals(x, said, fails):
    with keeping_locals(said) as later:
        x = x + later
        if x.sum() > 0:
            x = x * 2
        if fails:
            raise fails("no")
    return x


def with_a_stack(x, said, fails):
    with contextlib.ExitStack() as stack:
        inner = stack.enter_context(told(said, ValueError))
        x = x + 1
        if x.sum() > 0:
            x = x * 2
        inner.append("body")
        if fails:
            raise fails("no")
    return x


class OwnExit(contextlib._GeneratorContextManager):
    def __exit__(self, *error):
        self.said.append("own exit")
        return super().__exit__(*error)


def with_an_exit_of_its_own(x, said, fails):
    manager = OwnExit(told.__wrapped__, (said, ValueError), {})
    manager.said = said
    with manager:
        x = x + 1
        if x.sum() > 0:
            x = x * 2
        if fails:
            raise fails("no")
    return x


@told([])
def decorated(x):
    x = x + 1
    return x * 2 if x.sum() > 0 else x


def with_a_decorator(x, said, fails):
    x = decorated(x)
    if fails:
        raise fails("no")
    return x


def with_a_kept_manager(x, said, fails):
    manager = told(said)
    with manager:
        x = x + 1
        if x.sum() > 0:
            said.append(manager.gen.gi_frame is not None)
        said.append((manager.gen.__name__, manager.gen.__qualname__))
        if fails:
            raise fails("no")
    said.append(manager.gen.gi_frame is None)
    return x


@pytest.mark.parametrize(
    "fn",
    [
        with_cells, with_tensors, with_a_handler, with_a_stack, with_locals, with_an_exit_of_its_own, with_a_decorator,
        with_a_kept_manager,
    ],
)  # fmt: skip
@pytest.mark.parametrize("fails", [None, ValueError, KeyError])
def test_the_generator_of_a_region_goes_on_behind_a_break(fn, fails):
    compiled = dynamotor.compile(fn, backend="eager")
    for value in (1.0, -4.0, 2.0):
        found = []
        for run in (compiled, fn):
            said = []
            try:
                result = run(torch.full((3,), value), said, fails).tolist()
            except Exception as error:
                result = type(error), str(error)
            found.append((result, said))
        assert found[0] == found[1]


def test_what_comes_before_a_region_and_its_body_are_one_graph():
    counters.clear()
    x, said = torch.ones(3), []
    compiled = dynamotor.compile(in_one_region, backend="eager")
    torch.testing.assert_close(compiled(x, said, None), in_one_region(x, [], None))
    assert said == ["in", "body", "out"]
    assert counters["capture"]["graphs"] == 3  # up to the branch, up to the end of the block, and behind it
