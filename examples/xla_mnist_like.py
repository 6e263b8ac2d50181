"""Trains a small convolutional network on scikit-learn's digits, written for torch_xla, run by dynamotor.

    python examples/xla_mnist_like.py                        # one XLA device python
    examples/xla_mnist_like.py --processes 2          # one process a device, gradients averaged python
    examples/xla_mnist_like.py --device cpu           # PyTorch's eager mode, to compare with python
    examples/xla_mnist_like.py --checkpoint run.ckpt  # saves each epoch there, and goes on from what is there

Prints one line an epoch; `--losses FILE` writes the loss of every step as JSON.
"""

import argparse
import json
import os

import dynamotor.xla

dynamotor.xla.install_as_torch_xla()

import torch  # noqa: E402
import torch_xla.core.xla_model as xm  # noqa: E402
import torch_xla.distributed.parallel_loader as pl  # noqa: E402
import torch_xla.distributed.xla_multiprocessing as xmp  # noqa: E402
import torch_xla.utils.serialization as xser  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn, optim  # noqa: E402

BATCH = 64


class MNIST(nn.Module):
    """Two convolutions and two linear layers over images [N, 1, 8, 8]; log-probabilities of ten classes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return torch.log_softmax(self.fc2(torch.relu(self.fc1(x.flatten(1)))), dim=1)


def batches(epoch, rank, world):
    """This replica's part of each batch of 64: together the replicas see what one alone would."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        rows = order[start : start + BATCH][rank::world]
        yield images[rows], labels[rows]


class Epoch:
    """An iterable of known length, as loaders want it."""

    def __init__(self, epoch, rank, world):
        self.items = list(batches(epoch, rank, world))

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)


def train(index, flags):
    """What each process does."""
    on_xla = flags.device == "xla"
    device = xm.xla_device() if on_xla else torch.device("cpu")
    rank, world = (xm.get_ordinal(), xm.xrt_world_size()) if on_xla else (0, 1)
    torch.manual_seed(0)
    model = MNIST().train().to(device)
    loss_fn = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses, first = [], 0
    if flags.checkpoint and os.path.exists(flags.checkpoint):
        saved = xser.load(flags.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses, first = saved["losses"], saved["epoch"] + 1

    def note(loss):
        value = loss.item()
        losses.append(
            xm.mesh_reduce("loss", value, lambda values: sum(values) / len(values)) if world > 1 else value
        )

    for epoch in range(first, flags.epochs):
        loader = Epoch(epoch, rank, world)
        for data, target in pl.MpDeviceLoader(loader, device) if on_xla else loader:
            optimizer.zero_grad()
            loss = loss_fn(model(data), target)
            loss.backward()
            if on_xla:
                xm.optimizer_step(optimizer)
                xm.add_step_closure(note, args=(loss.detach(),))
            else:
                optimizer.step()
                note(loss)
        xm.mark_step()
        if flags.checkpoint:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "losses": losses,
                "epoch": epoch,
            }
            xser.save(state, flags.checkpoint)
        xm.master_print(f"epoch {epoch}: loss {sum(losses[-len(loader) :]) / len(loader):.5f}", flush=True)
    if flags.losses and rank == 0:
        with open(flags.losses, "w") as f:
            json.dump(losses, f)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["xla", "cpu"], default="xla", help="where to train")
    parser.add_argument("--processes", type=int, default=1, help="replicas, a process each")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="file to save each epoch to, and to resume from")
    parser.add_argument("--losses", help="file for the losses of all steps")
    flags = parser.parse_args()
    if flags.processes > 1:
        xmp.spawn(train, args=(flags,), nprocs=flags.processes)
    else:
        train(0, flags)


if __name__ == "__main__":
    main()
