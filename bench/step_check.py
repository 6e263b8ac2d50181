"""`python -m dynamotor bench --step --check`: whole steps give the results of the eager loop, as closely as bf16
lets eager itself.

Without dropout: the losses of some steps, and how far the weights have moved away from those of eager in
float32, as a share of how far those have moved; eager under autocast shows the expected distance. With
dropout, where no two runs are equal: the last loss over many seeds, its mean and spread.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Any

import torch

from . import models
from .gpu_programs import full_float32

if TYPE_CHECKING:
    from .step import Way, Worker

STEPS, SEEDS = 10, 12
FURTHER = 1.5  # times as far from float32 as eager under autocast is: beyond it a step is wrong
STANDARD_ERRORS = 4.0  # between the means of two ways' losses with dropout


class _Start:
    """Where a way begins: weights and buffers as they were; `again()` puts them back, and the optimizer's
    state to nothing.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.saved = {k: v.detach().clone() for k, v in way.model.state_dict().items()}

    def again(self) -> None:
        with torch.no_grad():
            for name, tensor in self.way.model.state_dict().items():
                tensor.copy_(self.saved[name])
            for entries in self.way.optimizer.state.values():
                for value in entries.values():
                    value.zero_()

    def run(self, steps: int) -> list[float]:
        self.again()
        return [float(self.way.call().detach()) for _ in range(steps)]

    def moved(self) -> dict[str, torch.Tensor]:
        """How far each parameter is from where it began."""
        return {
            n: p.detach().double().cpu() - self.saved[n].double().cpu()
            for n, p in self.way.model.named_parameters()
        }


def check(worker: Worker) -> dict[str, Any]:
    """Results of the ways of one model; `wrong` names the differences."""
    job, drops = worker.job, worker.case
    worker.case = models.load(job["model"], small=job["small"], batch=job["batch"], dropout=False)
    losses, moved = {}, {}
    for name in ("float32", "eager", "step"):
        with full_float32() if name == "float32" else contextlib.nullcontext():
            start = _started(worker, name)
            losses[name], moved[name] = start.run(STEPS), start.moved()
    worker.case = drops
    row: dict[str, Any] = {"model": job["model"], "losses": losses}
    row["weights"] = {name: _far(moved[name], moved["float32"]) for name in ("eager", "step")}
    row["seeds"] = {name: _over_seeds(_started(worker, name)) for name in ("eager", "step")}
    return {**row, "wrong": wrong(row)}


def wrong(row: dict[str, Any]) -> list[str]:
    """What of a row is not as close to eager as eager is to itself."""
    found, losses, far, seeds = [], row["losses"], row["weights"], row["seeds"]
    for what, least in (("all", 1e-3), ("worst", 1e-2)):
        mine, eager = far["step"][what], far["eager"][what]
        if not mine <= max(FURTHER * eager, least):
            found.append(f"weights ({what}) are {mine:.3g} from float32's, eager's {eager:.3g}")
    mine, eager = (
        max(abs(a - b) for a, b in zip(losses[n], losses["float32"], strict=True)) for n in ("step", "eager")
    )
    if not mine <= 2 * eager + 2e-3:
        found.append(f"losses are {mine:.3g} from float32's, eager's {eager:.3g}")
    apart = abs(seeds["step"]["mean"] - seeds["eager"]["mean"])
    error = (sum(s["deviation"] ** 2 for s in seeds.values()) / SEEDS) ** 0.5
    if not apart <= STANDARD_ERRORS * error + 2e-3:
        found.append(f"with dropout the last losses are {apart:.3g} apart, a standard error is {error:.3g}")
    return found


def _started(worker: Worker, name: str) -> _Start:
    """A way after its first calls: programs are compiled and recorded, and the optimizer has its state."""
    start = _Start(worker.build("eager" if name == "float32" else name, amp=name != "float32"))
    for _ in range(5 if name == "step" else 1):
        start.way.call()
    return start


def _far(moved: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """‖a - b‖ / ‖b‖ of all movements together, and of the parameter for which it is the largest."""
    gap = {n: (moved[n] - w).norm().item() for n, w in wanted.items()}
    size = {n: w.norm().item() for n, w in wanted.items()}
    total = sum(s**2 for s in size.values()) ** 0.5
    shares = {n: gap[n] / max(size[n], 1e-4 * total, 1e-30) for n in wanted}
    worst = max(shares, key=lambda n: shares[n])
    together = sum(g**2 for g in gap.values()) ** 0.5 / max(total, 1e-30)
    return {"all": together, "worst": shares[worst], "where": worst}


def _over_seeds(start: _Start) -> dict[str, float]:
    last = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        last.append(start.run(6)[-1])
    return {"mean": statistics.mean(last), "deviation": statistics.stdev(last)}


def table(row: dict[str, Any]) -> str:
    """The findings of a check, as text."""
    lines = [f"{row['model']}: losses of {STEPS} steps without dropout"]
    lines += [
        f"  {name:8}" + " ".join(f"{loss:9.4f}" for loss in found) for name, found in row["losses"].items()
    ]
    for name in ("eager", "step"):
        far, seeds = row["weights"][name], row["seeds"][name]
        lines.append(
            f"  {name:8}weights {far['all']:.2e} of the way from float32's, worst {far['worst']:.2e} ({far['where']});"
            f" with dropout the 6th loss {seeds['mean']:.4f} ± {seeds['deviation']:.4f}"
        )
    return "\n".join(
        [*lines, *(f"  WRONG: {text}" for text in row["wrong"])] + ([] if row["wrong"] else ["  right"])
    )
