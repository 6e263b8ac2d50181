"""Train scikit-learn's digits over two processes: eager DDP and compiled DDP side by side, loss by loss.

python examples/ddp_digits.py [--epochs 3]          # starts two processes itself
torchrun --nproc-per-node 2 examples/ddp_digits.py  # or as a launched program
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dynamotor


def network() -> nn.Module:
    """A small convolutional classifier of 8x8 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def data(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of the training images, and all test images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, test = order[:1440], order[1440:]
    mine = train[rank::world]
    return x[mine], y[mine], x[test], y[test]


def main(epochs: int = 3, batch: int = 48) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, test_x, test_y = data(rank, world)
    model = network()
    modules = {"eager": DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.1)}
    modules["compiled"] = dynamotor.compile(DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.1))
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for name, m in modules.items()}
    if rank == 0:
        print(f"{world} processes, {len(x)} images each\nepoch  eager loss  compiled loss  difference")
    for epoch in range(epochs):
        total = dict.fromkeys(modules, 0.0)
        for part in range(0, len(x), batch):
            for name, module in modules.items():
                optimizers[name].zero_grad()
                loss = nn.functional.cross_entropy(module(x[part : part + batch]), y[part : part + batch])
                loss.backward()
                optimizers[name].step()
                total[name] += loss.item() * batch / len(x)
        if rank == 0:
            print(
                f"{epoch:>5}  {total['eager']:>10.6f}  {total['compiled']:>13.6f}  "
                f"{abs(total['eager'] - total['compiled']):>10.1e}",
                flush=True,
            )
    for module in modules.values():
        module.eval()
    with torch.no_grad():
        right = {name: (m(test_x).argmax(1) == test_y).float().mean().item() for name, m in modules.items()}
    if rank == 0:
        print(f"test accuracy: eager {right['eager']:.1%}, compiled {right['compiled']:.1%}")
        print(f"gradients were reduced: {dict(dynamotor.counters['ddp'])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    if "RANK" in os.environ:
        main(parser.parse_args().epochs)
    else:
        parser.parse_args()
        sys.exit(
            subprocess.call(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    "2",
                    __file__,
                    *sys.argv[1:],
                ]
            )
        )
