"""The check mode before the aten graph: faults planted one at a time into traced, split and joined graphs, each
caught beside the torch graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.autograd import aot
from dynamotor.base.config import config
from dynamotor.base.errors import BackendError, InternalError

aten = torch.ops.aten
Change = Callable[[torch.fx.Node], None]


@pytest.fixture(autouse=True)
def _check_mode() -> Iterator[None]:
    with config.patch(check=True):
        yield


def step(x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Products whose factors are saved, a map, and an input that is written."""
    seen.add_(1)
    return (x.sin() * w.exp()) @ w + seen


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True), torch.ones(6)]


def caught(what: str) -> None:
    with pytest.raises((InternalError, BackendError), match=f"DM922.*{what}"):
        dynamotor.compile(step, backend="aot_eager")(*inputs())


def joint_changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """The traced graph is changed: `change` gets the output node."""
    real = aot.trace_joint

    def traced(*args: Any) -> Any:
        joint = real(*args)
        change(next(iter(reversed(joint.gm.graph.nodes))))
        return joint

    monkeypatch.setattr(aot, "trace_joint", traced)


def test_nothing_planted() -> None:
    found, wanted = inputs(), inputs()
    dynamotor.compile(step, backend="aot_eager")(*found).sum().backward()
    step(*wanted).sum().backward()
    torch.testing.assert_close([t.grad for t in found[:2]], [t.grad for t in wanted[:2]])
    assert torch.equal(found[2], wanted[2])


def test_a_gradient_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: torch.fx.Node) -> None:
        values, contents, grads = output.args[0]  # type: ignore[misc]
        output.args = ((values, contents, [grads[0], None]),)

    joint_changed(monkeypatch, change)
    caught("the gradient of .*w")


def test_gradients_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: torch.fx.Node) -> None:
        values, contents, grads = output.args[0]  # type: ignore[misc]
        output.args = ((values, contents, grads[::-1]),)

    joint_changed(monkeypatch, change)
    caught("the gradient of .*")


def test_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: torch.fx.Node) -> None:
        next(
            node for node in output.graph.nodes if node.target is aten.sin.default
        ).target = aten.asinh.default

    joint_changed(monkeypatch, change)
    caught("result 0")


def test_a_derivative_of_another_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(output: torch.fx.Node) -> None:
        next(node for node in output.graph.nodes if node.target is aten.cos.default).target = aten.neg.default

    joint_changed(monkeypatch, change)
    caught("the gradient of .*")


def test_a_write_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "_writes", lambda joint: [])
    caught("the input .*seen")


def test_saved_values_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    real = aot._backward_graph

    def split(*args: Any) -> Any:
        saved, *others = real(*args)
        return [saved[1], saved[0], *saved[2:]], *others

    monkeypatch.setattr(aot, "_backward_graph", split)
    caught("the gradient of")


def test_a_pass_that_forgets_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(gm: torch.fx.GraphModule, *_: Any) -> None:
        node = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
        node.replace_all_uses_with(node.args[0])

    monkeypatch.setattr(aot, "run_passes", lambda gm, passes, stage: forget(gm))
    caught("result 0")
