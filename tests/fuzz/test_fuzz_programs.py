"""The fuzzer of Python programs: some of its programs, and a fault that it must find and cut down."""

from __future__ import annotations

import torch

from dynamotor.capture.effects import Effects
from fuzz import programs
from fuzz.python_program import Call, PythonProgram, Statement, write


def test_programs_of_a_fixed_seed_behave_as_in_eager():
    assert {n: found for n in range(20, 40) if (found := programs.problems(write(n)))} == {}


def test_a_program_is_the_same_each_time_it_is_written():
    assert write(5) == write(5) and write(5).source() != write(6).source()


ONCE = (Call(),)


def program(*body, calls=ONCE):
    return PythonProgram((), tuple(Statement(line) for line in body), calls)


def test_a_side_effect_that_is_not_replayed_is_found_and_cut_down(monkeypatch):
    monkeypatch.setattr(Effects, "replay", lambda self, cg: None)
    odd = program(
        "t1 = x * 2",
        "n1 = len(G)",
        "LOG.append(n1)",
        "t2 = t1 + y",
        "return (t2, [t1])",
        calls=(Call(), Call("G.append(1.0)", "torch.randn(3, 4).double(), torch.randn(4), 1")),
    )
    assert programs.problems(odd)
    small = programs.reduce(odd, programs.problems)
    assert len(small.calls) == 1 and len(small.body) <= 2 and "LOG.append" in small.source()
    assert "LOG.append" in programs.test_of(small, programs.problems(small))


def test_what_a_picture_tells_apart():
    def differ(a, b):
        return programs.difference(programs.Picture().of(a), programs.Picture().of(b), "value")

    t = torch.ones(3)
    assert differ([t, t], [torch.ones(3), torch.ones(3)])  # one object or two
    assert differ([t, t.view(3)], [torch.ones(3), torch.ones(3)])  # shared memory
    assert differ(t, torch.ones(3, requires_grad=True)) and differ(t, torch.ones(6)[::2]) and differ(t, 2 * t)
    assert differ({"a": 1, "b": 2}, {"b": 2, "a": 1}) and differ(1, True) and differ((1,), [1])
    same = torch.ones(3)
    assert differ([t, {"k": t.view(3)}, float("nan")], [same, {"k": same.view(3)}, float("nan")]) is None
