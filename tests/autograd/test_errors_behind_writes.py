"""A graph that writes its inputs and raises is not run again: its error is eager's, at the user's line, and
names the missing effects.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from typing import Any

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

SEEN: list[int] = []


def rows(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    SEEN.append(1)
    x.mul_(2)
    y = w * x.sum()
    return y[at] + 1  # rows


def targets(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.batch_norm(w, x, x + 1, training=True)
    x.add_(1)
    return torch.nn.functional.cross_entropy(logits, at)  # targets


def raised(function: Any, at: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, w = torch.ones(3), torch.randn(2, 3)
    try:
        function(x, w, torch.tensor([0, at]))
    except Exception as error:
        [line] = [t.line for t in traceback.extract_tb(error.__traceback__) if t.name == function.__name__]
        chain = error.__context__, error.__suppress_context__
        return type(error), str(error), line, chain, getattr(error, "__notes__", [])
    return (None,)


def draws(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    w = w + torch.rand(2, 3)
    return torch.rand(2, 3) + w[at]  # draws


def draws_behind(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return w[at] + torch.rand(2, 3)  # draws_behind


def draws_positions(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return w[torch.randint(0, 40, (2,)) + at]  # draws_positions


def draws_from_a_seed(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    torch.manual_seed(3)
    return torch.rand(2, 3) + w[at]  # draws_from_a_seed


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("function", [draws, draws_behind, draws_positions, draws_from_a_seed])
def test_a_graph_that_wrote_has_drawn_what_eager_has(function: Any, backend: str) -> None:
    errors, states = [], []
    for run in (function, dynamotor.compile(function, backend=backend)):
        with dynamotor.config.patch(fallback_random=True):
            *error, _ = raised(run, 7)
        errors.append(error)
        states.append(torch.get_rng_state())
    assert errors[0] == errors[1] and errors[0][0] is IndexError
    assert torch.equal(*states)


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("function", [rows, targets])
def test_the_line_and_words_are_eagers(function: Any, backend: str) -> None:
    compiled = dynamotor.compile(function, backend=backend)
    assert raised(compiled, 1) == raised(function, 1)
    for _ in range(2):
        SEEN.clear()
        *found, notes = raised(compiled, 7)
        assert [1] * (function is rows) == SEEN and not notes  # the call ran again
        *expected, _ = raised(function, 7)
        assert found == expected


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_inputs_that_are_too_large_to_copy_stay_written(backend: str) -> None:
    compiled = dynamotor.compile(rows, backend=backend)
    x, w = torch.ones(1 << 17), torch.randn(2, 3)
    compiled(x, w, torch.tensor([0, 1]))
    with pytest.raises(IndexError) as error:
        compiled(x, w, torch.tensor([0, 7]))
    assert ["DM405" in note for note in error.value.__notes__] == [True]


def history(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.mul_(w[0])
    return w[at]


def another_history(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.zeros(3).add_(w[at].sum())


def by_data(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.data.mul_(2)
    return w[at] + x


def checked(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    if at.max() > 4:
        raise IndexError("too far")
    return w[at] + x


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize("function", [rows, targets, history, another_history, by_data, checked])
def test_written_inputs_are_those_of_eager(function: Any, backend: str) -> None:
    compiled = dynamotor.compile(function, backend=backend)
    for at in (1, 7, 1, 7):
        torch.manual_seed(0)
        w = torch.randn(2, 3).requires_grad_(function in (history, another_history))
        left = []
        for run in (compiled, function):
            x = torch.ones(6)[::2] + 0
            with contextlib.suppress(IndexError):
                run(x[:], w, torch.tensor([0, at]))
            left.append((x.detach(), x._version, x.requires_grad))
        assert torch.equal(left[0][0], left[1][0]) and left[0][1:] == left[1][1:]


W = torch.randn(4)


def views_in_a_loop(x: torch.Tensor, y: torch.Tensor) -> None:
    for part in list(y.unbind(0)):
        x -= part + W.requires_grad_()


def a_view_made_in_the_graph(x: torch.Tensor, y: torch.Tensor) -> None:
    W.requires_grad_()
    for part in y.unbind(0):
        x -= part + W


def a_view_given(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x -= W.requires_grad_()
    return y * 2


def a_part_of_a_view_given(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = y.sum()
    x -= W.requires_grad_()
    return before, y[0] * 2


def stale_view(function: Any) -> tuple[type, str, str | None]:
    W.requires_grad_(False)
    base = torch.randn(4, 4)
    given = base[1] if function.__name__.startswith(("views", "a_view_made")) else base.unbind(0)[1]
    with pytest.raises(RuntimeError) as raised:
        function(base[1:], given)
    [line] = [t.line for t in traceback.extract_tb(raised.value.__traceback__) if t.filename == __file__][1:]
    return raised.type, str(raised.value), line


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
@pytest.mark.parametrize(
    "function", [views_in_a_loop, a_view_made_in_the_graph, a_view_given, a_part_of_a_view_given]
)
def test_views_that_autograd_refuses_to_read_raise_at_the_programs_line(function: Any, backend: str) -> None:
    compiled = dynamotor.compile(function, backend=backend)
    for _ in range(2):
        assert stale_view(compiled) == stale_view(function)


@torch.library.custom_op("trust::passes", mutates_args=())
def passes(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


passes.register_fake(torch.empty_like)


@pytest.mark.regression
def test_an_error_behind_a_custom_op_and_a_write() -> None:
    """No step of ours that looks for the line may be the error."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.multinomial(passes(x) - 9, 2)

    with pytest.raises(RuntimeError, match="probability tensor contains") as raised:
        dynamotor.compile(function)(torch.ones(3))
    assert raised.type is RuntimeError


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_call_that_raised_draws_eagers_numbers_when_it_runs_again(backend: str) -> None:
    def program(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand_like(x)
        try:
            return x[at] * 2
        except IndexError:
            return x

    compiled, found = dynamotor.compile(program, backend=backend), []
    with dynamotor.config.patch(fallback_random=True):
        for function in (program, compiled):
            torch.manual_seed(3)
            found.append(function(torch.zeros(4), torch.tensor([9])))
    torch.testing.assert_close(found[1], found[0])


def test_a_leaf_is_not_made_behind_a_test_that_raises() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        if (x > 1).any():
            raise ValueError("large")
        return x.requires_grad_() * 2

    x = torch.full((3,), 2.0)
    with pytest.raises(ValueError, match="large"):
        dynamotor.compile(program, backend="eager")(x)
    assert not x.requires_grad


def test_a_graph_beside_a_tensor_of_inference_mode_runs_again() -> None:
    """Such a tensor counts no versions: it was taken for written, and the `except` clause was not entered."""

    with torch.inference_mode():
        held = torch.ones(3)

    def program(x: torch.Tensor) -> torch.Tensor:
        x = x + held.detach().sum()
        try:
            return x[torch.tensor([99])]
        except IndexError:
            return x

    x = torch.ones(3)
    torch.testing.assert_close(dynamotor.compile(program, backend="aot_eager")(x), program(x))


def test_writes_into_a_tensor_of_inference_mode_are_counted() -> None:
    with torch.inference_mode():
        kept = torch.zeros(3)

    def program(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        kept.view(3, 1).add_(1)
        torch._foreach_add_([kept], 1.0)
        return x[at]

    with torch.inference_mode(), pytest.raises(IndexError):
        dynamotor.compile(program, backend="eager")(torch.ones(3), torch.tensor([99]))
    assert kept.tolist() == [2.0, 2.0, 2.0]


def turned(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    w.mul_(2)
    x.t_()
    if at.max() > 4:
        raise IndexError("too far")
    return w.sum() + x


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_a_change_of_shape_in_place_is_not_done_twice(backend: str) -> None:
    compiled = dynamotor.compile(turned, backend=backend)
    for at in (1, 7):
        x, w = torch.ones(3, 4), torch.ones(2)
        with contextlib.suppress(IndexError):
            compiled(x, w, torch.tensor([0, at]))
        assert x.shape == (4, 3) and w.tolist() == [2, 2]


@pytest.mark.parametrize("size", [3, 1 << 17])
def test_an_error_that_is_let_go_holds_nothing(size: int) -> None:
    """Frames of ours that hold the error, whose traceback holds them, would keep the arguments until the collector."""
    compiled = dynamotor.compile(rows, backend="eager")
    gc.disable()
    try:
        for at in (1, 7, 7):
            x = torch.ones(size)
            end = weakref.ref(x)
            with contextlib.suppress(IndexError):
                compiled(x, torch.ones(2, 3), torch.tensor([0, at]))
            del x
            assert end() is None
    finally:
        gc.enable()
