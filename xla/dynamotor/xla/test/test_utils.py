"""What torch_xla's examples print while they train.

>>> print_training_update(device, step, loss.item(), tracker.rate(), tracker.global_rate())
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from ..core import xla_model as xm
from ..debug import metrics


def now(format: str = "%H:%M:%S") -> str:  # noqa: A002
    """The time as text."""
    return time.strftime(format)


def print_training_update(
    device: Any,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print a step's loss and speed."""
    parts = [
        f"device={device}",
        *([f"epoch={epoch}"] if epoch is not None else []),
        f"step={step}",
        f"loss={loss:.5f}",
    ]
    print(
        "| Training",
        *parts,
        f"rate={rate:.2f}",
        f"global rate={global_rate:.2f}",
        f"time={now()}",
        flush=True,
    )


def print_test_update(
    device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None
) -> None:
    """Print an accuracy."""
    parts = [
        f"{name}={value}"
        for name, value in (("epoch", epoch), ("step", step), ("accuracy", accuracy))
        if value is not None
    ]
    print("| Test", f"device={device}", *parts, f"time={now()}", flush=True)


def get_summary_writer(logdir: str | None) -> Any:
    """TensorBoard's writer for a folder, in the master process only; None elsewhere, or without a folder."""
    if not logdir or not xm.is_master_ordinal():
        return None
    from torch.utils.tensorboard import SummaryWriter  # an optional package

    return SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: dict[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers, where there is a writer; with `write_xla_metrics` the device's counters too."""
    if summary_writer is None:
        return
    counters = (
        {name: metrics.counter_value(name) for name in metrics.counter_names()} if write_xla_metrics else {}
    )
    for name, value in {**(dict_to_write or {}), **counters}.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Write pending rows and close, where there is a writer."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def mp_test(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs in each replica: replicas wait for each other at its end."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        xm.rendezvous(func.__name__)
        return result

    return wrapped
