"""The programs of the GPU bench: a model's training step or inference, run by eager, by torch.compile and by
us alike.

>>> work = Workload({"mode": "train", "model": "resnet50", "batch": 32, "device": "cuda"}); work.to_device()
>>> out = work.step(compiler("ours", work.job)(work.model))
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dynamotor.api import compile as compile_

from . import models

# The models of the goals with their batch sizes; sequences have 128 tokens.
BATCH = {
    "resnet50": 32,
    "BertForMaskedLM": 32,
    "vit_base_patch16_224": 32,
    "GPT2LMHeadModel": 16,
    "convnext_base": 32,
    "swin_base_patch4_window7_224": 32,
    "T5ForConditionalGeneration": 16,
    "LlamaForCausalLM": 16,
}
# Those that draw random numbers in training: their errors need a run of their own, without dropout.
WITH_DROPOUT = (
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "swin_base_patch4_window7_224",
    "T5ForConditionalGeneration",
)
PROGRAMS = ("eager", "ours", "peer")  # peer: torch.compile
Job = dict[str, Any]


def compiler(program: str, job: Job) -> Callable[[Any], Any]:
    """The function that compiles a module for one of the programs.

    Training uses the default modes, inference `mode="reduce-overhead"` on both sides. job["peer"] names
    another backend of torch.compile (for tests), job["target"] our config.target.
    """
    if program == "eager":
        return lambda model: model
    mode = "reduce-overhead" if job["mode"].startswith("infer") else None
    if program == "ours":
        options = {"target": job["target"]} if job.get("target") else {}
        return lambda model: compile_(model, mode=mode, options=options)
    if job.get("peer", "inductor") != "inductor":
        return lambda model: torch.compile(model, backend=job["peer"])
    return lambda model: torch.compile(model, mode=mode)


class Workload:
    """A model with its inputs. Modes: train (bf16 autocast), infer (bf16 weights), infer_amp (float32
    weights, autocast).
    """

    def __init__(self, job: Job, dropout: bool = True) -> None:
        self.job = job
        self.train = job["mode"] in ("train", "errors")
        self.plain = False  # a reference runs without autocast
        tiny = bool(job.get("tiny"))
        self.case = models.load(
            job["model"],
            small=tiny or bool(job.get("small")),
            batch=None if tiny else job["batch"],
            dropout=dropout,
        )
        self.model = self.case.model.train(self.train)
        self.args, self.kwargs = self.case.make_inputs(train=self.train)
        self.optimizer: torch.optim.Optimizer | None = None

    def to_device(self) -> None:
        """Move everything to the device; bf16 weights for inference without autocast."""
        device = self.job["device"]
        self.model = self.model.to(device)
        if self.job["mode"] == "infer":
            self.model = self.model.bfloat16()
            self.args = tuple(a.bfloat16() if a.is_floating_point() else a for a in self.args)
            self.kwargs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in self.kwargs.items()}
        self.args = tuple(a.to(device) for a in self.args)
        self.kwargs = {k: v.to(device) for k, v in self.kwargs.items()}
        self.labels = torch.arange(len(self.args[0]), device=device) % 7 if self.args else None
        if self.train and self.job.get("optimizer"):
            self.optimizer = _OPTIMIZERS[self.job["optimizer"]](self.model.parameters())

    @property
    def has_dropout(self) -> bool:
        """Whether a step draws random numbers, so that two programs cannot be compared."""
        return self.train and any(
            isinstance(value, float)
            and value > 0
            and (key == "p" and "Drop" in type(m).__name__ or "drop" in key)
            for m in self.model.modules()
            for key, value in vars(m).items()
        )

    @property
    def amp(self) -> torch.dtype | None:
        """The type of autocast; None without it."""
        return None if self.job["mode"] == "infer" else torch.bfloat16

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.plain or self.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.job["device"]).type, self.amp)

    def step(self, call: Callable[..., Any]) -> Any:
        """Inference: the output. Training: the output; the gradients stay on the parameters."""
        if not self.train:
            with torch.no_grad(), self.autocast():
                return call(*self.args, **self.kwargs)
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            out = call(*self.args, **self.kwargs)
            loss = self.loss(out)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return out

    def loss(self, out: Any) -> torch.Tensor:
        """The model's own loss, or cross entropy of its logits."""
        own = getattr(out, "loss", None)
        return own if own is not None else F.cross_entropy(out, self.labels)

    def results(self, call: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one step, by name."""
        tensors = models.output_tensors(self.step(call))
        found = {
            f"out{n}": t.detach().float().clone() for n, t in enumerate(tensors) if t.is_floating_point()
        }
        if self.train:
            found |= {
                f"grad {n}": p.grad.detach().float()
                for n, p in self.model.named_parameters()
                if p.grad is not None
            }
            self.model.zero_grad(set_to_none=True)
        return found

    def reference(self) -> dict[str, torch.Tensor]:
        """The same of eager in float32, without TF32, from the same weights and inputs."""
        with full_float32(), self.beside(copy.deepcopy(self.model), torch.float32) as model:
            return self.results(model)

    @contextlib.contextmanager
    def beside(self, model: torch.nn.Module, dtype: torch.dtype) -> Iterator[torch.nn.Module]:
        """Inside, the steps are those of this model, in a wider type, without autocast and optimizer."""
        saved = self.model, self.args, self.kwargs, self.optimizer
        self.model, self.optimizer, self.plain = model.to(dtype), None, True
        self.args = tuple(a.to(dtype) if a.is_floating_point() else a for a in self.args)
        self.kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.kwargs.items()}
        try:
            yield self.model
        finally:
            self.model, self.args, self.kwargs, self.optimizer = saved
            self.plain = False


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-6, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True),
}


@contextlib.contextmanager
def full_float32() -> Any:
    """Products and convolutions in all of float32's bits."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32
    settings = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    matmul.allow_tf32 = False
    try:
        with cudnn.flags(**settings, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = before


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far results are from the reference: ‖a - b‖ / ‖b‖ of the outputs (the worst) and of all gradients
    together.

    `worst gradient` is the largest of a single parameter's, where parameters with next to no gradient do not
    count.
    """
    if found.keys() != wanted.keys() or any(found[k].shape != wanted[k].shape for k in wanted):
        return {"out": float("inf"), "grad": float("inf")}
    gap = {k: (found[k].double() - w.double()).norm().item() for k, w in wanted.items()}
    size = {k: w.double().norm().item() for k, w in wanted.items()}
    result = {"out": max((_ratio(gap[k], size[k]) for k in wanted if k.startswith("out")), default=0.0)}
    grads = [k for k in wanted if k.startswith("grad")]
    if grads:
        total = sum(size[k] ** 2 for k in grads) ** 0.5
        result["grad"] = _ratio(sum(gap[k] ** 2 for k in grads) ** 0.5, total)
        result["worst gradient"] = max(_ratio(gap[k], max(size[k], 1e-3 * total)) for k in grads)
    return result


def _ratio(a: float, b: float) -> float:
    """a / b; infinite unless it is a number."""
    return float("inf") if a != a else a / b if b else a


_GROUPS = (
    ("attention", "flash|fmha|attention|sdpa"),
    ("convolution", "conv|fprop|dgrad|wgrad|cudnn|nhwcTo|nchwTo"),
    ("matmul", "gemm|cutlass|cublas|nvjet|splitk|gemv|_mm"),
    ("copy", "memcpy|memset"),
    ("generated", r"^triton_|^dm_|^g[0-9a-f]{12}$"),
)


def group_of(kernel: str) -> str:
    """What kind of work a GPU kernel does, by its name."""
    return next((group for group, pattern in _GROUPS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def kind_of(kernel: str, facts: dict[str, Any]) -> str:
    """`group_of`, our own kernels by the ops that they fuse: writes of parameters and state, copies and casts alone,
    sums, the rest.
    """
    fact = facts.get(kernel)
    if fact is None:
        return "optimizer" if "multi_tensor_apply" in kernel or "Adam" in kernel else group_of(kernel)
    if "copy__" in fact["note"]:
        return "ours: update"
    if kernel.startswith("dm_copy"):
        return "ours: copies"
    return "ours: sums" if "_sum_" in kernel or "_max_" in kernel else "ours: maps"


def kernel_times(step: Callable[[], Any], device: str, steps: int = 3) -> list[dict[str, Any]]:
    """Milliseconds and calls a step of each kernel that the device runs, the longest first."""
    cuda = torch.device(device).type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as report:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in report.events() or ():
        if cuda and (
            event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False)
        ):
            continue
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        totals.setdefault(event.name, []).append(us)
    rows: list[dict[str, Any]] = [
        {"name": name, "ms": sum(us) / steps / 1e3, "calls": len(us) / steps} for name, us in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def profile(step: Callable[[], Any], device: str, steps: int = 3, top: int = 12) -> dict[str, Any]:
    """Milliseconds a step that the device spends, by kind of kernel, and its longest kernels."""
    rows = kernel_times(step, device, steps)
    groups: dict[str, float] = {}
    for row in rows:
        groups[group_of(row["name"])] = groups.get(group_of(row["name"]), 0.0) + row["ms"]
    return {
        "gpu_ms": round(sum(groups.values()), 4),
        "launches": round(sum(r["calls"] for r in rows)),
        "groups": {k: round(v, 4) for k, v in sorted(groups.items())},
        "top": [
            {**r, "name": r["name"][:100], "ms": round(r["ms"], 4), "calls": round(r["calls"], 2)}
            for r in rows[:top]
        ],
    }
