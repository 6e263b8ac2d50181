"""The cost of the guards of a whole training step, as a share of the step.

python -m bench step_guards [--model BertForMaskedLM] [--batch 8] [--json step-guards.json]

Guards are the capture's (arguments, modules, modes), the optimizer's facts (groups, state, gradients) and the look-ups of
its update's Python: all that a step checks before its program runs. Each is timed by itself, many times in a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynamotor.step import compile_step

from . import models
from .version_cost import best


def parts_of(step: Any, batch: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The checks of a step that has run as one program."""
    (entry,) = step.captured.entries
    (graph,) = step.graphs
    tensors = entry.program.check(tuple(batch))
    assert tensors is not None and graph.bound and graph._is_quiet() and not graph.held, step.explain()
    return {
        "captured": lambda: entry.program.check(tuple(batch)),
        "gradients": lambda: graph._is_quiet(),
        "optimizer": lambda: graph._is_bound(tensors, ()),
        "update": lambda: all(bound.reads.hold() for bound in graph.bound),
    }


def measured(name: str, batch_size: int, device: str, small: bool, steps: int) -> dict[str, Any]:
    """Microseconds of each part, and of a step."""
    case = models.load(name, batch=batch_size, small=small)
    model = case.model.to(device).train()
    _, kwargs = case.make_inputs(train=True)
    names, batch = list(kwargs), [t.to(device) for t in kwargs.values()]

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> Any:
            return self.model(**dict(zip(names, given)))

    cuda = device == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, **({"fused": True} if cuda else {"foreach": True})
    )
    step = compile_step(
        Named(), case.loss, optimizer, n_inputs=len(batch), mode="reduce-overhead" if cuda else None
    )

    def timed() -> float:
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            step(*batch)
        if cuda:
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - start)

    for _ in range(8):
        timed()
    whole = statistics.median(timed() for _ in range(steps))
    with torch.autocast(device, torch.bfloat16, enabled=cuda):  # a fact that guards hold
        parts = {key: 1e6 * best(check, 20, 50) for key, check in parts_of(step, batch).items()}
    total = sum(parts.values())
    return {"model": name, "batch": batch_size, "step us": whole, "guards us": parts, "share": total / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="BertForMaskedLM")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", default="step-guards.json")
    options = parser.parse_args()
    row = measured(options.model, options.batch, options.device, options.small, options.steps)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    found = {"command": " ".join(sys.argv[1:]), "device": device, "torch": torch.__version__, **row}
    Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{row['model']}: guards {sum(row['guards us'].values()):.1f} us of a step of {row['step us']:.0f} us"
    )
    print(f"share {row['share']:.2%}, {', '.join(f'{k} {v:.1f} us' for k, v in row['guards us'].items())}")


if __name__ == "__main__":
    main()
