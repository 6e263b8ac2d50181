"""Large kernels beside a copy and torch.compile, and the host's time for a call: two jobs of the GPU bench.

>>> for row in kernel_rows({"device": "cuda", "seconds": 1.0})(): print(row["kernel"], row["of copy"])
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from . import models
from .gpu_programs import PROGRAMS, Job, compiler, distance

Rows = Callable[[], Iterator[dict[str, Any]]]


@dataclass(frozen=True)
class KernelCase:
    """A function with its inputs and the fewest bytes that it can move; with `gradients` forward and backward
    count.
    """

    run: Callable[..., torch.Tensor]
    inputs: list[torch.Tensor]
    nbytes: int
    gradients: bool = False
    random: bool = False
    bar: bool = True  # one of the kernels that the goals name

    def call(self, compiled: Callable[..., torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The timed functions."""
        if not self.gradients:
            return lambda: (compiled(*self.inputs),)
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in self.inputs]
        wanted = [t for t in leaves if t.requires_grad]
        tangents: list[torch.Tensor] = []

        def both() -> tuple[torch.Tensor, ...]:
            out = compiled(*leaves)
            if not tangents:
                ramp = torch.linspace(-1, 1, out.numel(), device=out.device).view(
                    out.shape
                )  # the same for every program
                tangents.append(ramp.bfloat16().to(out.dtype) if out.dim() else torch.ones_like(out))
            return (out.detach(), *torch.autograd.grad(out, wanted, tangents[0]))

        return both


