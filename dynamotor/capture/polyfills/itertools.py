"""itertools and `iter` as generators, and Counter's counting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def chain(*iterables: Iterable[Any]) -> Iterator[Any]:
    for iterable in iterables:
        yield from iterable


def chain_from_iterable(iterables: Iterable[Iterable[Any]]) -> Iterator[Any]:
    for iterable in iterables:
        yield from iterable


def islice(iterable: Iterable[Any], *args: Any) -> Iterator[Any]:
    s = slice(*args)
    start, stop, step = s.start or 0, s.stop, s.step or 1
    iterator, at, wanted = iter(iterable), 0, start
    while stop is None or wanted < stop:
        for item in iterator:
            at += 1
            if at - 1 == wanted:
                yield item
                wanted += step
                break
        else:
            return


def tee(iterable: Iterable[Any], n: int = 2) -> tuple[Iterator[Any], ...]:
    iterator = iter(iterable)
    items: list[Any] = []
    return tuple([tee_branch(iterator, items) for _ in range(n)])


def tee_branch(iterator: Iterator[Any], items: list[Any]) -> Iterator[Any]:
    at = 0
    while True:
        if at == len(items):
            for item in iterator:
                items.append(item)
                break
            else:
                return
        at += 1
        yield items[at - 1]


def repeat(object: Any, times: int | None = None) -> Iterator[Any]:
    if times is None:
        while True:
            yield object
    for _ in range(times):
        yield object


def count(start: Any = 0, step: Any = 1) -> Iterator[Any]:
    n = start
    while True:
        yield n
        n += step


def cycle(iterable: Iterable[Any]) -> Iterator[Any]:
    saved = []
    for item in iterable:
        yield item
        saved.append(item)
    while saved:
        yield from saved


def product(*iterables: Iterable[Any], repeat: int = 1) -> Iterator[Any]:
    pools = [tuple(pool) for pool in iterables] * repeat
    result: list[list[Any]] = [[]]
    for pool in pools:
        result = [x + [y] for x in result for y in pool]
    for items in result:
        yield tuple(items)


def accumulate(
    iterable: Iterable[Any], func: Callable[[Any, Any], Any] | None = None, *, initial: Any = None
) -> Iterator[Any]:
    iterator = iter(iterable)
    total = initial
    if initial is None:
        for item in iterator:
            total = item
            break
        else:
            return
    yield total
    for item in iterator:
        total = total + item if func is None else func(total, item)
        yield total


def starmap(function: Callable[..., Any], iterable: Iterable[Any]) -> Iterator[Any]:
    for args in iterable:
        yield function(*args)


def takewhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        if not predicate(item):
            return
        yield item


def dropwhile(predicate: Callable[[Any], Any], iterable: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(iterable)
    for item in iterator:
        if not predicate(item):
            yield item
            break
    yield from iterator


def zip_longest(*iterables: Iterable[Any], fillvalue: Any = None) -> Iterator[Any]:
    iterators = [iter(iterable) for iterable in iterables]
    ended = object()
    while iterators:
        items = [next(iterator, ended) for iterator in iterators]
        if all(item is ended for item in items):
            return
        yield tuple([fillvalue if item is ended else item for item in items])


def pairwise(iterable: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(iterable)
    for first in iterator:
        for second in iterator:
            yield first, second
            first = second


def combinations(iterable: Iterable[Any], r: int) -> Iterator[Any]:
    pool = tuple(iterable)
    if r == 0:
        yield ()
    for i in range(len(pool) - r + 1 if r else 0):
        for rest in combinations(pool[i + 1 :], r - 1):
            yield pool[i], *rest


def permutations(iterable: Iterable[Any], r: int | None = None) -> Iterator[Any]:
    pool = tuple(iterable)
    length = len(pool) if r is None else r
    for indices in product(range(len(pool)), repeat=length):
        if len(set(indices)) == length:
            yield tuple([pool[i] for i in indices])


def compress(data: Iterable[Any], selectors: Iterable[Any]) -> Iterator[Any]:
    for item, selected in zip(data, selectors):
        if selected:
            yield item


def filterfalse(predicate: Callable[[Any], Any] | None, iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        if not (item if predicate is None else predicate(item)):
            yield item


def groupby(iterable: Iterable[Any], key: Callable[[Any], Any] | None = None) -> Iterator[Any]:
    ahead: list[Any] = []  # key and item, once they were looked at
    state = iter(iterable), key, ahead, [0]
    group: Iterator[Any] = iter(())
    while True:
        for _ in group:
            pass
        if not _look(state):
            return
        state[3][0] += 1
        group = group_of(state, ahead[0][0], state[3][0])
        yield ahead[0][0], group


def group_of(state: Any, this: Any, number: int) -> Iterator[Any]:
    ahead, turn = state[2:]
    while turn[0] == number and _look(state) and this == ahead[0][0]:
        yield ahead.pop()[1]


def _look(state: Any) -> bool:
    iterator, key, ahead, _ = state
    if not ahead:
        for item in iterator:
            ahead.append((item if key is None else key(item), item))
            break
    return bool(ahead)


def count_elements(mapping: Any, iterable: Iterable[Any]) -> None:
    for item in iterable:
        mapping[item] = mapping.get(item, 0) + 1


def iter_until(fn: Callable[[], Any], sentinel: Any) -> Iterator[Any]:
    """`iter(fn, sentinel)`."""
    while True:
        value = fn()
        if value == sentinel:
            return
        yield value
