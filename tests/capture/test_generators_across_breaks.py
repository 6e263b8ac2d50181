"""A generator that has not started when the graph breaks is made again by its call: `with` blocks go on
captured.
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
