"""One measurement of the bench in a process of its own: `python -m bench.worker '{"model": ...}'`.

Tasks: "time" (first call and steady state), "first_call" (first call alone), "start" (first call beside an
eager one), "errors" (outputs and gradients against eager, dropout off). The last line printed is JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dynamotor.api import compile as compile_, dispatcher_of
from dynamotor.base.events import counters

from . import models
from .gpu_programs import Workload
from .measure import interleave
from .numerics import Errors

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compiler_of(name: str) -> Callable[[Any], Any]:
    """The function that compiles a module: ours, inductor or another torch.compile backend, or nothing."""
    if name == "eager":
        return lambda model: model
    if name in ("dynamotor", "native"):
        return compile_
    if name.startswith("dynamotor-"):
        return lambda model: compile_(model, mode=name.removeprefix("dynamotor-"))
    if name == "aot_eager":
        return lambda model: compile_(model, backend="aot_eager")
    if name == "inductor":
        return torch.compile
    if name.startswith("inductor-"):
        return lambda model: torch.compile(model, mode=name.removeprefix("inductor-"))
    return lambda model: torch.compile(model, backend=name)


class PhaseOfModel(Workload):
    """One phase of one model, as the bench on a CPU runs it: in the job's own precision, with a loss that every
    output takes part in.
    """

    def __init__(self, job: dict[str, Any], dropout: bool) -> None:
        super().__init__({**job, "mode": job["phase"]}, dropout)
        self.model = self.model.to(job["device"])
        self.args = tuple(a.to(job["device"]) for a in self.args)
        self.kwargs = {k: v.to(job["device"]) for k, v in self.kwargs.items()}

    @property
    def amp(self) -> torch.dtype | None:
        return AMP.get(self.job["amp"])

    def loss(self, out: Any) -> torch.Tensor:
        return self.case.loss(out)

    def step(self, call: Callable[..., Any]) -> Any:
        out = super().step(call)
        if torch.device(self.job["device"]).type == "cuda":
            torch.cuda.synchronize()
        return out


def time_task(job: dict[str, Any], steady: bool) -> dict[str, Any]:
    """First call and, if asked, the steady state in turns with eager."""
    program = PhaseOfModel(job, dropout=True)
    if steady or job["compiler"] != "eager":
        program.step(program.model)  # eager's own first call (library start-up) is not the compiler's
    compiled = compiler_of(job["compiler"])(program.model)
    start = time.perf_counter()
    program.step(compiled)
    result: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    if steady:
        timing = interleave(
            lambda: program.step(program.model), lambda: program.step(compiled), seconds=job["seconds"]
        )
        result["timing"] = dataclasses.asdict(timing)
        result |= graph_counts(compiled, lambda: program.step(compiled))
    return result


def start_task(job: dict[str, Any]) -> dict[str, Any]:
    """The first call beside an eager one: seconds of the clock and of this process's processors."""
    program = PhaseOfModel(job, dropout=True)

    def seconds(model: Any) -> tuple[float, float]:
        wall, processors = time.perf_counter(), time.process_time()
        program.step(model)
        return time.perf_counter() - wall, time.process_time() - processors

    seconds(program.model)  # eager's own first call (library start-up) is not the compiler's
    eager = [seconds(program.model) for _ in range(3)]
    first = seconds(compiler_of(job["compiler"])(program.model))
    return {"first": first, "eager": [min(column) for column in zip(*eager, strict=True)]}


def graph_counts(compiled: Any, step: Callable[[], object]) -> dict[str, Any]:
    """Graphs and breaks of our captures, and the part of one more step's torch calls that runs compiled, with the
    reasons for the others; unknown for other compilers. Captures count eager calls in their first calls alone, so
    that the counts of the steps before would be too good.
    """
    dispatcher = dispatcher_of(compiled)
    if dispatcher is None:
        return {"graphs": None, "breaks": None, "compiled": None}
    with dispatcher.miss.__self__.share.watched() as counts:
        step()
    return {
        "graphs": counters["capture"]["graphs"],
        "breaks": sum(counters["breaks"].values()),
        "compiled": counts.share,
        "left_to_eager": dict(counts.eager),
        "fallbacks": dict(counters["fallback"]),
    }


def errors_task(job: dict[str, Any]) -> dict[str, Any]:
    """Errors of the compiled program and of eager against eager in float64, dropout off, from the same
    parameters and buffers.
    """
    program = PhaseOfModel(job, dropout=False)
    start = program.model
    with program.beside(copy.deepcopy(start), torch.float64) as reference:
        expected = models.output_tensors(program.step(reference))
    result: dict[str, Any] = {}
    for key, compiler in (("", compiler_of(job["compiler"])), ("eager_", compiler_of("eager"))):
        program.model = copy.deepcopy(start)
        outputs = models.output_tensors(program.step(compiler(program.model)))
        errors = Errors.of(outputs, expected, program.model if program.train else None, reference)
        result |= {f"{key}error_out": errors.out, f"{key}error_grad": errors.grad}
    return result


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    if job["task"] == "errors":
        result = errors_task(job)
    elif job["task"] == "start":
        result = start_task(job)
    else:
        result = time_task(job, steady=job["task"] == "time")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
