"""An event that a GPU waits for in vain is reported, once and in time; on a CPU a fake event stands for the device."""

from __future__ import annotations

import io
import time

import pytest
import torch
import torch.distributed as dist
from children import run_forked

from dynamotor.base.errors import UserLine
from dynamotor.distributed.watch import PATIENCE, RankWatch


class Device:
    """Events of a device that comes to their end when `done` is set."""

    done = False
    asked = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.asked += 1
        return self.done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    return found


HERE = UserLine("train.py", 17, "step")


def test_a_backward_that_never_ends_is_reported_with_the_line_before_the_timeout_is_over(
    device: Device,
) -> None:
    out = io.StringIO()
    watch, began = RankWatch(0.4, out), time.monotonic()
    watch.behind_backward(HERE)
    while not out.getvalue() and time.monotonic() - began < 5:
        time.sleep(0.01)
    text = out.getvalue()
    assert "DM703" in text and "rank 3" in text and "train.py" in text and "17" in text


def test_a_backward_that_ended_is_not_reported_and_is_asked_about_once(device: Device) -> None:
    device.done = True
    watch = RankWatch(1000.0)
    watch.behind_backward(HERE)
    assert watch.look() is None and device.asked == 0  # it is not overdue: the device is left alone
    watch._latest = (device, time.monotonic() - PATIENCE * 1000 - 1, HERE)
    assert watch.look() is None and watch.look() is None and device.asked == 1


def test_a_later_backward_takes_the_place_of_an_earlier_one(device: Device) -> None:
    watch = RankWatch(1000.0)
    watch._latest = (device, time.monotonic() - PATIENCE * 1000 - 1, HERE)
    assert watch.look() is not None
    watch.behind_backward(HERE)
    assert watch.look() is None


STUCK = """
import time, torch, torch.distributed as dist
from dynamotor.distributed import watch

class Event:
    def record(self): pass
    def query(self): return False

torch.cuda.Event, torch.cuda.current_device, torch.cuda.is_current_stream_capturing = Event, lambda: 0, lambda: False
dist.get_rank, watch.GRACE = lambda: 0, 0.2
watch.RankWatch(0.5).behind_backward(None)
time.sleep(%s)
print("still there")
"""


@pytest.mark.parametrize(("setting", "ends"), [("3", True), ("0", False)])
def test_a_process_that_waits_for_ever_ends_unless_pytorch_is_told_not_to(setting: str, ends: bool) -> None:
    found = run_forked(STUCK % (60 if ends else 2), TORCH_NCCL_ASYNC_ERROR_HANDLING=setting)
    assert "DM703" in found.stderr and found.stderr.count("DM703") == 1
    assert (
        (found.returncode == 1 and "ending this process" in found.stderr)
        if ends
        else "still there" in found.stdout
    )
