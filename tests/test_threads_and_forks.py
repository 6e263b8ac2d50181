"""Compiled callables called by several threads, in forked and spawned processes and by DataLoader's
workers.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch
from children import run_forked
from torch import nn

import dynamotor
from dynamotor import counters


def in_threads(n, work):
    """Run `work(i)` in n threads that begin together; the errors."""
    errors, barrier = [], threading.Barrier(n)

    def run(i):
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def breaks(x, n):
    y = (x * n).relu().sum(-1)
    print(end="")
    return y + n


def test_threads_that_come_first_together_compile_once():
    compiled = dynamotor.compile(breaks)
    x = torch.randn(8, 16)
    counters.clear()

    def work(i):
        for _ in range(5):
            torch.testing.assert_close(compiled(x, 2), breaks(x, 2))

    assert in_threads(6, work) == []
    assert (
        len(compiled.entries) == 1 and counters["frames"]["captured"] == 2
    )  # before the break, and after it


def test_threads_in_different_modes():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = dynamotor.compile(module)
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))

    def without_gradients():
        with torch.no_grad():
            assert not compiled(x).requires_grad

    def training():
        found = torch.autograd.grad(compiled(x).sum(), list(module.parameters()))
        torch.testing.assert_close(found, expected)

    def in_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(x).dtype is torch.bfloat16

    def work(i):
        for _ in range(5):
            (without_gradients, training, in_autocast)[i % 3]()

    assert in_threads(6, work) == []
    assert len(type(compiled)._dynamotor.entries) == 3


def test_threads_that_raise_at_run_time():
    compiled = dynamotor.compile(lambda x, i: x[i])
    x = torch.arange(4.0)

    def work(i):
        for _ in range(20):
            if i % 2:
                with pytest.raises(IndexError):
                    compiled(x, torch.tensor([9]))
            else:
                torch.testing.assert_close(compiled(x, torch.tensor([2])), torch.tensor([2.0]))

    assert in_threads(4, work) == []


FORK = """
    import os, sys
    import torch, dynamotor

    torch.set_num_threads(2)

    def function(x):
        return (x.sin() * 2).exp().sum(-1)

    x = torch.randn(1024, 1024)
    compiled = dynamotor.compile(function)
    expected = compiled(x)          # the parent's OpenMP pool begins here
    child = os.fork()
    if child == 0:
        fresh = dynamotor.compile(lambda x: function(x) + 1)
        good = torch.allclose(compiled(x), expected) and torch.allclose(fresh(x), expected + 1)
        os._exit(0 if good and torch.allclose(function(x), expected) else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_the_parents_threads():
    done = run_forked(FORK)
    assert done.returncode == 0, done.stderr


def test_a_fork_while_another_thread_compiles():
    started, go_on = threading.Event(), threading.Event()

    def backend(gm, inputs):
        started.set()
        go_on.wait(60)
        return gm.forward

    slow = threading.Thread(target=dynamotor.compile(lambda x: x + 1, backend=backend), args=(torch.ones(1),))
    slow.start()
    started.wait(60)
    child = os.fork()
    if child == 0:
        good = dynamotor.compile(lambda x: x + 2, backend="eager")(torch.ones(1)).item() == 3
        os._exit(0 if good else 1)
    go_on.set()
    slow.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def scaled(x):
    return (x * 2).relu()


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.scaled, self.module = dynamotor.compile(scaled), dynamotor.compile(nn.Linear(4, 4))
        self.scaled(torch.ones(4))

    def __len__(self):
        return 4

    def __getitem__(self, i):
        with torch.no_grad():
            return self.module(self.scaled(torch.full((4,), float(i))))


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(how):
    samples = Samples()
    loader = torch.utils.data.DataLoader(samples, num_workers=1, multiprocessing_context=how, timeout=100)
    torch.testing.assert_close(torch.cat(list(loader)), torch.stack([samples[i] for i in range(4)]))
