"""Log messages and warnings are written after the graph, and show the values of the time of the call."""

from __future__ import annotations

import io
import logging
import warnings

import pytest
import torch

import dynamotor

logger = logging.getLogger("test_messages")
logger.propagate = False


@pytest.fixture(autouse=True)
def _own_warnings_only():
    """No warning depends on the speed of this machine."""
    with dynamotor.config.patch(warn_slower=False):
        yield


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(
            (record.levelname, record.getMessage(), bool(record.exc_info and record.exc_info[0]))
        )


class Named:
    def __init__(self):
        self.name = "before"

    def __repr__(self):
        return self.name


def messages(function, *args):
    records = Records()
    logger.addHandler(records)
    try:
        for _ in range(2):
            function(torch.ones(2), *[make() for make in args])
    finally:
        logger.removeHandler(records)
    return records.messages


def shows_a_list(x, seen):
    logger.info("seen %s %s", seen, {"n": len(seen)})
    seen.append(1)
    logger.info("seen %s", seen)
    return x + 1


def shows_an_object(x, thing):
    logger.warning("thing %s", thing)
    thing.name = "after"
    return x + 1


def shows_a_tensor(x):
    y = x + 1
    logger.info("y %s", y)
    return y * 2


def shows_a_tensor_that_is_written(x):
    y = x + 1
    logger.info("y %s", y)
    y.add_(1)
    return y


def shows_a_traceback(x):
    try:
        {}["key"]
    except KeyError:
        logger.exception("no key")
    return x + 1


@pytest.mark.parametrize("level", [logging.DEBUG, logging.ERROR])
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (shows_a_list, (list,)),
        (shows_an_object, (Named,)),
        (shows_a_tensor, ()),
        (shows_a_tensor_that_is_written, ()),
        (shows_a_traceback, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_messages_are_those_of_eager(function, args, level):
    logger.setLevel(level)
    assert messages(dynamotor.compile(function), *args) == messages(function, *args)


def test_messages_of_plain_values_and_tensors_break_nothing():
    logger.setLevel(logging.INFO)
    assert dynamotor.explain(shows_a_list)(torch.ones(2), []).graph_break_count == 0
    assert dynamotor.explain(shows_a_tensor)(torch.ones(2)).graph_break_count == 0


def test_a_message_below_the_level_breaks_nothing():
    logger.setLevel(logging.ERROR)
    compiled = dynamotor.compile(shows_an_object, fullgraph=True)
    compiled(torch.ones(2), Named())
    logger.setLevel(logging.INFO)
    with pytest.raises(dynamotor.CaptureError, match="DM211"):
        compiled(torch.ones(2), Named())


def test_logging_switched_off_for_the_process():
    logger.setLevel(logging.INFO)
    compiled = dynamotor.compile(shows_a_list)
    logging.disable(logging.CRITICAL)
    try:
        assert messages(compiled, list) == []
    finally:
        logging.disable(logging.NOTSET)
    assert len(messages(compiled, list)) == 4


def test_a_warning_shows_what_was_there():
    def warns(x, seen):
        warnings.warn(f"seen {seen}", UserWarning, stacklevel=2)
        seen.append(1)
        return x + 1

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dynamotor.compile(warns)(torch.ones(2), [])
    assert [str(w.message) for w in found] == ["seen []"]


STATE = {"k": 0}


class Observer(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append((record.getMessage(), STATE["k"]))


class Formats(logging.Formatter):
    def format(self, record):
        return f"{record.getMessage()} {STATE['k']}"


def logs_between_changes(x):
    STATE["k"] = 5
    logger.info("a")
    STATE["k"] = 6
    logger.info("b")
    return x * 2


def test_a_handler_sees_the_state_at_the_message():
    logger.setLevel(logging.INFO)
    compiled = dynamotor.compile(logs_between_changes)
    compiled(torch.ones(3))  # captured while no handler of the program listens
    observer = Observer()
    logger.addHandler(observer)
    try:
        compiled(torch.ones(3))
    finally:
        logger.removeHandler(observer)
    assert observer.seen == [("a", 5), ("b", 6)]


def test_a_formatter_sees_the_state_at_the_message():
    logger.setLevel(logging.INFO)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formats())
    logger.addHandler(handler)
    try:
        dynamotor.compile(logs_between_changes)(torch.ones(3))
    finally:
        logger.removeHandler(handler)
    assert stream.getvalue().split("\n")[:2] == ["a 5", "b 6"]


def test_a_function_that_shows_warnings_sees_the_state(monkeypatch):
    def warns(x):
        STATE["k"] = 5
        warnings.warn("a", stacklevel=2)
        STATE["k"] = 6
        return x * 2

    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda *args, **kwargs: seen.append(STATE["k"]))
        dynamotor.compile(warns)(torch.ones(3))
    assert seen == [5]
