"""Class attributes that are set, ids, names of a frame, seeded generators and cached methods need no graph break."""

import functools
import random

import pytest
import torch

import dynamotor
from dynamotor.base.events import counters


def _counter():
    class Counted:
        n = 0

        @classmethod
        def up(cls):
            cls.n += 1
            return cls.n

    class Derived(Counted):
        pass

    def program(x):
        first = Counted.up()
        Derived.n = Derived().n + 10
        return x + first + Derived().n, Counted.n, Derived.n, hasattr(Counted, "other")

    return program


def _class_keeps_a_tensor():
    class Last:
        x = None

    def program(x):
        before, Last.x = Last.x, x * 2
        return Last.x + (0 if before is None else before)

    return program


def _ids():
    def program(x):
        y = x * 2
        seen, places = set(), {id(t): i for i, t in enumerate((x, y))}
        for t in (x, y, x):
            y = y + 10 * (id(t) in seen)
            seen.add(id(t))
        return y + places[id(x)], len(seen), id(x) == id(x), id(x) != id(y)

    return program


def _ids_that_leave():
    def program(x):
        y = x * 2
        return y, {id(y): 1}, id(y)

    def checked(x):
        y, table, number = program(x)
        return y, table[id(y)], number == id(y)

    return checked


def _names():
    held = 3

    def program(x, k=2):
        def inner():
            return held

        y = x * k
        names = sorted(locals())
        return (
            y,
            names,
            "y" in dir(),
            "{k}".format(**locals().copy()) if False else inner(),
            "torch" in globals(),
        )

    return program


def _seeded():
    def program(x):
        rng, items = random.Random(5), [x, x * 2, x * 3]
        rng.shuffle(items)
        return (
            items,
            rng.choice(items),
            x * rng.random(),
            rng.sample(range(9), 3),
            rng.gauss(0, 1),
            rng.getstate(),
        )

    return program


class _Memo:
    def __init__(self, n):
        self.n = n

    @functools.lru_cache  # noqa: B019
    def up(self, v):
        self.n += v
        return self.n


def _cached_method_of_a_new_object():
    def program(x):
        memo = _Memo(4)
        return x + memo.up(3) + memo.up(3) + memo.up(v=1), memo.n

    return program


def _cached_method_of_an_outside_object():
    memo = _Memo(4)
    return lambda x: x + memo.up(3)


PROGRAMS = (
    _counter, _class_keeps_a_tensor, _ids, _ids_that_leave, _names, _seeded, _cached_method_of_a_new_object,
    _cached_method_of_an_outside_object,
)  # fmt: skip


@pytest.mark.parametrize("make", PROGRAMS)
def test_without_a_break_and_as_in_eager(make):
    dynamotor.reset()
    breaks = counters["breaks"].total()
    eager, compiled = make(), dynamotor.compile(make(), backend="eager")
    for i in range(3):
        x = torch.full((3,), 1.0 + i)
        assert str(compiled(x)) == str(eager(x))
    assert counters["breaks"].total() == breaks


def test_an_object_with_cached_results_leaves_by_a_break():
    def program(x):
        memo = _Memo(4)
        memo.up(3)
        return x + 1, memo

    _, memo = dynamotor.compile(program, backend="eager")(torch.ones(3))
    assert (memo.up(3), memo.n) == (7, 7)


@pytest.mark.parametrize("value", [property(lambda self: 1), len, lambda self: 2])
def test_descriptors_of_a_class_are_set_by_eager(value):
    class Held:
        it = 1

    def program(x):
        Held.it = value
        return x + 1

    dynamotor.reset()
    dynamotor.compile(program, backend="eager")(torch.ones(3))
    assert vars(Held)["it"] is value


def _of_a_dict(kept, x):
    kept[id(x)] = kept.get(id(x), 0) + 1
    return x * kept[id(x)]


def _of_a_tuple_as_key(kept, x):
    kept["k", id(x)] = kept.get(("k", id(x)), 0) + 1
    return x * len(kept)


def _of_a_set(kept, x):
    known = id(x) in kept
    kept.add(id(x))
    return x * len(kept) + known


def _of_an_update(kept, x):
    known = {id(x)} <= kept
    kept |= {id(x)}
    return x * len(kept) + known


def _of_a_copy(kept, x):
    kept.add(id(x))
    copied = set(kept)
    copied.add(id(x))
    return x * len(copied)


@pytest.mark.parametrize(
    ("make", "program"),
    [
        (dict, _of_a_dict),
        (dict, _of_a_tuple_as_key),
        (set, _of_a_set),
        (set, _of_an_update),
        (set, _of_a_copy),
    ],
)
def test_ids_that_earlier_calls_kept_are_found(make, program):
    tensors = [torch.ones(1), torch.ones(1), torch.ones(1)]
    results = []
    for compiled in (program, dynamotor.compile(program, backend="eager")):
        kept = make()
        results.append([compiled(kept, tensors[k]).item() for k in (0, 1, 0, 2, 0, 1)])
    assert results[0] == results[1]


class _Key:
    def __init__(self, name):
        self.name = name

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


def test_keys_with_an_eq_of_their_own_meet_each_other_alone():
    def program(table, x):
        table[_Key("a")] += 1
        table[_Key("c")] = len(table)
        table[_Key("b")] = table.pop(_Key("b")) * 2
        return x * table[_Key("a")], [(key.name, value) for key, value in table.items()]

    tables = [{_Key("a"): 1, _Key("b"): 2} for _ in range(2)]
    compiled = dynamotor.compile(program, backend="eager", fullgraph=True)
    for _ in range(3):
        assert str(compiled(tables[0], torch.ones(1))) == str(program(tables[1], torch.ones(1)))


def test_sets_that_change_ask_an_eq_once():
    class Counted(_Key):
        asked = 0

        def __eq__(self, other):
            Counted.asked += 1
            return self.name == other.name

        __hash__ = _Key.__hash__

    def program(items, x):
        items.add(Counted("a"))
        items.discard(Counted("b"))
        items.discard(Counted("c"))
        return x * len(items)

    asked = []
    for compiled in (program, dynamotor.compile(program, backend="eager", fullgraph=True)):
        Counted.asked, items = 0, {Counted("a"), Counted("b")}
        results = [compiled(items, torch.ones(1)).item() for _ in range(3)]
        asked.append((results, Counted.asked, [item.name for item in items]))
    assert asked[0] == asked[1]
