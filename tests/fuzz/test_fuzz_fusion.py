"""The fuzzer of tensor programs: some of its programs, faults that it must find, and what it cuts them down
to.
"""

from __future__ import annotations

import pytest
import torch

from dynamotor.codegen import cpp, cpp_kernel
from fuzz import fusion, fuzzers, report
from fuzz.generate import Generator
from fuzz.program import Input, Program, Step
from fuzz.reduce import kind, reduce
from fuzz.trial import targets


def chunk(seed, count, target):
    return [fusion.generated(seed, n, target) for n in range(count)]


@pytest.mark.parametrize("target", targets())
def test_programs_of_a_fixed_seed_are_right(target):
    verdicts = fusion.judged(chunk(4, 16 if target != "triton" else 4, target), target)
    assert {v.trial.name: v.problems for v in verdicts if v.problems} == {}


def test_a_seed_gives_the_same_program_and_the_same_inputs():
    one, other = Generator(7).program(), Generator(7).program()
    assert one == other and one.source() == other.source()
    for a, b in zip(one.make_inputs(), other.make_inputs(), strict=True):
        assert torch.equal(a, b)


def dropped_stores(monkeypatch):
    """The first store of each pass over a row is never written."""
    plain = cpp_kernel.Emitter.store

    def store(self, s, scope):
        if s.buffer != self.kernel.params[-1][0]:
            plain(self, s, scope)

    monkeypatch.setattr(cpp_kernel.Emitter, "store", store)
    monkeypatch.setattr(cpp, "_memo", {})


def test_a_store_that_is_missing_is_found_and_cut_down(monkeypatch):
    dropped_stores(monkeypatch)
    programs = chunk(2, 8, "portable")
    wrong = [p for p, found in zip(programs, fusion.problems(programs, "portable"), strict=True) if found]
    assert wrong
    large = max(wrong, key=lambda program: len(program.steps))
    small = reduce(large, lambda some: fusion.problems(some, "portable"))
    assert len(small.steps) <= 1 and len(small.inputs) <= 2


def test_the_report_is_a_test_that_fails_as_the_program_does(monkeypatch):
    dropped_stores(monkeypatch)
    program = Program((Input((2, 3)),), (Step("{0}.exp()", (0,)),), (1,), target="portable")
    finding = fuzzers.finding(program, fusion.problems([program], "portable")[0])
    scope: dict = {}
    exec(report.HEADER + finding["text"], scope)
    test = next(value for name, value in scope.items() if name.startswith("test_found"))
    with pytest.raises(AssertionError):
        test()


def test_a_reduction_keeps_the_way_of_failing():
    steps = (
        Step("{0} * 2", (0,)),
        Step("{0}.exp()", (2,)),
        Step("{0}.sum(-1) + {1}", (3, 1)),
        Step("{0}.tanh()", (2,)),
    )
    program = Program((Input((64, 17), "bfloat16", "ties", "transposed"), Input((64,))), steps, (4, 5))

    def examine(programs):
        """As if `exp` were wrong wherever a dimension is larger than 2."""
        found = []
        for one in programs:
            one.function()(*one.make_inputs())
            large = any(n > 2 for i in one.inputs for n in i.shape)
            found.append(["output 0: 3 of 9 elements differ"] if large and "exp" in one.source() else [])
        return found

    small = reduce(program, examine)
    assert small.source() == "def f(x0):\n    v1 = x0.exp()\n    return (v1,)\n"
    assert small.inputs == (Input((3,)),)


def test_problems_of_the_same_kind_differ_in_numbers_only():
    assert kind("output 0: 3 of 9 elements differ, the first at (0, 1): 2.0 in eager, nan compiled") == kind(
        "output 2: 1 of 4 elements differ, the first at (3,): inf in eager, -1e-05 compiled"
    )
    assert kind("output 0: strides (1, 2) in eager, (2, 1) compiled, shape (2, 2)") != kind(
        "output 0: 3 of 9 elements differ"
    )
    assert kind("eager raised nothing, compiled raised ValueError: 3") != kind(
        "eager raised nothing, compiled raised KeyError: 3"
    )
