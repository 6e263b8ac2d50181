"""Stances: ours, those of torch.compiler and the variables of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import dynamotor
from dynamotor.base.errors import SettingWarning, UsageError

x = torch.ones(3)


def told(y: torch.Tensor) -> torch.Tensor:
    """1 more when it runs compiled, 1 less in eager."""
    return y + 1 if dynamotor.is_compiling() else y - 1


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.compiler.set_stance("default")
    dynamotor.set_stance("default")


def compiled_for_x():
    compiled = dynamotor.compile(told)
    assert compiled(x).equal(x + 1)
    return compiled


def test_torch_compilers_stance_forces_eager_in_each_of_its_forms():
    compiled = compiled_for_x()
    with torch.compiler.set_stance("force_eager"):
        assert compiled(x).equal(x - 1)
    assert compiled(x).equal(x + 1)
    torch.compiler.set_stance("force_eager")
    assert compiled(x).equal(x - 1)
    torch.compiler.set_stance("default")
    assert compiled(x).equal(x + 1)

    @torch.compiler.set_stance("force_eager")
    def eager(y):
        return compiled(y)

    assert compiled(x).equal(x + 1) and eager(x).equal(x - 1) and compiled(x).equal(x + 1)


@pytest.mark.parametrize("unsafe", [False, True])
def test_torch_compilers_stances_for_recompiles(unsafe):
    compiled, other = compiled_for_x(), torch.ones(4)
    with torch.compiler.set_stance("eager_on_recompile", skip_guard_eval_unsafe=unsafe):
        assert compiled(x).equal(x + 1) and compiled(other).equal(other - 1)
    with torch.compiler.set_stance("fail_on_recompile", skip_guard_eval_unsafe=unsafe):
        assert compiled(x).equal(x + 1)
        with pytest.raises(UsageError, match="DM111.*\n.*has size 4 at dimension 0, was 3"):
            compiled(other)
    assert compiled(other).equal(other + 1)


def test_the_stricter_stance_holds():
    compiled, other = compiled_for_x(), torch.ones(4)
    with torch.compiler.set_stance("force_eager"), dynamotor.set_stance("fail_on_recompile"):
        assert compiled(other).equal(other - 1)
    with (
        torch.compiler.set_stance("eager_on_recompile"),
        dynamotor.set_stance("fail_on_recompile"),
        pytest.raises(UsageError, match="DM111"),
    ):
        compiled(other)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        dynamotor.set_stance("eager_on_recompile"),
        pytest.raises(UsageError, match="DM111"),
    ):
        compiled(other)


def test_stances_of_torch_compile_alone_compile_and_say_so():
    compiled = dynamotor.compile(told)
    with (
        torch.compiler.set_stance("eager_then_compile"),
        pytest.warns(SettingWarning, match="eager_then_compile"),
    ):
        assert compiled(x).equal(x + 1)
    with torch.compiler.set_stance(force_backend="eager"), pytest.warns(SettingWarning, match="backend"):
        assert compiled(torch.ones(5)).equal(torch.ones(5) + 1)


def test_a_stance_object_can_be_entered_again():
    compiled, stance = compiled_for_x(), dynamotor.set_stance("force_eager")
    for _ in range(2):
        with stance:
            assert compiled(x).equal(x - 1)
        assert compiled(x).equal(x + 1)


def test_modules_and_the_rest_behind_a_break_follow_the_stance():
    class Broken(torch.nn.Module):
        def forward(self, y):
            y = told(y)
            torch._dynamo.graph_break()
            return told(y * 1)

    compiled = dynamotor.compile(Broken())
    assert compiled(x).equal(x + 2)
    with torch.compiler.set_stance("force_eager"):
        assert compiled(x).equal(x - 2)
    assert compiled(x).equal(x + 2)


def test_a_stance_set_between_two_graphs_holds_for_the_second():
    def inside(y):
        with torch.compiler.set_stance("force_eager"):
            return told(y)

    assert dynamotor.compile(inside)(x).equal(x - 1)
    assert compiled_for_x()(x).equal(x + 1)


def test_config_disable_of_dynamo_compiles_nothing_more():
    import torch._dynamo

    compiled, other = compiled_for_x(), torch.ones(4)
    with torch._dynamo.config.patch(disable=True):
        assert compiled(x).equal(x + 1) and compiled(other).equal(other - 1)
    assert compiled(other).equal(other + 1)


def test_explain_names_the_stance():
    compiled = compiled_for_x()
    with torch.compiler.set_stance("force_eager"):
        text = str(dynamotor.explain(compiled)(x))
    assert "in eager PyTorch: everything, since torch.compiler.set_stance says force_eager" in text


def test_an_optimizers_step_follows_the_stance():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    step = dynamotor.compile(optimizer.step)
    layer(torch.ones(1, 2)).sum().backward()
    for stance in ("force_eager", "eager_on_recompile"):
        before = layer.weight.detach().clone()
        with torch.compiler.set_stance(stance):
            step()
        assert layer.weight.equal(before - 0.5)
    assert "0 program(s)" in step.explain()
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(UsageError, match="DM111"):
        step()
    step()
    assert "1 program(s)" in step.explain()


_CHILD = """
import sys, torch, dynamotor
x = torch.ones(3)
told = lambda y: y + 1 if dynamotor.is_compiling() else y - 1
found = [dynamotor.compile(told)(x)]
with dynamotor.set_stance("default"):
    found.append(dynamotor.compile(told, fullgraph=True)(x))
with dynamotor.replace_torch_compile():
    found.append(torch.compile(told)(x))
found.append(dynamotor.compile(told)(x))
assert "torch._dynamo" not in sys.modules
print([int(y[0]) for y in found])
print(dynamotor.explain(told)(x))
"""


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_variables_that_turn_torch_compile_off_turn_dynamotor_off(name):
    for value, expected in (("1", 0), ("0", 2)):
        command = [sys.executable, "-c", _CHILD]
        done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True)
        assert done.stdout.startswith(str([expected] * 4)), done.stdout + done.stderr
        assert (f"since {name}=1 says force_eager" in done.stdout) is (value == "1")


def marked_function(y):
    return told(y)


def calls_told(y):
    return told(y)


class Marked(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, y):
        return told(y)


@pytest.mark.parametrize(
    "make, more",
    [
        (lambda: torch.compiler.disable(marked_function), 0),
        (lambda: torch.compiler.disable(calls_told, recursive=False), 2),
        (Marked, 0),
        (lambda: torch.compiler.disable(torch.nn.Sequential(Marked())), 0),
    ],
    ids=["function", "not recursive", "method", "module"],
)
def test_regions_under_torch_compilers_disable(make, more):
    disabled = make()

    def around(y):
        return disabled(told(y) * 1) * 1

    assert dynamotor.compile(around)(x).equal(x + more)


def test_warm_up_builds_nothing_where_all_runs_eager():
    compiled = dynamotor.compile(told)
    with torch.compiler.set_stance("force_eager"):
        (left,) = compiled.warm_up(x)
    assert "torch.compiler.set_stance says force_eager" in left and not compiled.entries
