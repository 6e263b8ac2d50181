"""ParallelLoader and MpDeviceLoader: order, structure, steps, errors, and threads that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import dynamotor.xla.start  # noqa: E402, F401
from dynamotor.xla import metrics  # noqa: E402
from dynamotor.xla.core import xla_model as xm  # noqa: E402
from dynamotor.xla.distributed import parallel_loader as pl  # noqa: E402

DEVICE = torch.device("xla", 0)


def loader(n: int = 10, workers: int = 0) -> DataLoader:
    return DataLoader(
        TensorDataset(torch.arange(n * 2.0).reshape(n, 2), torch.arange(n)), batch_size=3, num_workers=workers
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_order_on_the_device(workers: int) -> None:
    wrapped = pl.MpDeviceLoader(loader(workers=workers), DEVICE)
    assert len(wrapped) == 4 and wrapped.batch_size == 3
    for _ in range(2):
        seen = list(wrapped)
        assert all(x.device == DEVICE and y.device == DEVICE for x, y in seen)
        assert torch.cat([y.cpu() for _, y in seen]).tolist() == list(range(10))
        assert torch.equal(torch.cat([x.cpu() for x, _ in seen]), torch.arange(20.0).reshape(10, 2))


def test_structures_are_kept_and_other_values_pass() -> None:
    data = [{"a": torch.ones(2), "n": 3, "l": (torch.zeros(1, dtype=torch.bfloat16), "s")}]
    (batch,) = pl.MpDeviceLoader(data, DEVICE)
    assert (
        batch["a"].device == DEVICE
        and batch["n"] == 3
        and batch["l"][1] == "s"
        and batch["l"][0].dtype is torch.bfloat16
    )


@pytest.mark.parametrize(("per_execution", "steps"), [(1, 4), (2, 2), (3, 2), (10, 1)])
def test_taking_a_batch_ends_the_step(per_execution: int, steps: int) -> None:
    before = metrics.counters["MarkStep"]
    for x, _ in pl.MpDeviceLoader(loader(), DEVICE, batches_per_execution=per_execution):
        x.add_(1)
    assert metrics.counters["MarkStep"] - before == steps


def test_step_closures_run_with_the_step() -> None:
    seen: list[float] = []
    for x, _ in pl.MpDeviceLoader(loader(), DEVICE):
        xm.add_step_closure(lambda value: seen.append(value.item()), args=(x.sum(),))
        assert len(seen) < 4
    assert seen == [x.sum().item() for x, _ in loader()]


def test_a_parallel_loader_has_one_iterator_a_device() -> None:
    parallel = pl.ParallelLoader(loader(), [DEVICE])
    one = parallel.per_device_loader(DEVICE)
    assert len(one) == 4
    assert [y.tolist() for _, y in one] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    with pytest.raises(StopIteration):
        next(one)


def test_an_input_sharding_can_be_added_to_a_loader_that_is_there() -> None:
    class Noted:
        def apply(self, t: torch.Tensor) -> None:
            shapes.append(t.shape)

    shapes: list[torch.Size] = []
    batches = pl.MpDeviceLoader([torch.ones(2, 3)], DEVICE)
    batches._parallel_loader_kwargs["input_sharding"] = Noted()  # as transformers' Trainer does
    assert [t.shape for t in batches] == shapes == [(2, 3)]


def test_an_exception_of_the_loader_is_raised_in_the_program() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise KeyError("disk")

    batches = iter(pl.MpDeviceLoader(broken(), DEVICE))
    assert next(batches).item() == 1
    with pytest.raises(KeyError, match="disk"):
        next(batches)


def test_prefetching_is_bounded() -> None:
    taken = []

    def endless() -> Iterator[torch.Tensor]:
        for i in range(1000):
            taken.append(i)
            yield torch.tensor([i])

    batches = iter(pl.MpDeviceLoader(endless(), DEVICE, loader_prefetch_size=3, device_prefetch_size=2))
    assert next(batches).item() == 0
    time.sleep(0.3)
    assert len(taken) <= 1 + 3 + 2 + 2  # taken, waiting, on the device, and one in each thread's hands


def test_threads_end_when_a_loop_is_left_early() -> None:
    def ours() -> int:
        return sum(t.name in ("xla loader", "xla upload") for t in threading.enumerate())

    for _ in pl.MpDeviceLoader(loader(1000), DEVICE, loader_prefetch_size=1, device_prefetch_size=1):
        break
    end = time.monotonic() + 10
    while ours() and time.monotonic() < end:
        time.sleep(0.02)
    assert ours() == 0
