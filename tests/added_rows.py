"""Uses of what `test_where_to_add.py` adds to a copy of the package: `python added_rows.py` prints each row
that works.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dummy_op  # noqa: F401, E402  (families name the op when they are imported)
import torch
from aten_graphs import aten_graph  # noqa: E402

import dynamotor  # noqa: E402
from dynamotor.base import errors  # noqa: E402
from dynamotor.base.events import counters  # noqa: E402
from dynamotor.capture import guards  # noqa: E402
from dynamotor.capture.dispatch import compile_program  # noqa: E402
from dynamotor.capture.interpreter import opcodes  # noqa: E402
from dynamotor.capture.source import Arg  # noqa: E402
from dynamotor.codegen import triton  # noqa: E402
from dynamotor.codegen.triton_plan import DEFAULT  # noqa: E402
from dynamotor.graph.spec import GraphInfo  # noqa: E402
from dynamotor.lower import fusion  # noqa: E402
from dynamotor.lower.lower_graph import lower_graph  # noqa: E402
from dynamotor.lower.program import LoopStep  # noqa: E402

X = torch.linspace(-2, 2, 12).view(3, 4)


def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.dummy.gate(x + 1, y)


def steps(fn: Any, *inputs: torch.Tensor) -> list[Any]:
    return list(lower_graph(aten_graph(fn, *inputs), GraphInfo("inference", "test")).steps)


def op_on_cpus() -> None:
    lowered = dynamotor.lower(gate, X, X[0])
    torch.testing.assert_close(lowered.result, gate(X, X[0]))
    assert "sigmoid" in lowered.code and not counters["extern"], counters["extern"]


def op_of_any_size() -> None:
    compiled = dynamotor.compile(gate, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x, x[0]), gate(x, x[0]))
    assert not counters["specialised"] and not counters["frames"]["recompiled"]


def op_in_triton() -> None:
    with torch.no_grad(), dynamotor.config.patch(target="triton"):
        program = triton.expand(lower_graph(aten_graph(gate, X, X), GraphInfo("inference", "test")), DEFAULT)
    (step,) = program.steps
    assert isinstance(step, LoopStep) and "sigmoid" in step.function.source


def op_of_the_loop_ir() -> None:
    lowered = dynamotor.lower(lambda x: torch.ops.dummy.twice(x) - 1, X)
    torch.testing.assert_close(lowered.result, 2 * X - 1)
    assert "dummy_twice" in str(lowered) and not counters["extern"], counters["extern"]


def decomposition() -> None:
    lowered = dynamotor.lower(lambda x: torch.ops.dummy.halve.default(x), X)
    torch.testing.assert_close(lowered.result, X / 2)
    assert "aten.mul" in str(lowered) and not counters["extern"], counters["extern"]


def torch_function() -> None:
    compiled = dynamotor.compile(lambda x: torch.ops.dummy.halve(x, times=2), fullgraph=True)
    torch.testing.assert_close(compiled(X), X / 4)


def guard() -> None:
    row = guards.IsMultiple(Arg(0, "n"), 3)  # type: ignore[attr-defined]
    program = compile_program([row], inputs=[Arg(0, "n")])
    assert program.check((6,)) == (6,) and program.check((7,)) is None
    assert row.check((6,)) and row.reason((7,)) == "argument `n` is 7, no multiple of 3"


def opcode() -> None:
    frame = SimpleNamespace(stack=[1, 2])
    opcodes["DUMMY_DOUBLE_TOP"](frame, None, -1)  # type: ignore[arg-type]
    assert frame.stack == [1, 2, 2]


def backend() -> None:
    assert "dummy_backend" in dynamotor.list_backends()
    torch.testing.assert_close(dynamotor.compile(gate, backend="dummy_backend")(X, X), gate(X, X))


def fusion_rule() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    assert len(steps(two, X)) == 1
    fusion.dummy_refuses = True  # type: ignore[attr-defined]
    try:
        assert len(steps(two, X)) == 2
    finally:
        fusion.dummy_refuses = False  # type: ignore[attr-defined]


def knob() -> None:
    assert dynamotor.config.dummy_knob == 3  # type: ignore[attr-defined]
    with dynamotor.config.patch(dummy_knob=4):  # type: ignore[call-arg]
        assert dynamotor.config.dummy_knob == 4  # type: ignore[attr-defined]


def error() -> None:
    try:
        dynamotor.compile(gate, backend="dummy_error")(X, X)
    except errors.DynamotorError as raised:
        assert raised.code == "DM289" and errors.link("DM289") in str(raised)
    else:
        raise AssertionError("no error")


def architecture() -> None:
    """Imports, names of classes, and one row of docs/errors.md per code."""
    sys.path.insert(0, "tests")  # of the copy
    import test_architecture as rules

    assert Path("dynamotor").resolve() == rules.PACKAGE
    rules.test_imports_point_down()
    rules.test_an_error_code_has_one_row_and_one_room()
    rules.test_a_class_has_its_name_for_itself()


ROWS = (
    op_on_cpus,
    op_of_any_size,
    op_in_triton,
    op_of_the_loop_ir,
    decomposition,
    torch_function,
    guard,
    opcode,
    backend,
    fusion_rule,
    knob,
    error,
    architecture,
)

if __name__ == "__main__":
    for row in ROWS:
        dynamotor.reset()
        counters.clear()
        try:
            row()
        except Exception:
            print(f"failed {row.__name__}\n{traceback.format_exc()}")
        else:
            print(f"passed {row.__name__}")
