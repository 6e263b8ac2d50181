"""Training of transformers' families on the xla device beside the CPU: five steps of AdamW in float32.

python -m bench xla_families [--families A,B] [--ways lazy,bridge,step,spmd] [--json docs/results/xla-families.json]
python -m bench xla_families --memory GPT2LMHeadModel [--ways lazy] [--json FILE]

Ways: op by op with a barrier a step (lazy), `dynamotor.compile` (bridge), `compile_step` (step), and op by op with the
batch divided over four virtual devices (spmd), each in a process of its own. A way is right where

- no loss differs from the CPU's by more than SPREAD times the CPU's own difference from float64, or FLOOR;
- AdamW's means of the five gradients, each of its own size, are within the limits of `bench.beside` (as far from float64
  as the CPU's, times SPREAD), since losses hardly see the gradients of small layers;
- where one is not, the CPU's own difference is the largest of a few runs whose parameters were changed by a rounding
  each: a gradient that is rounding alone moves its parameter by a whole step of AdamW, up or down;
- where even that is too little, the way runs in float64 (models' own float32 included): losses and gradients agree within
  EXACT, which leaves rounding as the only difference;
- nothing is compiled after the second step, and the loss is on as many devices as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bench.tool import read_json, write_json

from . import models
from .beside import SPREAD, Row, apart, error, judge, sizes

FAMILIES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Gemma2ForCausalLM",
    "PhiForCausalLM",
    "BloomForCausalLM",
    "GPT2LMHeadModel",
    "MambaForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "BertForMaskedLM",
    "DebertaV2ForQuestionAnswering",
    "FNetForMaskedLM",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "Wav2Vec2ForCTC",
    "ViTForImageClassification",
    "SwinForImageClassification",
    "ResNetForImageClassification",
    "CLIPModel",
)
WAYS = ("lazy", "bridge", "step", "spmd")
STEPS, BATCH, RATE, DEVICES = 5, 4, 1e-3, 4
FLOOR = 2e-6  # of a loss: sixteen units in float32's last place, for sums in another order
SHAKEN = 4  # runs with changed parameters
EXACT = 1e-9
MEMORY_STEPS = (100, 500)

Step = Callable[..., torch.Tensor]


class Loss(torch.nn.Module):
    """The loss of a family's model as a function of a batch's tensors."""

    def __init__(self, case: models.ModelCase) -> None:
        super().__init__()
        self.model, self.loss = case.model.train(), case.loss
        given = case.make_inputs(0, train=True)[1]
        self.names = [name for name, v in given.items() if isinstance(v, torch.Tensor)]
        self.flags = {name: v for name, v in given.items() if name not in self.names}

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(**dict(zip(self.names, batch, strict=True)), **self.flags))


def loaded(name: str) -> tuple[Loss, Callable[[int], list[torch.Tensor]]]:
    """A small model with random weights, without dropout, and its batches by number."""
    case = models.load(name, small=True, batch=BATCH, dropout=False)
    if getattr(case.model.config, "problem_type", "") is None:
        # Else the model notes it in its first step, and is captured anew since it is no longer None.
        case.model.config.problem_type = "single_label_classification"
    loss = Loss(case)
    return loss, lambda step: [case.make_inputs(step, train=True)[1][key] for key in loss.names]


def plain_step(loss_of: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A step as PyTorch's tutorials write it."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def means(model: Loss, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """AdamW's running means of the gradients, by the names of their parameters."""
    states = ((name, optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state)
    return {f"grad {name}": state["exp_avg"].cpu().numpy() for name, state in states}


class Float64(TorchFunctionMode):
    """Makes float64 of the float32 that models ask for by name (norms, softmax, losses)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def on_cpu(name: str, dtype: torch.dtype, seed: int | None = None) -> dict[str, Any]:
    """The losses and means in eager; with a seed, after a change of each parameter by a rounding or less."""
    model, batch = loaded(name)
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + (torch.rand_like(parameter) - 0.5) * torch.finfo(dtype).eps)
    if dtype is torch.float64 and hasattr(model.model, "set_experts_implementation"):
        model.model.set_experts_implementation("eager")  # grouped products have no float64
    model = model.to(dtype)
    optimizer = optimizer_of(model)
    step = plain_step(model, optimizer)
    batches = ([cast(t, dtype) for t in batch(i)] for i in range(STEPS))
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        losses = [step(*tensors).item() for tensors in batches]
    return {"losses": losses, "means": means(model, optimizer)}


def steps_on_xla(
    name: str, way: str, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[torch.Tensor, Callable[[], dict[str, Any]]]]:
    """The losses on the device, without an end; each when its step has been sent to it. And what gives the means."""
    # PyTorch renews its pool of threads in a forked process, which autograd's threads, one a device, would do at once.
    torch.set_num_threads(1)
    if way == "spmd":
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import dynamotor  # noqa: PLC0415 - jax is started in the child alone, under its own flags
    import dynamotor.xla  # noqa: PLC0415
    from dynamotor.xla.distributed import spmd  # noqa: PLC0415

    model, batch = loaded(name)
    model = model.to(dtype).to("xla")
    optimizer, mesh = optimizer_of(model), None
    if way == "spmd":
        dynamotor.xla.runtime.use_spmd()
        mesh = spmd.Mesh(range(DEVICES), (DEVICES,), ("data",))
    if way == "step":
        step = dynamotor.xla.compile_step(model, lambda loss: loss, optimizer, n_inputs=len(model.names))
    else:
        step = plain_step(dynamotor.compile(model, backend="xla") if way == "bridge" else model, optimizer)
    number = 0
    while True:
        tensors = [cast(t, dtype).to("xla") for t in batch(number)]
        if mesh is not None:
            tensors = [spmd.mark_sharding(t, mesh, ("data", *[None] * (t.dim() - 1))) for t in tensors]
        loss = step(*tensors)
        dynamotor.xla.sync()
        yield loss, partial(means, model, optimizer)
        number += 1


def on_xla(name: str, way: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Losses, and how many programs had been compiled after each step."""
    from dynamotor.xla import metrics  # noqa: PLC0415
    from dynamotor.xla.transfer import array  # noqa: PLC0415

    losses, programs, steps = [], [], steps_on_xla(name, way, dtype)
    for _ in range(STEPS):
        with Float64() if dtype is torch.float64 else contextlib.nullcontext():
            loss, means_now = next(steps)
        programs.append(metrics.counters["UncachedCompile"])
        losses.append(loss.item())
    fallbacks = {k: n for k, n in metrics.all_counters().items() if k.startswith("aten::")}
    devices = len(array(loss).devices())
    found = {"losses": losses, "programs": programs, "devices": devices, "on_cpu": fallbacks}
    return {**found, "means": means_now()}


def difference(losses: list[float], expected: list[float]) -> float:
    """The largest relative one; infinite where one is not a number."""
    relative = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def judged(
    found: dict[str, Any], runs: list[dict[str, Any]], exact: dict[str, Any], devices: int
) -> dict[str, Any]:
    """A way's row: its findings, and whether they are right beside the CPU's runs."""
    row, off, wanted = Row(""), difference(found["losses"], runs[0]["losses"]), tensors(exact)
    right = judge(row, tensors(found), furthest([tensors(run) for run in runs], wanted), wanted)
    right &= off <= bound(runs, exact) and steady(found, devices)
    gradient = {
        "name": row.worst.removeprefix("grad model."),
        "error": row.error_ours,
        "cpu": row.error_eager,
    }
    rest = {key: each for key, each in found.items() if key != "means"}
    return {
        "right": right,
        "difference": off,
        "bound": bound(runs, exact),
        "gradient": gradient,
        "runs": len(runs),
        **rest,
    }


def steady(found: dict[str, Any], devices: int) -> bool:
    """Whether nothing was compiled after the second step, and all devices took part."""
    return found["programs"][1] == found["programs"][-1] and found["devices"] == devices


def largest(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """The largest difference of a loss or gradient."""
    ours, wanted = tensors(found), tensors(exact)
    scale = sizes(wanted, "grad")
    gradients = [error(ours[name], wanted[name], scale) for name in wanted]
    return max(difference(found["losses"], exact["losses"]), *gradients)


def tensors(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in found["means"].items()}


def furthest(runs: list[dict[str, torch.Tensor]], exact: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of each gradient the run that is furthest from float64's."""
    scale = sizes(exact, "grad")
    return {
        name: max((run[name] for run in runs), key=lambda t, wanted=wanted: error(t, wanted, scale))
        for name, wanted in exact.items()
    }


def bound(runs: list[dict[str, Any]], exact: dict[str, Any]) -> float:
    """The difference that a loss may have."""
    return max(FLOOR, *[SPREAD * difference(run["losses"], exact["losses"]) for run in runs])


def memory(name: str, way: str) -> dict[str, Any]:
    """Resident megabytes of the process and live arrays of jax after some numbers of steps."""
    import jax  # noqa: PLC0415

    from dynamotor.xla import metrics, sync  # noqa: PLC0415

    found: dict[str, Any] = {}
    for number, (loss, _) in enumerate(steps_on_xla(name, way), 1):
        if number in MEMORY_STEPS:
            sync(wait=True)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found[str(number)] = {
                "resident_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
                "arrays": len(jax.live_arrays()),
                "programs": metrics.counters["UncachedCompile"],
                "loss": loss.item(),
            }
        if number == MEMORY_STEPS[-1]:
            return found
    raise AssertionError


def shown(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "error" in row:
        return f"FAILED {row['error']}"
    kind, worst = "right" if row["right"] else "WRONG", row["gradient"]
    text = f"{kind} {row['difference']:.1e} (bound {row['bound']:.1e}), {worst['name']} {worst['error']:.1e} (cpu {worst['cpu']:.1e})"
    text += f", in float64 {row['float64']:.1e}" if "float64" in row else ""
    outside = f", on the CPU: {row['on_cpu']}" if row["on_cpu"] else ""
    return f"{text}, programs {row['programs']}{outside}"


Run = Callable[..., Any]


def row_of(
    on_cpu: Run, on_xla: Run, runs: list[dict[str, Any]], exact: dict[str, Any], devices: int
) -> dict[str, Any]:
    """A way's row. Where it is not right beside the CPU's first run it is asked again: further `runs` are
    added, then the way runs in float64."""
    found = on_xla()
    if isinstance(found, str):
        return {"right": False, "error": found}
    row = judged(found, runs[:1], exact, devices)
    if not row["right"]:
        runs += [on_cpu(torch.float32, seed) for seed in range(len(runs), SHAKEN + 1)]
        row = judged(found, runs, exact, devices)
    if not row["right"]:
        found = on_xla(torch.float64)
        row["float64"] = math.inf if isinstance(found, str) else largest(found, exact)
        row["right"] = row["float64"] <= EXACT and steady(row, devices)
    return row


def families(names: list[str], ways: list[str], found: dict[str, Any], options: argparse.Namespace) -> int:
    """Run each way of each family; the number of rows that are not right."""
    failed = 0
    for name in names:
        rows = found.setdefault("families", {}).setdefault(name, {})

        def cpu(*which: Any, name: str = name) -> Any:
            return apart(partial(on_cpu, name, *which), options.timeout)

        runs, exact = [cpu(torch.float32)], cpu(torch.float64)
        if isinstance(runs[0], str) or isinstance(exact, str):
            print(f"{name} cpu: {runs[0] if isinstance(runs[0], str) else exact}", flush=True)
            failed += 1
            continue
        rows["cpu"] = {"losses": runs[0]["losses"], "float64": exact["losses"]}
        for way in ways:
            start = time.perf_counter()

            def xla(*which: Any, name: str = name, way: str = way) -> Any:
                return apart(partial(on_xla, name, way, *which), options.timeout)

            rows[way] = row_of(cpu, xla, runs, exact, DEVICES if way == "spmd" else 1)
            failed += not rows[way]["right"]
            print(f"{name} {way} {time.perf_counter() - start:.0f} s: {shown(rows[way])}", flush=True)
            write_json(options.json, found)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--memory", help="500 steps of this family: memory and live arrays")
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a way of a family")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, ways = read_json(options.json), options.ways.split(",")
    models.load(FAMILIES[0], small=True)  # the children begin with transformers imported
    if not options.memory:
        return int(families(options.families.split(","), ways, found, options) > 0)
    for way in ways:
        row = apart(partial(memory, options.memory, way), options.timeout)
        found.setdefault("memory", {}).setdefault(options.memory, {})[way] = row
        print(f"{options.memory} {way}: {row}", flush=True)
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
