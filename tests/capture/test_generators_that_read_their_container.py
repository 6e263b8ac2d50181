"""A generator may look at the container that it is filling: `y.extend(m(y[-1]) for m in layers)` (YOLO's C2f)."""

from __future__ import annotations

import collections

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression


def extended_list(x):
    y = list(x.chunk(2, 0))
    y.extend(layer(y[-1]) for layer in (torch.sin, torch.exp, torch.neg))
    return torch.cat(y)


def extended_by_map(x):
    y = [x]
    y.extend(map(lambda layer: layer(y[-1]) + len(y), (torch.sin, torch.exp, torch.neg)))  # noqa: C417
    return torch.stack(y)


def added_in_place(x):
    y = [x]
    y += (layer(y[-1]) for layer in (torch.sin, torch.exp))
    return torch.stack(y), len(y)


def of_a_list_from_outside(x, kept=None):
    kept = OUTSIDE
    kept.clear()
    kept.append(x)
    kept.extend(kept[-1] * 2 + len(kept) for _ in range(3))
    return kept[-1] + 0


OUTSIDE: list[torch.Tensor] = []


def extended_deque(x):
    y = collections.deque([x])
    y.extend(y[-1] + len(y) for _ in range(3))
    return torch.stack(list(y))


def updated_dict(x):
    found = {0: x}
    found.update((k, found[k - 1].sin() + len(found)) for k in range(1, 4))
    return torch.stack(list(found.values()))


def updated_set(x):
    seen = {0}
    seen.update(len(seen) + k for k in range(4))
    seen.difference_update(k for k in range(9) if len(seen) > 2)
    return x + sum(seen), sorted(seen)


def kept_before_an_exception(x):
    def parts():
        yield x + 1
        yield x + 2
        raise KeyError("late")

    y, d, s = [x], {}, set()
    for fill in (
        lambda: y.extend(parts()),
        lambda: d.update((len(d), p) for p in parts()),
        lambda: s.update(1 / k for k in (2, 1, 0)),
    ):
        try:
            fill()
        except (KeyError, ZeroDivisionError):
            y.append(x * 3)
    return torch.stack(y), len(d), sorted(s)


def itself(x):
    y = [x, x + 1]
    y.extend(y)
    y += y
    y.extend(reversed(y))
    y.extend(tuple(y))
    return torch.stack(y), len(y)


def a_subclass(x):
    class Kept(list):
        def __iter__(self):
            yield from (item * 2 for item in list.__iter__(self))

    y = [x]
    y.extend(Kept([x + 1, x + 2]))
    z = Kept([x])
    z.extend(len(z) + item for item in y)
    return torch.stack(y), torch.stack(list.copy(z)), len(z)


def rest_of_a_loop(x):
    todo, out = [3], []
    for n in todo:
        todo.extend(k for k in range(n) if len(todo) < 9)
        out.append(x * n + len(todo))
    return torch.stack(out), todo


@pytest.mark.parametrize(
    "program",
    [
        extended_list, extended_by_map, added_in_place, of_a_list_from_outside, extended_deque, updated_dict, updated_set,
        kept_before_an_exception, itself, a_subclass, rest_of_a_loop,
    ],
)  # fmt: skip
def test_what_came_before_is_seen(program):
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(dynamotor.compile(program)(x), program(x))
