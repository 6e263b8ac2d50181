"""Offset plans, and that a pooled storage is never lent while anybody can still see it."""

import gc
import itertools
import random
import threading

import pytest
import torch

from dynamotor import _C
from dynamotor.runtime import memory
from dynamotor.runtime.memory import Lifetime, ResultPool, plan_offsets

KIND = (400_000, torch.float32)


@pytest.mark.parametrize("seed", range(20))
def test_buffers_alive_together_never_overlap(seed):
    rng = random.Random(seed)
    lifetimes = []
    for i in range(120):
        start = rng.randrange(80)
        lifetimes.append(
            Lifetime(f"b{i}", rng.choice([4, 100, 256, 1000, 4096, 65536]), start, start + rng.randrange(12))
        )
    inplace = {f"b{i}": [f"b{rng.randrange(120)}" for _ in range(3)] for i in range(0, 120, 2)}
    offsets, size = plan_offsets(lifetimes, inplace)
    for i, a in enumerate(lifetimes):
        assert offsets[a.name] % 64 == 0 and offsets[a.name] + a.nbytes <= size
        for b in lifetimes[:i]:
            if a.start > b.end or b.start > a.end:
                continue
            takes_over = (a.name in inplace.get(b.name, ()) and a.end == b.start) or (
                b.name in inplace.get(a.name, ()) and b.end == a.start
            )
            overlap = (
                offsets[a.name] < offsets[b.name] + b.nbytes and offsets[b.name] < offsets[a.name] + a.nbytes
            )
            assert not overlap or takes_over


def test_memory_is_reused_and_taken_over():
    chain = [Lifetime(f"b{i}", 1000, i, i + 1) for i in range(10)]
    assert plan_offsets(chain)[1] == 2 * 1024
    assert plan_offsets(chain, {f"b{i}": [f"b{i - 1}"] for i in range(1, 10)})[1] == 1024


@pytest.mark.usefixtures("collector_off")
def test_an_arena_is_emptied_with_its_last_program():
    class Program:
        pass

    arena, first, second = memory.Arena(), Program(), Program()
    arena.register(first)
    arena.register(second)
    arena.release(arena.acquire(100))
    del first
    gc.collect(1)
    assert arena.nbytes() >= 100
    del second
    gc.collect(1)
    assert arena.nbytes() == 0


@pytest.fixture(params=["from C", "from Python"], autouse=True)
def _lends(request, monkeypatch):
    if request.param == "from Python":  # a build of PyTorch without functions that C calls
        monkeypatch.setattr(_C, "Lender", None)


def pool(limit=8):
    return ResultPool({KIND: limit})


def take(p):
    return p.take(KIND, (1000, 100), (100, 1))


def holders():
    def shares_memory_with_numpy(t):
        return t.numpy()

    def saved_by_autograd(t):
        w = torch.ones_like(t, requires_grad=True)
        return w * t

    def stolen_as_a_gradient(t):
        p = torch.nn.Parameter(torch.zeros_like(t))

        class Give(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sum()

            @staticmethod
            def backward(ctx, g):
                return memory.reinterpret(t, tuple(t.shape), t.stride(), 0)

        Give.apply(p).backward()
        return p

    return {
        "tensor": lambda t: t,
        "view": lambda t: t[5:6, 3],
        "detached": lambda t: t.detach(),
        "numpy": shares_memory_with_numpy,
        "memoryview": lambda t: memoryview(t.numpy()),
        "storage": lambda t: t.untyped_storage(),
        "saved": saved_by_autograd,
        "typed storage": lambda t: t.storage(),
        "parameter": torch.nn.Parameter,
        "dlpack": torch.utils.dlpack.to_dlpack,
        "set_": lambda t: torch.empty(0).set_(t.untyped_storage()),
        "gradient": stolen_as_a_gradient,
    }


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("name", list(holders()))
def test_a_held_storage_is_not_lent_again(name):
    p = pool()
    tensor = take(p)
    place = tensor.data_ptr()
    holder = holders()[name](tensor)
    del tensor
    others = [take(p) for _ in range(4)]
    assert place not in [t.data_ptr() for t in others]
    del holder, others
    gc.collect(1)
    assert place in [t.data_ptr() for t in [take(p) for _ in range(8)]]


def test_each_result_is_a_tensor_of_its_own():
    p = pool()
    a = take(p)
    a.add_(1)
    assert not a._is_view() and a._version == 1
    del a
    assert take(p)._version == 0


@pytest.mark.parametrize(
    "change",
    [lambda t: t.share_memory_(), lambda t: t.resize_(4000, 100), lambda t: t.untyped_storage().resize_(0)],
)
def test_a_storage_that_was_moved_is_given_up(change):
    p = pool()
    tensor = take(p)
    change(tensor)
    del tensor
    again = take(p)
    assert again.untyped_storage().nbytes() == KIND[0] and not again.is_shared()


def test_the_pool_is_bounded():
    p = pool(limit=3)
    held = [take(p) for _ in range(10)]
    assert len({t.data_ptr() for t in held}) == 10
    del held
    assert p.nbytes() == 3 * KIND[0]
    p.clear()
    assert p.nbytes() == 0 and take(p).shape == (1000, 100)


def test_threads_never_share_a_result():
    p, wrong = pool(limit=6), []

    def work(value):
        for _ in range(300):
            t = take(p)
            t.fill_(value)
            if not bool((t == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(v),)) for v in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize("seconds, pages", [(0.1e-3, 8), (2e-3, 1)], ids=["quick", "slow"])
def test_huge_pages_are_asked_for_while_they_come_quickly(monkeypatch, seconds, pages):
    clock, asked = itertools.count(step=seconds), []
    monkeypatch.setattr(memory.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(memory, "_huge_pages_are_slow", False)
    monkeypatch.setattr(memory, "_madvise", lambda start, nbytes, advice: asked.append(nbytes.value >> 21))
    whole = torch.empty(12 << 20, dtype=torch.uint8)
    first = -whole.data_ptr() % (2 << 20)
    for _ in range(2):
        memory.ask_for_huge_pages(whole[first : first + (8 << 20)])
    assert sum(asked) == pages
