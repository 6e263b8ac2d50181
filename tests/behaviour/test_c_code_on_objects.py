# ruff: noqa: UP031, UP032
"""What CPython's C code asks of the program's objects (to sort, compare or show them) it asks in the trace, in its own
order.
"""

import pytest
import torch

import dynamotor

ASKED: list[tuple[int, int]] = []


class Point:
    def __init__(self, v):
        self.v = v

    def __repr__(self):
        return f"P{self.v}"

    def __lt__(self, other):
        ASKED.append((self.v, other.v))
        return self.v < other.v

    def __gt__(self, other):
        ASKED.append((other.v, self.v))
        return self.v > other.v

    def __eq__(self, other):
        ASKED.append((-self.v, -other.v))
        return self.v == other.v

    __hash__ = None


PROGRAMS = [
    lambda p: sorted(p),
    lambda p: sorted(p, reverse=True),
    lambda p: sorted(p, key=lambda one: -one.v),
    lambda p: sorted(p, key=lambda one: (one.v % 2, one)),
    lambda p: (min(p), max(p), max(p, key=lambda one: -one.v), min(iter(p)), max([], default=p[0])),
    lambda p: p.sort() or p,
    lambda p: (p[:3] < p[1:4], p[:3] == p[:3], p[:2] != [Point(0), Point(7)], (p[0], 2) < (p[1], 1)),
    lambda p: (p.index(Point(3)), p.count(Point(1)), p.remove(Point(2)), p, Point(1) in p),
    lambda p: "%s %r %5s|%-4s|" % (p[0], p[1], p[2], p[3]) + "%(a)s" % {"a": p[0]} + "%.1s" % p[1],
    lambda p: "{!r:>5}|{}".format(p[0], p[1]) + f"{p} { ({1: p[0]}) } {p[0]!s:>4}" + "%s" % (p[:1],),
]


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_what_is_asked_and_what_comes_out(program):
    def run(x, n):
        ASKED.clear()
        return x + 1, repr(PROGRAMS[program]([Point(i * 7 % 5) for i in range(n)])), list(ASKED)

    compiled, x = dynamotor.compile(run, backend="eager", fullgraph=True), torch.ones(1)
    for n in (5, 9):
        assert compiled(x, n)[1:] == run(x, n)[1:]
