"""The log goes through `logging`, warnings through `warnings`, and both say where and in which compilation."""

from __future__ import annotations

import logging
import re
import threading
import warnings

import pytest
import torch

import dynamotor
from dynamotor.base import events
from dynamotor.base.config import config


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture
def handler() -> Records:
    logger, handler = logging.getLogger("dynamotor"), Records()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_handler_receives_records_in_the_place_of_stderr(
    handler: Records, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with config.patch(log="breaks"):
        dynamotor.compile(lambda x: (print(end=""), x + 1)[1], backend="eager")(torch.ones(2))
    (record,) = handler.found
    assert record.name == "dynamotor.breaks" and record.levelno == logging.INFO
    assert record.pathname == __file__ and record.rank == 3 and "DM211" in record.getMessage()  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d+/0", record.compile_id)  # type: ignore[attr-defined]
    assert not capsys.readouterr().err


def test_stderr_has_the_time_and_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with config.patch(log="timings"):
        events.log("timings", "a text")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} rank 1 \[dynamotor:timings\] a text\n", capsys.readouterr().err
    )


def test_the_level_of_a_logger_turns_its_channel_on(
    handler: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not events.enabled("guards")
    logging.getLogger("dynamotor.guards").setLevel(logging.DEBUG)
    try:
        assert events.enabled("guards") and not events.enabled("code")
        events.log("guards", lambda: "text")
    finally:
        logging.getLogger("dynamotor.guards").setLevel(logging.NOTSET)
    assert [record.getMessage() for record in handler.found] == ["text"]


def test_a_warning_has_a_category_the_users_line_and_a_link() -> None:
    events.forget_warnings()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            events.warn_once("key", "[DM307] a text", dynamotor.SettingWarning)
    (row,) = found
    assert row.category is dynamotor.SettingWarning and issubclass(row.category, dynamotor.DynamotorWarning)
    assert row.filename == __file__ and "/errors/#dm307" in str(row.message)


def test_an_error_links_to_its_code() -> None:
    with pytest.raises(dynamotor.UsageError, match="/errors/#dm104"):
        dynamotor.compile(torch.sin, mode="fastest")  # type: ignore[call-overload]


def test_silence_mutes_one_thread_and_keeps_what_others_subscribe() -> None:
    heard: list[str] = []
    inside: list[str] = []
    end = events.subscribe(lambda event: heard.append(event.kind), "some", "other")

    def elsewhere() -> None:
        events.emit("other")
        end()

    with events.silence():
        events.emit("some")
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        stop = events.subscribe(lambda event: inside.append(event.kind), "some")
        events.emit("some")
        stop()
    events.emit("some")
    assert heard == ["other"] and inside == ["some"]