def cases(device: str, tiny: bool = False) -> dict[str, KernelCase]:
    """The kernels of the goals, and a few that tell about single forms."""
    cut = 64 if tiny else 1
    bf16 = torch.bfloat16

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=bf16)

    rows, wide, words = 16384 // cut, 4096 // cut, 50257 // cut
    x, s = randn(rows, wide), randn(8192 // cut, 8192 // cut)
    w, b = randn(wide), randn(wide)
    big, more = randn((128 << 20) // cut**2), randn((128 << 20) // cut**2)
    logits, target = randn(8192 // cut, words), torch.randint(0, words, (8192 // cut,), device=device)

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (wide,), w, b)

    return {
        "softmax 8192x8192": KernelCase(lambda x: torch.softmax(x, -1), [s], 2 * s.nbytes),
        "layer norm fwd+bwd 16384x4096": KernelCase(norm, [x, w, b], 5 * x.nbytes, gradients=True),
        "gelu dropout residual 256 MB": KernelCase(
            lambda x, y: F.dropout(F.gelu(x), 0.1) + y, [big, more], 3 * big.nbytes, random=True
        ),
        "cross entropy fwd+bwd 8192x50257": KernelCase(
            lambda x, t: F.cross_entropy(x.float(), t), [logits, target], 3 * logits.nbytes, gradients=True
        ),
        "layer norm fwd 16384x4096": KernelCase(norm, [x, w, b], 2 * x.nbytes, bar=False),
        "map 256 MB": KernelCase(lambda x: x + 1, [big], 2 * big.nbytes, bar=False),
        "column sums 65536x1024": KernelCase(lambda x: x.sum(0), [big.view(-1, 1024)], big.nbytes, bar=False),
        "transpose 8192x8192": KernelCase(lambda x: x.t().contiguous(), [s], 2 * s.nbytes, bar=False),
    }


class Clock:
    """Device time of a call: the median of several, each with a cache full of other (clean) data."""

    def __init__(self, device: str) -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.other = torch.ones((1 << 27) if self.cuda else 16, dtype=torch.int16, device=device)

    def milliseconds(self, call: Callable[[], Any], repeat: int = 20) -> float:
        """The pause before each call lets the host get ahead, so that only the device counts."""
        for _ in range(3):
            call()
        times = []
        for _ in range(repeat if self.cuda else 2):
            if not self.cuda:
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e3)
                continue
            self.other.amax()  # reads, so that no dirty lines are written back while the call is timed
            torch.cuda._sleep(4_000_000)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def copy_rate(clock: Clock, device: str) -> float:
    """GB/s of a device-to-device copy, bytes read and written."""
    pair = torch.ones(2, (1 << 30) if clock.cuda else 1 << 16, dtype=torch.int8, device=device)
    return pair.nbytes / clock.milliseconds(lambda: pair[1].copy_(pair[0])) / 1e6


def kernel_row(name: str, case: KernelCase, clock: Clock, rate: float, job: Job) -> dict[str, Any]:
    """One kernel by the three programs."""
    row: dict[str, Any] = {
        "mode": "kernels",
        "model": name,
        "bar": case.bar,
        "copy GB/s": round(rate),
        "ms": {},
        "GB/s": {},
    }
    results = {}
    for program in PROGRAMS:
        call = case.call(compiler(program, job)(case.run))
        results[program] = {f"out{n}": t.detach().clone() for n, t in enumerate(call())}
        row["ms"][program] = round(clock.milliseconds(call), 5)
        row["GB/s"][program] = round(case.nbytes / row["ms"][program] / 1e6, 1)
    row["of copy"] = round(row["GB/s"]["ours"] / rate, 4)
    row["ratio"] = round(row["ms"]["peer"] / row["ms"]["ours"], 4)
    if not case.random:
        exact = [t.float() if t.is_floating_point() else t for t in case.inputs]
        wanted = {f"out{n}": t.detach() for n, t in enumerate(replace(case, inputs=exact).call(case.run)())}
        row["errors"] = {
            p: distance({k: t.float() for k, t in found.items()}, wanted) for p, found in results.items()
        }
    return row


def kernel_rows(job: Job) -> Rows:
    """A row a kernel; one that fails says why."""

    def rows() -> Iterator[dict[str, Any]]:
        clock = Clock(job["device"])
        rate = copy_rate(clock, job["device"])
        for name, case in cases(job["device"], bool(job.get("tiny"))).items():
            if job.get("only") and not name.startswith(tuple(job["only"])):
                continue
            try:
                yield kernel_row(name, case, clock, rate, job)
            except Exception as error:
                yield {
                    "mode": "kernels",
                    "model": name,
                    "error": f"{type(error).__name__}: {str(error)[:600]}",
                }
            torch.compiler.reset()

    return rows


def overhead_rows(job: Job) -> Rows:
    """Host microseconds of a call of a 12-layer BERT with 32 channels: the device has next to nothing to
    do.
    """
    case = models.load("BertForMaskedLM", small=True, batch=1)
    config = case.model.config
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads = (
        12,
        32,
        64,
        2,
    )
    model = type(case.model)(config).eval()

    def rows() -> Iterator[dict[str, Any]]:
        cuda = torch.device(job["device"]).type == "cuda"
        finish = torch.cuda.synchronize if cuda else lambda: None
        model.to(job["device"])
        ids = torch.randint(5, 100, (1, 16), device=job["device"])
        calls = {p: compiler(p, job)(model) for p in PROGRAMS}
        calls["ours graphs"] = compiler("ours", {**job, "mode": "infer"})(model)
        times: dict[str, list[float]] = {name: [] for name in calls}
        with torch.no_grad():
            for n in range(40 if cuda else 4):
                for name, call in calls.items():
                    finish()
                    start = time.perf_counter()
                    call(ids)
                    if n > 3 or not cuda:
                        times[name].append(time.perf_counter() - start)
        us = {name: round(statistics.median(found) * 1e6, 1) for name, found in times.items()}
        yield {
            "mode": "overhead",
            "model": "BERT 12x32",
            "host_us": us,
            "of peer": round(us["ours"] / us["peer"], 4),
        }

    return rows


# Rows, k and words of products whose rows do not start at multiples of 16 bytes: GPT-2's and BERT's
# vocabularies.
VOCABULARIES = ((2048, 768, 50257), (4096, 768, 30522))


def product_rows(job: Job) -> Rows:
    """The library's products over a vocabulary, with rows as they are and moved apart to multiples of 16
    bytes.
    """
    cut = 64 if job.get("tiny") else 1

    def rows() -> Iterator[dict[str, Any]]:
        clock = Clock(job["device"])
        for n, k, words in VOCABULARIES:
            n, words = n // cut, words // cut
            apart = -(-words // 8) * 8
            x, w = (torch.randn(size, k, device=job["device"], dtype=torch.bfloat16) for size in (n, words))
            ms: dict[str, dict[str, float]] = {"forward": {}, "gradient of x": {}, "gradient of w": {}}
            for label, step in (("as it is", words), ("aligned", apart)):
                out = torch.empty_strided(
                    (n, words), (step, 1), device=job["device"], dtype=torch.bfloat16
                ).normal_()
                ms["gradient of x"][label] = clock.milliseconds(lambda: torch.mm(out, w))  # noqa: B023
                ms["gradient of w"][label] = clock.milliseconds(lambda: torch.mm(out.t(), x))  # noqa: B023
                ms["forward"][label] = clock.milliseconds(lambda: torch.mm(x, w.t(), out=out))  # noqa: B023
            yield {"mode": "products", "model": f"{n}x{k}x{words}", "ms": ms}

    return rows
