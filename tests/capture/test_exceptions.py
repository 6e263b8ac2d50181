"""Exceptions in captured code: groups, contexts, effects before one is raised, and frames whose capture
raises alone.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import pytest
import torch
from warned import text_of

import dynamotor
from dynamotor import CaptureError, counters
from dynamotor.base.events import collect
from dynamotor.capture.values.tensor import TensorValue


def group(x):
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2), KeyError(3)])
        except* ValueError as found:
            x = x + len(found.exceptions)
        except* TypeError:
            x = x * 3
    except ExceptionGroup as rest:
        x = x - len(rest.exceptions)
    return x


def group_of_one(x):
    try:
        raise ValueError(3)
    except* ValueError as found:
        x = x + found.exceptions[0].args[0]
    return x


def state_of_c_exceptions(x):
    try:
        raise FileNotFoundError(2, "no file", "name")
    except OSError as error:
        return x + error.errno + len(error.filename)


@pytest.mark.parametrize("function", [group, group_of_one, state_of_c_exceptions])
def test_exceptions_with_state_of_their_own(function):
    x = torch.ones(3)
    compiled = dynamotor.compile(function)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x))


def implicit_context(x, breaks):
    try:
        {}["key"]
    except KeyError:
        if breaks:
            print(end="")
        try:
            [][1]
        except IndexError as error:
            return x + 1, error


def context_beside_cause(x, breaks):
    try:
        {}["key"]
    except KeyError:
        try:
            raise ValueError("a") from TypeError("b")
        except ValueError as error:
            if breaks:
                print(end="")
            return x + 1, error


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("function", [implicit_context, context_beside_cause])
def test_the_context_of_an_exception(function, breaks):
    got, expected = dynamotor.compile(function)(torch.ones(2), breaks)[1], function(torch.ones(2), breaks)[1]
    assert repr(got.__context__) == repr(expected.__context__)
    assert repr(got.__cause__) == repr(expected.__cause__)
    assert got.__suppress_context__ == expected.__suppress_context__


class State:
    def __init__(self):
        self.steps, self.written, self.number = [], {}, 0


def raises_at_run_time(x, index, state):
    state.steps.append(1)
    state.number += 1
    state.written["before"] = x * 2
    y = x[index]
    state.steps.append(2)
    return y


@pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])
def test_what_was_done_before_a_graph_raises_has_happened(backend):
    seen = []
    for function in (raises_at_run_time, dynamotor.compile(raises_at_run_time, backend=backend)):
        state, raised = State(), []
        for at in (7, 0, 1, 5):
            try:
                raised.append(function(torch.arange(2.0), torch.tensor([at]), state).tolist())
            except IndexError as error:
                raised.append("IndexError")
                assert "raises_at_run_time" in [
                    frame.name for frame in traceback.extract_tb(error.__traceback__)
                ]
        seen.append((state.steps, state.number, state.written["before"].tolist(), raised))
    assert seen[0] == seen[1]


def test_a_graph_that_writes_its_inputs_is_not_run_twice():
    counter = torch.zeros(1)

    def function(x, index):
        counter.add_(1)
        return x[index]

    compiled = dynamotor.compile(function)
    compiled(torch.ones(2), torch.tensor([0]))
    with pytest.raises(IndexError):
        compiled(torch.ones(2), torch.tensor([5]))
    assert counter.item() <= 2


@pytest.fixture
def mistaken(monkeypatch):
    """A capture that sees `x.cos()` raise what eager does not."""
    monkeypatch.setattr(TensorValue, "getattr", _raising(TensorValue.getattr))


def _raising(real):
    def getattr_(self, trace, name):
        if name == "cos":
            raise trace.error(AttributeError, "cos")
        return real(self, trace, name)

    return getattr_


def takes_cos(x):
    return x.sin() + x.cos()


def test_a_frame_that_only_its_capture_saw_raise_is_given_up_once(mistaken, recwarn):
    counters.clear()
    compiled = dynamotor.compile(takes_cos)
    x = torch.ones(2)
    for _ in range(5):
        torch.testing.assert_close(compiled(x), takes_cos(x))
    assert counters["frames"]["raised"] == 1 and counters["breaks"]["DM224"] == 1
    assert "DM224" in text_of(recwarn)
    explained = dynamotor.explain(takes_cos)(x)
    assert explained.graph_count == 0 and explained.break_reasons[0].code == "DM224"
    assert explained.break_reasons[0].where.function == "takes_cos"


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"options": {"strict": True}}])
def test_a_frame_that_only_its_capture_saw_raise_is_an_error_when_breaks_are(mistaken, options):
    compiled = dynamotor.compile(takes_cos, **options)
    for _ in range(2):
        with pytest.raises(CaptureError, match="DM224"):
            compiled(torch.ones(2))


def test_a_program_that_raises_is_captured_once():
    def function(x, n):
        if n > 1:
            raise ValueError(f"too many: {n}")
        return x + n

    counters.clear()
    compiled = dynamotor.compile(function, fullgraph=True)
    for _ in range(4):
        with pytest.raises(ValueError, match="too many: 2"):
            compiled(torch.ones(2), 2)
    assert counters["frames"]["raised"] == 1
    torch.testing.assert_close(compiled(torch.ones(2), 1), torch.full((2,), 2.0))


class Finalized:
    log: list = []

    def __init__(self, name):
        self.name = name

    def __del__(self):
        self.log.append(self.name)


def makes_finalized(x):
    first = Finalized("first")
    first = None
    Finalized.log.append("between")
    second = Finalized("second")
    return x + 1 if first is None and second is not None else x


def items(log):
    try:
        yield 1
        yield 2
    finally:
        log.append("closed")


def leaves_a_generator(x):
    for item in items(Finalized.log):
        x = x + item
        break
    Finalized.log.append("after")
    return x


def uses_generators_up(x):
    @contextlib.contextmanager
    def logged():
        Finalized.log.append("in")
        try:
            yield
        finally:
            Finalized.log.append("out")

    with logged():
        return x + sum(items(Finalized.log))


@pytest.mark.parametrize("function", [makes_finalized, leaves_a_generator, uses_generators_up])
def test_finalizers_run_when_eagers_do(function):
    logs = []
    for run in (function, dynamotor.compile(function)):
        Finalized.log.clear()
        for _ in range(2):
            run(torch.ones(2))
            Finalized.log.append("returned")
        logs.append(list(Finalized.log))
    assert logs[0] == logs[1]


def test_generators_that_end_break_nothing():
    assert dynamotor.explain(uses_generators_up)(torch.ones(2)).graph_break_count == 0


def test_members_of_exceptions_that_nobody_set_are_no_missing_attributes():
    def f(x):
        found = []
        try:
            try:
                {}["missing"]
            except KeyError as error:
                found.append(error.__suppress_context__)
                raise ValueError from error
        except Exception as error:
            found.append(error.__suppress_context__)
        return x + 1, found

    x = torch.ones(2)
    assert dynamotor.compile(f, backend="eager")(x)[1] == f(x)[1] == [False, True]


def takes_its_traceback_off(x, log):
    try:
        try:
            raise ValueError(3)
        except Exception as error:
            log.append(error.with_traceback(None) is sys.exception())
            torch._dynamo.graph_break()
            log.append(error.__traceback__)
            raise
    except Exception as error:
        log += [error.__traceback__ is None, sys.exception() is error]
    log.append(sys.exception())
    return x + 1


def keeps_its_traceback(x, log):
    error = ValueError(3)
    error.__traceback__ = None
    try:
        raise error
    except ValueError:
        torch._dynamo.graph_break()
        log.append(error.__traceback__ is None)
        error.__traceback__ = None
        return x + 1


@pytest.mark.parametrize("function", [takes_its_traceback_off, keeps_its_traceback])
def test_a_traceback_that_was_taken_off_stays_off_behind_a_break(function):
    """61002:2972 of the fuzzer."""
    logs = [], []
    for run, log in zip((function, dynamotor.compile(function)), logs):
        run(torch.ones(2), log)
    assert logs[0] == logs[1]
    assert dynamotor.explain(function)(torch.ones(2), []).graph_break_count >= 1


@pytest.mark.regression
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


def test_a_graph_that_raises_where_eager_does_not_is_reported():
    calls = []

    def backend(gm, inputs):
        def run(*tensors):
            calls.append(tensors)
            if len(calls) == 2:
                raise AttributeError("only this once")
            return gm.forward(*tensors)

        return run

    compiled, x = dynamotor.compile(lambda x: x * 2 + 2, backend=backend), torch.randn(3)
    torch.testing.assert_close(compiled(x), x * 2 + 2)
    with collect("fallback") as events, pytest.warns(dynamotor.EagerWarning, match="DM412.*only this once"):
        torch.testing.assert_close(compiled(x), x * 2 + 2)
    assert [event.data["code"] for event in events] == ["DM412"]
    torch.testing.assert_close(compiled(x), x * 2 + 2)
