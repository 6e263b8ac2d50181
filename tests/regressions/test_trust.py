"""The table of docs/trust.md names tests that exist; and cases of it that have no other file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dynamotor

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", (ROOT / "docs/trust.md").read_text())


def test_every_test_of_the_table_exists() -> None:
    assert len(NAMED) > 50
    for file, function, case in NAMED:
        text = (ROOT / file).read_text()
        made = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        assert function in made, f"{file}::{function}"
        assert not case or f"def {case}(" in text or f'"{case}"' in text, f"{file}::{function}[{case}]"


def test_no_file_is_unpickled() -> None:
    """Pickles go through pipes (the Triton worker) and between ranks only; torch.load reads data alone."""
    root = Path(dynamotor.__file__).parents[1]
    files = [path for part in ("dynamotor", "xla/dynamotor") for path in (root / part).rglob("*.py")]
    users = {path.name for path in files if "pickle.load" in path.read_text()}
    assert users == {"triton_worker.py", "collectives.py"}


def f_locals(x: torch.Tensor) -> Any:
    exec("z = 3")
    return x + locals().get("z", 0), sorted(locals())


def f_held_locals(x: torch.Tensor) -> Any:
    held = locals()
    held["q"] = 5
    y = x + 1
    print(end="")
    return y, locals().get("q")


def f_inlined(x: torch.Tensor) -> Any:
    return f_held_locals(x * 2), f_locals(x - 1)


@pytest.mark.parametrize("function", [f_locals, f_held_locals, f_inlined])
def test_dicts_of_locals(function: Callable[..., Any]) -> None:
    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        assert str(compiled(torch.ones(2))) == str(function(torch.ones(2)))


@pytest.mark.parametrize("mode", [[1], None, 1])
def test_a_mode_that_is_no_boolean(mode: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(mode):
            return x + 1

    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        with pytest.raises(TypeError, match="must be bool"):
            compiled(torch.ones(2))


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_backwards_of_two_outputs(backend: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = (x * w).sin()
        return h.sum(), (h * h).sum()

    seen = []
    for run in (function, dynamotor.compile(function, backend=backend)):
        x, w = torch.arange(5.0, requires_grad=True), torch.ones(5, requires_grad=True)
        said: list[Any] = []
        for keeps in ((True, True, False), (True, False, False)):
            first, second = run(x, w)
            try:
                for output, keep in zip((first, second, first), keeps):
                    output.backward(retain_graph=keep)
                    said.append([x.grad.clone(), w.grad.clone()])
            except RuntimeError as error:
                said.append(str(error)[:40])
        seen.append(said)
    torch.testing.assert_close(seen[1][:-1], seen[0][:-1])
    assert seen[1][-1] == seen[0][-1]


class Slotted:
    __slots__ = ("a",)


def test_a_slot_that_is_set_and_deleted_in_one_call() -> None:
    def function(x: torch.Tensor, thing: Slotted) -> torch.Tensor:
        thing.a = x
        del thing.a
        return x + 1

    compiled, thing = dynamotor.compile(function, backend="eager"), Slotted()
    for _ in range(2):
        compiled(torch.ones(2), thing)
        assert not hasattr(thing, "a")
        thing.a = 1


def test_what_a_generator_raises_for_stop_iteration_has_its_cause() -> None:
    def items() -> Any:
        yield 1
        raise StopIteration("inner")

    def function(x: torch.Tensor) -> Any:
        try:
            return list(items())
        except RuntimeError as error:
            return x + 1, repr(error.__cause__), error.__context__ is error.__cause__

    expected = function(torch.ones(2))
    assert str(dynamotor.compile(function, backend="eager")(torch.ones(2))) == str(expected)


class Suspended:
    it: Any = None


def test_what_a_call_replaces_is_neither_looked_at_nor_kept() -> None:
    log: list[str] = []

    def waiting() -> Any:
        try:
            yield 1
        finally:
            log.append("closed")

    def function(x: torch.Tensor, thing: Suspended, new: Any) -> torch.Tensor:
        held.it = new
        return x + 1

    held = Suspended()
    compiled = dynamotor.compile(function, backend="eager")
    dynamotor.counters.clear()
    for then in (None, 1, "text", torch.ones(3), waiting()):
        if not isinstance(then, (int, str, torch.Tensor, type(None))):
            next(then)
        held.it, then = then, None
        compiled(torch.ones(2), held, [])
    assert log == ["closed"]
    assert dynamotor.counters["capture"]["graphs"] == 1


class NoneForUnused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first * 5 if second is None else second


class ViewOfItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.reshape(4) * 3


def test_autograd_functions_that_ask_for_none() -> None:
    gradients = []
    for run in (NoneForUnused.apply, dynamotor.compile(lambda x: NoneForUnused.apply(x))):
        x = torch.ones(4, requires_grad=True)
        run(x)[0].sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_write_into_a_view_that_an_autograd_function_made() -> None:
    with pytest.raises(RuntimeError, match="created inside a custom Function"):
        dynamotor.compile(lambda x: ViewOfItsInput.apply(x * 2).mul_(2))(torch.ones(4, requires_grad=True))


def test_a_set_that_grows_while_it_is_walked() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kinds = {1, 2}
        for kind in kinds:
            kinds.add(kind + 10)
        return x

    with pytest.raises(RuntimeError, match="Set changed size during iteration"):
        dynamotor.compile(function)(torch.ones(2))


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("number", [np.float64(1.5), np.float16(1.5), np.int8(3), np.complex64(1j)])
def test_tensors_of_numpys_numbers_keep_their_types(number: Any) -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.tensor(number), torch.tensor([number, 1]), torch.as_tensor([[number]]), x * number

    for a, b in zip(function(torch.ones(2)), dynamotor.compile(function)(torch.ones(2))):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize("at", [0, slice(2)])
@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)])
def test_numbers_of_numpy_that_eager_refuses(number: Any, at: Any) -> None:
    """`x[i] = numpy.float32(2)` is a TypeError, of `split` too for what is no Python integer."""

    def function(x: torch.Tensor) -> Any:
        seen = []
        for write in (lambda: x.__setitem__(at, number), lambda: seen.append(x.split(number))):
            try:
                write()
            except TypeError as error:
                seen.append(str(error))
        return x * 1, seen

    want, got = (run(torch.arange(4.0)) for run in (function, dynamotor.compile(function, backend="eager")))
    torch.testing.assert_close(got[0], want[0])
    assert str(got[1]) == str(want[1])


@torch.library.custom_op("trust::passes", mutates_args=())
def passes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


passes.register_fake(torch.empty_like)


def test_an_error_behind_a_custom_op_and_a_write() -> None:
    """No step of ours that looks for the line may be the error."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.multinomial(passes(x) - 9, 2)

    with pytest.raises(RuntimeError, match="probability tensor contains") as raised:
        dynamotor.compile(function)(torch.ones(3))
    assert raised.type is RuntimeError


def test_a_parameter_frozen_while_gradients_accumulate() -> None:
    given, seen = torch.randn(6, 3, 4), []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = dynamotor.compile_step(model, lambda y: y.square().sum(), optimizer, accumulate=2)
        for i, x in enumerate(given):
            model[0].weight.requires_grad_(i != 5)
            if compiled:
                step(x)
            else:
                (model(x).square().sum() / 2).backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])
