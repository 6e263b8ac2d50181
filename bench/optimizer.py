"""`python -m bench optimizer`: the AdamW step of BERT-base alone, in turns: ours (`compile(optimizer.step)`),
torch.compile's, PyTorch's `foreach=True` and `fused=True`.

`--optimizer torchao.optim.AdamW8bit`: another library's, beside itself (it calls torch.compile) and eager.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import dynamotor
from bench.measure import quartiles
from bench.tool import write_json
from bench.turns import turns
from dynamotor.tools.tables import render

ADAMW = "torch.optim.AdamW"
WIDTH, INNER, LAYERS = 768, 3072, 12
COLUMNS = ("way", "ms", "quartiles", "times ours")


def bert_shapes(layers: int = LAYERS) -> list[tuple[int, ...]]:
    """The shapes of BERT-base's parameters with its pooler: 199 tensors of 109 million numbers."""
    embeddings = [(30522, WIDTH), (512, WIDTH), (2, WIDTH), (WIDTH,), (WIDTH,)]
    attention = [(WIDTH, WIDTH), (WIDTH,)] * 4 + [(WIDTH,)] * 2
    feed_forward = [(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,)] + [(WIDTH,)] * 2
    return [*embeddings, *(attention + feed_forward) * layers, (WIDTH, WIDTH), (WIDTH,)]


def adamw(
    name: str, device: str, layers: int, **options: Any
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """An optimizer over BERT-base's parameters, with gradients; equal numbers at each call."""
    torch.manual_seed(0)
    parameters = [torch.randn(shape, device=device).requires_grad_() for shape in bert_shapes(layers)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)(parameters, lr=1e-3, **options), parameters


def eagerly(step: Callable[[], object]) -> Callable[[], object]:
    """A step whose compiled functions run as they are."""

    def run() -> None:
        with torch.compiler.set_stance("force_eager"):
            step()

    return run


def main(argv: list[str] | None = None) -> None:
    """Time the ways in turns, compare their parameters after as many steps each, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench optimizer", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--optimizer", default=ADAMW)
    parser.add_argument("--ways", default="", help="default: ours,torch.compile,foreach,fused")
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(argv)
    other = given.optimizer != ADAMW
    ways = given.ways or ("ours,as it is,eager" if other else "ours,torch.compile,foreach,fused")
    wrap: dict[str, Callable[[Any], Any]] = {"ours": dynamotor.compile, "torch.compile": torch.compile}
    wrap |= {"eager": eagerly}
    steps: dict[str, Callable[[], object]] = {}
    far: dict[str, float] = {}
    make = partial(adamw, given.optimizer, given.device, given.layers)
    reference, expected = make(**({} if other else {"foreach": False}))
    step = eagerly(reference.step) if other else reference.step
    step(), step()
    for way in ways.split(","):
        options = {} if other else {"fused": True} if way == "fused" else {"foreach": True}
        optimizer, parameters = make(**options)
        steps[way] = wrap.get(way, lambda step: step)(optimizer.step)
        steps[way](), steps[way]()
        far[way] = max(float((a - b).detach().abs().max()) for a, b in zip(parameters, expected, strict=True))
    finish = partial(torch.cuda.synchronize) if given.device == "cuda" else lambda: None
    rounds = turns(steps, seconds=given.seconds, finish=finish)
    rows = []
    for way in steps:
        ms = [1e3 * one[way] for one in rounds]
        ratio = statistics.median(one[way] / one["ours"] for one in rounds) if "ours" in steps else 0.0
        rows.append({"way": way, "ms": quartiles(ms), "times_ours": ratio, "far_from_eager": far[way]})
        print(rows[-1], flush=True)
    lines = [
        [r["way"], f"{r['ms'][1]:.3f}", f"{r['ms'][0]:.3f} {r['ms'][2]:.3f}", f"{r['times_ours']:.3f}"]
        for r in rows
    ]
    print(render(lines, COLUMNS))
    card = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    figures = {
        "optimizer": given.optimizer,
        "device": card,
        "torch": torch.__version__,
        "rounds": len(rounds),
        "rows": rows,
    }
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
