"""`python -m dynamotor demo`: real models end to end, in under three minutes.

Trains a small convolutional network on scikit-learn's digits with eager and compiled code side by side, then
compiles BERT-base and a resnet18 for inference and for a training step, and prints one table.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.tool import run_tool
from dynamotor.api import compile as compile_, reset
from dynamotor.base.config import config
from dynamotor.base.errors import UsageError
from dynamotor.tools.tables import render

from . import torchvision_stub
from .demo_models import DigitsNet, resnet18
from .measure import interleave
from .numerics import Errors, output_tensors

TIMES = ("first call s", "eager ms", "ms", "speedup", "quartiles")
PHASES = ("inference", "training step")
HEADER = ("model", "phase", *TIMES, "error out", "error grad", "eager's", "eager's")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    parser.add_argument("--epochs", type=int, default=5, help="epochs on the digits")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for the steady state of each row")
    parser.add_argument("--backend", default="native")


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """scikit-learn's 1,797 digits as float32 [N, 1, 8, 8] in 0..1 and int64 labels, 1,500 to train on and the
    rest to test.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "DM120",
            "the demo's digits come with scikit-learn, which is not installed",
            cure="pip install scikit-learn",
        ) from error
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def train_digits(wrap: Callable[[nn.Module], Any], epochs: int) -> tuple[list[float], float]:
    """Train from a fixed start; the mean loss of each epoch and the accuracy on the test images."""
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = digits()
    model = DigitsNet()
    net = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    curve = []
    for _ in range(epochs):
        model.train()
        total = 0.0
        for x, y in zip(train_x.split(100), train_y.split(100)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() / 15
        curve.append(total)
    model.eval()
    with torch.no_grad():
        accuracy = (net(test_x).argmax(1) == test_y).float().mean().item()
    return curve, accuracy


def show_digits(epochs: int, backend: str) -> bool:
    """Print both loss curves and accuracies; whether they agree."""
    start = time.perf_counter()
    eager_curve, eager_accuracy = train_digits(lambda m: m, epochs)
    middle = time.perf_counter()
    with config.patch(fallback_random=True):
        curve, accuracy = train_digits(lambda m: compile_(m, backend=backend), epochs)
    end = time.perf_counter()
    print(
        f"digits, {epochs} epochs of AdamW (loss of each epoch; accuracy on 297 unseen images; seconds with compilation)"
    )
    print(
        f"  eager     {'  '.join(f'{v:.5f}' for v in eager_curve)}   {eager_accuracy:.4f}   {middle - start:.1f} s"
    )
    print(f"  dynamotor {'  '.join(f'{v:.5f}' for v in curve)}   {accuracy:.4f}   {end - middle:.1f} s")
    same = (
        all(abs(a - b) <= 1e-3 * max(1.0, abs(a)) for a, b in zip(eager_curve, curve))
        and abs(accuracy - eager_accuracy) < 0.01
    )
    print(f"  the same curve and accuracy: {'yes' if same else 'NO'}\n")
    return same


def bert(dropout: float = 0.1) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """BERT-base for masked language modelling with random weights, and a batch of 4 × 128 tokens."""
    torchvision_stub.prepare()
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError as error:
        raise UsageError(
            "DM120",
            "the demo's BERT comes from transformers, which is not installed",
            cure="pip install transformers",
        ) from error
    torch.manual_seed(0)
    ids = torch.randint(0, 30522, (4, 128))
    config = BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def vision(dropout: float = 0.0) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """resnet18 with random weights and a batch of 4 images."""
    torch.manual_seed(0)
    return resnet18(), {"x": torch.randn(4, 3, 224, 224)}


Make = Callable[..., tuple[nn.Module, dict[str, torch.Tensor]]]


def step(net: Callable[..., Any], model: nn.Module, inputs: dict[str, torch.Tensor], train: bool) -> Any:
    """One inference, or one training step up to the gradients."""
    if not train:
        with torch.no_grad():
            return net(**inputs)
    model.zero_grad(set_to_none=True)
    output = net(**inputs)
    loss = output.square().mean() if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    return output


def errors(make: Make, train: bool, backend: str) -> list[Errors]:
    """Errors of ours and of eager against eager in float64, dropout off."""
    model, inputs = make(dropout=0.0)
    model.train(train)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    reference = copy.deepcopy(model).double()
    expected = output_tensors(step(reference, reference, exact, train))
    found = []
    for compiler in (lambda m: compile_(m, backend=backend), lambda m: m):
        twin = copy.deepcopy(model)
        outputs = output_tensors(step(compiler(twin), twin, inputs, train))
        found.append(Errors.of(outputs, expected, twin if train else None, reference))
    return found


def model_row(name: str, make: Make, train: bool, args: argparse.Namespace) -> tuple[list[str], bool]:
    """One row of the table, and whether our errors are small or no larger than twice eager's."""
    ours, eagers = errors(make, train, args.backend)
    model, inputs = make()
    model.train(train)
    step(model, model, inputs, train)
    reset()
    compiled = compile_(model, backend=args.backend)
    with tempfile.TemporaryDirectory() as empty, config.patch(cache_dir=empty):
        start = time.perf_counter()
        step(compiled, model, inputs, train)
        seconds = time.perf_counter() - start
    timing = interleave(
        lambda: step(model, model, inputs, train),
        lambda: step(compiled, model, inputs, train),
        seconds=args.seconds,
        least=3,
    )
    times = [f"{seconds:.2f}", f"{timing.eager_ms:.1f}", f"{timing.compiled_ms:.1f}"]
    ratio = [f"{timing.speedup:.2f}x", f"{timing.low:.2f}-{timing.high:.2f}"]
    return [name, PHASES[train], *times, *ratio, *ours.cells(), *eagers.cells()], ours.fine(eagers)


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 when everything agrees with eager."""
    start = time.perf_counter()
    same = show_digits(args.epochs, args.backend)
    rows, good = [], [same]
    for name, make in (("BERT-base 4x128", bert), ("resnet18 4x3x224x224", vision)):
        for train in (False, True):
            # The table is printed when all is known, which takes minutes on a slow machine.
            print(f"{name}, {PHASES[train]} ...", file=sys.stderr, flush=True)
            cells, fine = model_row(name, make, train, args)
            rows.append(cells)
            good.append(fine)
    print(render(rows, HEADER))
    print(
        "errors: largest relative difference from eager PyTorch in float64; the last two columns are eager's own in float32"
    )
    verdict = "everything agrees with eager" if all(good) else "SOMETHING DIFFERS FROM EAGER"
    print(f"\n{verdict}; {time.perf_counter() - start:.0f} s in all")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(run_tool("demo", __doc__, add_arguments, main))
