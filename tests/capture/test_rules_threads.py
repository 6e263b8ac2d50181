"""`threading.local` in a trace: reads see earlier writes, and this thread's values are written after
the graph.
"""

from __future__ import annotations

import threading

import torch

import dynamotor
from dynamotor import counters

place = threading.local()
x = torch.randn(3)


def counts(x):
    place.n = getattr(place, "n", 0) + 1
    place.last = x * place.n
    return x + place.n


def deletes(x):
    place.gone = 3
    del place.gone
    return x * (2 if hasattr(place, "gone") else 5), getattr(place, "never", x)


def makes_one(x):
    here = threading.local()
    here.scale = 4
    return here, x * here.scale


def test_writes_and_reads():
    compiled = dynamotor.compile(counts, backend="eager", fullgraph=True)
    place.__dict__.clear()
    for step in range(1, 4):
        torch.testing.assert_close(compiled(x), x + step)
        assert place.n == step
        torch.testing.assert_close(place.last, x * step)

    def elsewhere():
        torch.testing.assert_close(compiled(x), x + 1)
        assert place.n == 1

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert place.n == 3


def test_deleting():
    torch.testing.assert_close(dynamotor.compile(deletes, backend="eager", fullgraph=True)(x), deletes(x))
    assert not hasattr(place, "gone")


def test_one_made_in_the_trace():
    counters.clear()
    here, y = dynamotor.compile(makes_one, backend="eager")(x)
    assert type(here) is threading.local and here.scale == 4 and counters["capture"]["graphs"] == 1
    torch.testing.assert_close(y, x * 4)
