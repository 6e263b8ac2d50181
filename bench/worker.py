"""One measurement of the bench in a process of its own: `python -m bench.worker '{"model": ...}'`.

Tasks: "time" (first call and steady state), "first_call" (first call alone), "start" (first call beside an
eager one), "errors" (outputs and gradients against eager, dropout off). The last line printed is JSON.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from dynamotor.api import compile as compile_
from dynamotor.base.events import counters

from . import models
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


class PhaseOfModel:
    """One phase of one model: `step(model)` runs it and returns what is compared."""

    def __init__(self, job: dict[str, Any], dropout: bool) -> None:
        self.case = models.load(job["model"], small=job["small"], batch=job["batch"], dropout=dropout)
        self.model = self.case.model.to(job["device"])
        self.train = job["phase"] == "train"
        self.model.train(self.train)
        args, kwargs = self.case.make_inputs(train=self.train)
        self.args = [a.to(job["device"]) for a in args]
        self.kwargs = {k: v.to(job["device"]) for k, v in kwargs.items()}
        self.amp = AMP.get(job["amp"])
        self.device = torch.device(job["device"]).type
        self.sync = torch.cuda.synchronize if self.device == "cuda" else (lambda: None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.amp) if self.amp else contextlib.nullcontext()

    def exact(self, reference: torch.nn.Module) -> Any:
        """The step of a float64 model on float64 inputs, without autocast."""
        saved, self.model, self.args, amp, self.amp = (
            (self.model, self.args),
            reference,
            self.double_args(),
            self.amp,
            None,
        )
        out = self.step(reference)
        (self.model, self.args), self.amp = saved, amp
        return out

    def double_args(self) -> list[torch.Tensor]:
        return [a.double() if a.is_floating_point() else a for a in self.args]

    def step(self, model: torch.nn.Module) -> Any:
        """Inference: the outputs. Training: forward, loss and backward; the gradients stay on the
        parameters.
        """
        if not self.train:
            with torch.no_grad(), self.autocast():
                out = model(*self.args, **self.kwargs)
        else:
            self.model.zero_grad(set_to_none=True)
            with self.autocast():
                out = model(*self.args, **self.kwargs)
                loss = self.case.loss(out)
            loss.backward()
        self.sync()
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
        result |= graph_counts(job["compiler"])
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


def graph_counts(compiler: str) -> dict[str, Any]:
    """Graphs and breaks of our captures (other compilers: unknown)."""
    if compiler not in ("dynamotor", "native", "aot_eager"):
        return {"graphs": None, "breaks": None}
    return {
        "graphs": counters["capture"]["graphs"],
        "breaks": sum(counters["breaks"].values()),
        "fallbacks": dict(counters["fallback"]),
    }


def errors_task(job: dict[str, Any]) -> dict[str, Any]:
    """Errors of the compiled program and of eager against eager in float64, dropout off, from the same
    parameters and buffers.
    """
    program = PhaseOfModel(job, dropout=False)
    start = program.model
    reference = copy.deepcopy(start).double()
    expected = models.output_tensors(program.exact(reference))
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
