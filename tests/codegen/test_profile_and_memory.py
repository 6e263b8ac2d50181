"""Traces of compiled programs outside: names in a profile, and nothing once they are dropped."""

import gc
import linecache
import weakref

import torch

import dynamotor
from dynamotor.codegen.call_program import CallProgram


def test_kernels_show_in_a_profile_under_their_names():
    fast = dynamotor.compile(lambda x, w: (x.relu() * 2).softmax(-1) @ w.exp())
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    fast(x, w)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = fast(x, w)
    names = {event.key for event in profile.key_averages()}
    program = next(
        p for p in gc.get_objects() if type(p) is CallProgram and set(p._writer.labels.values()) <= names
    )
    assert program._writer.labels and all(
        label.startswith("dynamotor::") for label in program._writer.labels.values()
    )
    torch.testing.assert_close(result, fast(x, w))


def test_a_dropped_function_leaves_nothing():
    """The first one warms up the caches of the process; the second must leave no text, no code, no program."""

    def make():
        fast = dynamotor.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))
        fast(torch.randn(3, 8)).sum().backward()
        return fast

    def texts():
        return {name for name in linecache.cache if name.startswith("<dynamotor")}

    del (first := [make()])[:]
    gc.collect()
    before = texts()
    fast = make()
    programs = [weakref.ref(p) for p in gc.get_objects() if type(p) is CallProgram]
    code = [weakref.ref(p()._code) for p in programs]
    assert len(texts()) > len(before) and not first
    del fast
    gc.collect()
    alive = [p() for p in programs if p() is not None]
    assert texts() <= before and not [
        c for c in code if c() is not None and all(c() is not p._code for p in alive)
    ]
    assert not alive or {p.name for p in alive} <= {n.split()[1] for n in before}
