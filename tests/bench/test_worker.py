"""The counts of a row of `python -m dynamotor bench`."""

from __future__ import annotations

import torch

import dynamotor
from bench.command import COLUMNS, table_row
from bench.worker import compiler_of, graph_counts
from dynamotor.tools.explain import Explanation, is_op


class PartlyEager(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        print(end="")
        return self.eagerly(y) + 1

    @dynamotor.disable
    def eagerly(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


def test_the_share_of_a_partly_eager_model_is_that_of_one_step_however_many_came_before() -> None:
    x, found = torch.ones(3), []
    for steps in (1, 30):
        dynamotor.reset()
        compiled = compiler_of("dynamotor")(PartlyEager())
        for _ in range(steps):
            compiled(x)
        found.append(graph_counts(compiled, lambda: compiled(x)))  # noqa: B023
    assert found[0]["compiled"] == found[1]["compiled"] == 3 / 4
    assert (found[1]["graphs"], found[1]["breaks"]) == (2, 2)
    assert list(found[1]["left_to_eager"].values()) == [1]
    row = {"model": "m", "phase": "infer", "compiler": "dynamotor", "pass": True, **found[1]}
    assert dict(zip(COLUMNS, table_row(row), strict=True))["compiled"] == "75%"


def test_modes_are_counted_too_and_other_compilers_are_unknown() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    mode = compiler_of("dynamotor-max-autotune-no-cudagraphs")(model)
    assert graph_counts(mode, lambda: mode(x))["compiled"] == 1
    assert graph_counts(model, lambda: model(x)) == {"graphs": None, "breaks": None, "compiled": None}


def test_ops_and_parts_left_to_eager_are_told_apart() -> None:
    parts = (
        "aot.sizes of a part",
        "backward.sizes",
        "build.DM301",
        "cudagraphs",
        "ddp.uncut",
        "xla.aten::sort",
    )
    assert not any(map(is_op, parts)) and is_op("aten.erfinv.default") and is_op("mine.op.out")
    found = Explanation()
    found.fallbacks.update(("aten.erfinv.default", "backward.sizes", "build.DM301"))
    text = str(found)
    assert "for lack of a lowering: aten.erfinv.default ×1\n" in text
    assert "left to PyTorch ×1: backward.sizes" in text and "left to PyTorch ×1: DM301" in text
