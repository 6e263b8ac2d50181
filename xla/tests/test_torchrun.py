"""Programs as users start them: torchrun and xmp.spawn, training, against one process on the CPU;
and a replica that is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed")

from children import LIMIT_SECONDS, environment  # noqa: E402
from replicas import run_replicas  # noqa: E402

TRAINING = """
import json, os, sys
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def data():
    labels = torch.randint(10, (640,), generator=torch.Generator().manual_seed(3))
    marks = torch.nn.functional.one_hot(labels, 64) + torch.randn(640, 64, generator=torch.Generator().manual_seed(4)) / 4
    return marks.clamp(0, 1), labels

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

def curve_on_cpu(epochs, replicas):
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samplers = [DistributedSampler(TensorDataset(x, y), replicas, r, shuffle=True, seed=1) for r in range(replicas)]
    losses = []
    for epoch in range(epochs):
        [s.set_epoch(epoch) for s in samplers]
        loaders = [DataLoader(TensorDataset(x, y), batch_size=32, sampler=s) for s in samplers]
        for batches in zip(*loaders):
            optimizer.zero_grad()
            parts = [nn.functional.cross_entropy(model(a), b) for a, b in batches]
            (sum(parts) / replicas).backward()
            optimizer.step()
            losses.append(sum(p.item() for p in parts) / replicas)
    return losses

def curve_on_xla(epochs, step, loop):
    import dynamotor.xla.start
    import dynamotor.xla.core.xla_model as xm
    from dynamotor.xla.distributed import parallel_loader as pl
    device = xm.xla_device()
    model, (x, y) = network().to(device), data()
    model = loop(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(TensorDataset(x, y), xm.xrt_world_size(), xm.get_ordinal(), shuffle=True, seed=1)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for a, b in pl.MpDeviceLoader(DataLoader(TensorDataset(x, y), batch_size=32, sampler=sampler), device):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(a), b)
            loss.backward()
            step(xm, optimizer)
            mean = xm.all_reduce(xm.REDUCE_SUM, loss.detach(), scale=1.0 / xm.xrt_world_size())
            xm.add_step_closure(lambda v: losses.append(v.item()), args=(mean,))
    return losses

def report(path, got):
    want = curve_on_cpu(2, 2)
    assert len(got) == len(want) == 20
    with open(path, "w") as f:
        json.dump(max(abs(a - b) for a, b in zip(got, want)), f)
"""

SPAWNED = (
    TRAINING
    + """
def train(index, folder):
    report(f"{folder}/{index}", curve_on_xla(2, lambda xm, optimizer: xm.optimizer_step(optimizer), lambda m: m))

if __name__ == "__main__":
    import dynamotor.xla.distributed.xla_multiprocessing as xmp
    xmp.spawn(train, args=(sys.argv[1],), nprocs=2)
"""
)

LAUNCHED = (
    TRAINING
    + """
if __name__ == "__main__":
    import torch.distributed as dist
    import dynamotor.xla.start
    import dynamotor.xla.distributed.xla_backend
    dist.init_process_group("xla", init_method="xla://")
    losses = curve_on_xla(2, lambda xm, optimizer: optimizer.step(), lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True))
    report(f"{sys.argv[1]}/{dist.get_rank()}", losses)
"""
)


@pytest.mark.slow  # test_torch_distributed.py trains by the same ways, without a launcher
@pytest.mark.parametrize(
    ("program", "launcher"),
    [
        (SPAWNED, ()),
        (LAUNCHED, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")),
    ],
    ids=["spawn", "torchrun"],
)
def test_two_replicas_train_as_on_the_cpu(tmp_path: Path, program: str, launcher: tuple[str, ...]) -> None:
    script = tmp_path / "train.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for replica in range(2):
        assert json.loads((tmp_path / str(replica)).read_text()) < 1e-4


@pytest.mark.slow
def test_the_survivor_of_a_killed_replica_gets_a_coded_error_with_its_line() -> None:
    texts = run_replicas(
        """
    import os, signal, sys, torch
    import dynamotor.xla.start
    import dynamotor.xla.core.xla_model as xm
    model = torch.nn.Linear(4, 2).to(xm.xla_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(50):
            if step == 5 and xm.get_ordinal() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(3, 4, device=xm.xla_device())).sum().backward()
            xm.optimizer_step(optimizer, barrier=True)      # the line
    except RuntimeError as error:
        print(error)
        print("local", torch.ones(3, device=xm.xla_device()).sum().item())
        sys.stdout.flush()
        os._exit(0)
    """,
        survivors=[0],
    )
    assert "[DM640]" in texts[0] and "replica 1: its process ended" in texts[0] and "local 3.0" in texts[0]
