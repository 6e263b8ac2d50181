"""Faults planted into the compiler one at a time: each must be found by a check, under its code, before a
wrong answer is given.

>>> faults = Faults()
>>> @faults.add("DM913", lambda a: a + 1, torch.randn(8))
... def a_store_is_dropped(plant):                    # plant = monkeypatch
...     plant.setattr(lower, "build_kernel", ...)
>>> test_each_fault_is_found = faults.test()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from aten_graphs import aten_graph
from kernels import forget_kernels

from dynamotor.base.config import config
from dynamotor.base.errors import DynamotorError
from dynamotor.codegen import compile_aten
from dynamotor.graph.spec import GraphInfo

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """The planted fault, the program that meets it, and the code of the check that finds it."""

    code: str
    program: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    plant: Plant
    target: str = ""

    def run(self) -> tuple[torch.Tensor, ...]:
        with torch.no_grad(), config.patch(strict=True, target=self.target):
            call = compile_aten(
                aten_graph(self.program, *self.inputs), GraphInfo("inference", "planted", frozenset())
            )
            return call(*(t.clone() for t in self.inputs))

    def check(self, plant: pytest.MonkeyPatch) -> None:
        """Right without the fault, found with it."""
        forget_kernels(plant)
        got, want = self.run(), self.program(*(t.clone() for t in self.inputs))
        torch.testing.assert_close(
            list(got), list(want) if isinstance(want, (tuple, list)) else [want], rtol=1e-4, atol=1e-4
        )
        forget_kernels(plant)
        self.plant(plant)
        with pytest.raises(DynamotorError, match=self.code):
            self.run()


class Faults:
    """The faults of one room."""

    def __init__(self) -> None:
        self.rows: list[Fault] = []

    def add(
        self, code: str, program: Callable[..., Any], *inputs: torch.Tensor, target: str = ""
    ) -> Callable[[Plant], Plant]:
        """A decorator: the function plants a fault, which compiling (or calling) `program` must meet."""

        def register(plant: Plant) -> Plant:
            self.rows.append(Fault(code, program, inputs, plant, target))
            return plant

        return register

    def test(self) -> Callable[..., None]:
        """The test of all faults."""

        @pytest.mark.parametrize("fault", self.rows, ids=lambda fault: fault.plant.__name__)
        def test_each_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
            fault.check(monkeypatch)

        return test_each_fault_is_found
