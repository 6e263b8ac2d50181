"""The fuzzer of callers: threads and forked children of a fixed seed, and a fault that only threads show."""

from __future__ import annotations

import os
import threading

import torch

from dynamotor.codegen.call_program import CallProgram
from fuzz import threads


def test_threads_and_children_get_eagers_results():
    assert threads.problems("threads", 5) == [] and threads.problems("fork", 5) == []


def test_seeds_beyond_64_bits_are_drawn_from():
    """The seed of a program is a multiple of its fuzzer's, and a thread's is above that."""
    program = threads.cases(71 * 1_000_003**2, 1)[0]
    assert len(program.make_inputs()) == len(program.inputs)
    assert threads.in_threads([program]) == []


def test_a_child_that_fails_is_told():
    assert threads._ended(child_that(lambda: 1)) == "other results than eager's"
    assert (
        threads._ended(child_that(lambda: 1 // 0)) == "ended with 2"
        and threads._ended(child_that(lambda: 0)) == ""
    )


def child_that(act):
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = act()
        finally:
            os._exit(code)
    return child


def test_results_that_only_other_threads_get_are_compared(monkeypatch):
    plain, main = CallProgram._run, threading.get_ident()

    def run(self, inputs):
        results = plain(self, inputs)
        if threading.get_ident() == main:
            return results
        return tuple(torch.zeros_like(r) if isinstance(r, torch.Tensor) else r for r in results)

    monkeypatch.setattr(CallProgram, "_run", run)
    assert threads.problems("threads", 1)
