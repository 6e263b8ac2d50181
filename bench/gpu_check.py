"""Are kernels and models right on this machine's GPU? Writes JSON as it goes; tools/gpu_bench measures how
fast they are.

python -m bench.gpu_check --json gpu.json --sections kernels,dropout,graphs,templates,masks,sizes,models

Each section survives the failure of its rows; a row that failed says why.
"""

from __future__ import annotations

import argparse
import copy
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bench.tool import write_json
from dynamotor.api import compile as compile_, reset
from dynamotor.base.config import config
from dynamotor.base.events import counters, phase_seconds

from . import gpu_graph_checks, gpu_mask_checks, gpu_size_checks, gpu_template_checks, models
from .numerics import Errors, largest_error

SMALL_MODELS = (
    "BertForMaskedLM",
    "GPT2LMHeadModel",
    "resnet18",
    "vit_base_patch16_224",
    "T5ForConditionalGeneration",
    "LlamaForCausalLM",
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "mobilenetv3_large_100",
)
LARGE = ("swin_base_patch4_window7_224", "resnet50", "GPT2LMHeadModel", "BertForMaskedLM")


def gradients(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A function's results, and the gradients of its sum for each floating-point input."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out = call(*leaves)
    return out, *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], torch.ones_like(out))


def cases(device: str) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Functions of every kernel kind, with inputs."""
    f32, bf16 = torch.float32, torch.bfloat16
    huge = (1 << 31) + 4096 if device == "cuda" else 4096

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    index = torch.randint(0, 300, (4, 50), device=device)
    return {
        "map": (lambda x, y: torch.tanh(x) * y + torch.sigmoid(x), [randn(513, 770), randn(770)]),
        "map bf16": (lambda x, y: F.gelu(x) + y, [randn(512, 768, dtype=bf16), randn(768, dtype=bf16)]),
        "unaligned": (lambda x: x * 2 + 1, [randn(100001)[1:]]),
        "transpose": (lambda x: x.transpose(1, 2).contiguous() + 1, [randn(8, 300, 130)]),
        "functions": (
            lambda x: (
                x.exp(),
                x.abs().log1p(),
                x.sin(),
                x.erf(),
                x.abs().sqrt(),
                x.atan(),
                x.round(),
                x.floor(),
                torch.pow(x.abs(), 1.7),
                torch.expm1(x),
                torch.rsqrt(x.abs() + 1),
            ),
            [randn(3000)],
        ),
        "integers": (lambda i: (i // 7, i % -5, i * 3 - 1, (i > 50) & (i < 90), i.clamp(3, 100)), [index]),
        "float64": (lambda x: (x.double().exp() * 0.1 + 2.0, x.double().sum()), [randn(1000)]),
        "row sums": (lambda x: (x.sum(1), x.amax(1), x.mean(1), x.var(1), x.argmax(1)), [randn(300, 1000)]),
        "long rows": (lambda x: (x.sum(1), torch.softmax(x, 1), x.argmax(1)), [randn(20, 50257)]),
        "column sums": (lambda x: (x.sum(0), x.amax(0), x.mean(0)), [randn(20000, 96)]),
        "total": (lambda x: (x.sum(), (x * x).mean(), x.amax()), [randn(3000, 1001)]),
        "softmax": (lambda x: torch.softmax(x * 0.125, -1), [randn(12, 128, 128, dtype=bf16)]),
        "layer norm": (
            lambda x, w, b: F.layer_norm(x, (768,), w, b),
            [randn(500, 768), randn(768), randn(768)],
        ),
        "gradients of layer norm": (
            lambda x, w, b: F.layer_norm(x, (768,), w, b) * x,
            [randn(1000, 768), randn(768), randn(768)],
        ),
        "gradients of cross entropy": (
            lambda x, t: F.cross_entropy(x * 2, t),
            [randn(200, 1000), torch.randint(0, 1000, (200,), device=device)],
        ),
        "gradients of convolution": (
            lambda x, w: F.relu(F.conv2d(x, w, padding=1)).square(),
            [randn(4, 16, 20, 20), randn(32, 16, 3, 3)],
        ),
        "gradients of attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
            [randn(2, 4, 64, 32, dtype=bf16) for _ in range(3)],
        ),
        "group norm": (
            lambda x, w, b: F.group_norm(x, 8, w, b),
            [randn(4, 64, 14, 14), randn(64), randn(64)],
        ),
        "batch norm": (
            lambda x, m, v: F.batch_norm(x, m, v, training=False),
            [randn(4, 64, 9, 9), randn(64), randn(64).abs()],
        ),
        "cross entropy": (
            lambda x, t: F.cross_entropy(x, t),
            [randn(200, 1000), torch.randint(0, 1000, (200,), device=device)],
        ),
        "embedding": (lambda i, w: F.embedding(i, w) * 2, [index, randn(300, 64)]),
        "gather": (lambda x, i: x.gather(1, i[:, :20] % 30), [randn(4, 30), index]),
        "padding": (lambda x: F.pad(x, (1, 2, 3, 4)) + 1, [randn(5, 60, 70)]),
        "products": (
            lambda x, w, b: F.relu(F.linear(x, w, b)) @ w,
            [randn(64, 32), randn(48, 32), randn(48)],
        ),
        "attention": (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
            [randn(2, 4, 64, 32, dtype=bf16) for _ in range(3)],
        ),
        "convolution": (
            lambda x, w: F.relu(F.conv2d(x, w, padding=1)),
            [randn(4, 16, 20, 20), randn(32, 16, 3, 3)],
        ),
        "exotic": (lambda x: (x.cumsum(1), x.sort(1)[0], torch.topk(x, 5).values), [randn(30, 40)]),
        "flat float16": (lambda x: (x.half() * 3).float() + x, [randn(5000)]),
        "large": (lambda x: x + 1, [torch.zeros(huge, dtype=torch.int8, device=device)]),
        "f32 copy": (lambda x: x.to(bf16).to(f32), [randn(777)]),
    }


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    return [value] if isinstance(value, torch.Tensor) else [t for t in value if isinstance(t, torch.Tensor)]


def row(label: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A section's row; the exception if it raised one."""
    counters.clear()
    start = time.perf_counter()
    try:
        result = work()
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        result = {"error": f"{type(error).__name__}: {str(error)[:1500]}", "trace": lines[-12:]}
    fallbacks = dict(counters["fallback"])
    print(
        f"  {label}: {result.get('error', result.get('ok', ''))} {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    return {
        **result,
        "seconds": round(time.perf_counter() - start, 2),
        **({"fallbacks": fallbacks} if fallbacks else {}),
    }


def check_kernels(device: str) -> dict[str, Any]:
    """Functions against eager: the largest relative error."""

    def one(name: str, fn: Callable[..., Any], inputs: list[torch.Tensor]) -> dict[str, Any]:
        run = gradients if name.startswith("gradients") else lambda call, given: call(*given)
        want, got = flat(run(fn, inputs)), flat(run(compile_(fn), inputs))
        error = largest_error(got, want)
        same = all(
            a.dtype == b.dtype and a.device == b.device and a.stride() == b.stride()
            for a, b in zip(got, want)
        )
        half = "float16" in name or any(t.dtype in (torch.bfloat16, torch.float16) for t in (*inputs, *want))
        return {"error_out": error, "ok": error < (2e-2 if half else 1e-4) and same, "metadata": same}

    return {name: row(name, lambda: one(name, fn, inputs)) for name, (fn, inputs) in cases(device).items()}  # noqa: B023


def check_dropout(device: str) -> dict[str, Any]:
    """Dropout keeps the expected share, the same elements in the backward, and `manual_seed` repeats it."""
    x = torch.ones(512, 1000, device=device, requires_grad=True)
    fn = compile_(lambda x: F.dropout(x, 0.25) * 2)
    torch.manual_seed(7)
    first = fn(x)
    first.sum().backward()
    torch.manual_seed(7)
    again = fn(x)
    kept = (first != 0).float().mean().item()
    ok = torch.equal(first, again) and torch.equal(first.detach(), x.grad) and abs(kept - 0.75) < 0.01
    return {"kept": kept, "ok": ok and not torch.equal(fn(x), first)}


def check_model(name: str, train: bool, amp: bool, device: str, batch: int | None = None) -> dict[str, Any]:
    """A model, reduced unless a batch is given, against eager in float64 (float32 where it cannot run in
    float64), beside eager's own error.
    """
    case = models.load(name, small=batch is None, batch=batch, dropout=False)
    start = case.model.to(device).train(train)
    given = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(device), case.make_inputs(train=train)
    )

    def step(model: torch.nn.Module, call: Callable[..., Any], exact: bool = False) -> list[torch.Tensor]:
        wide = (lambda t: t.double() if t.is_floating_point() else t) if exact else lambda t: t
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, wide, given)
        with (
            torch.set_grad_enabled(train),
            torch.autocast(device, torch.bfloat16, enabled=amp and model is not reference),
        ):
            out = call(*args, **kwargs)
            loss = case.loss(out) if train else None
        if loss is not None:
            loss.backward()
        return models.output_tensors(out)

    reference = copy.deepcopy(start).double()
    try:
        wanted, precision = step(reference, reference, exact=True), "float64"
    except RuntimeError:  # a kernel or a constant of the model that float64 does not have
        reference = copy.deepcopy(start)
        wanted, precision = step(reference, reference), "float32"
    plain, ours = copy.deepcopy(start), copy.deepcopy(start)
    try:
        outputs = step(plain, plain)
    except RuntimeError as error:
        return {"ok": True, "eager": f"does not run: {error}"}
    eagers = Errors.of(outputs, wanted, plain if train else None, reference)
    errors = Errors.of(step(ours, compile_(ours)), wanted, ours if train else None, reference)
    fine = errors.fine(eagers, 5e-2 if amp else 1e-3)
    return {
        "error_out": errors.out,
        "error_grad": errors.grad,
        "eager_out": eagers.out,
        "eager_grad": eagers.grad,
        "reference": precision,
        "ok": fine,
        "graphs": counters["capture"]["graphs"],
        "breaks": sum(counters["breaks"].values()),
    }


def check_models(
    device: str, names: Sequence[str], deadline: float, batch: int | None = None
) -> dict[str, Any]:
    """Models, inference and training, in float32 and under bfloat16 autocast."""
    found = {}
    for train, amp in ((True, True), (False, False), (True, False)):
        for name in names:
            label = f"{name} {'train' if train else 'infer'}{' amp' if amp else ''}"
            if time.monotonic() > deadline:
                print(f"  {label}: not run for want of time")
                continue
            found[label] = row(label, lambda: check_model(name, train, amp, device, batch))  # noqa: B023
            reset()
    return found


def check_large(device: str) -> dict[str, Any]:
    """Models as large as they are: decisions by size show there alone. What falls back
    is an error.
    """
    found = {}
    with config.patch(strict=True):
        for name in LARGE:
            found[name] = row(name, lambda: check_model(name, False, False, device, batch=8))  # noqa: B023
            reset()  # or the models before stay in the GPU's memory
    return found


def check_graphs(device: str) -> dict[str, Any]:
    """CUDA graphs: actions of a user around replays."""
    return {name: row(name, lambda: one(device)) for name, one in gpu_graph_checks.CHECKS.items()}  # noqa: B023


def main() -> int:
    """Run the sections; 0 when every checked row is right."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--sections", default="kernels,dropout,graphs,templates,masks,sizes,large,models")
    parser.add_argument("--strict", action="store_true", help="raise instead of falling back")
    parser.add_argument("--models", default=",".join(SMALL_MODELS), help="'all': every one of models.txt")
    parser.add_argument(
        "--batch", type=int, help="models as large as they are, with so many samples, instead of reduced ones"
    )
    parser.add_argument(
        "--part", default="1/1", help="of these: '2/8' takes the second of eight, for processes side by side"
    )
    parser.add_argument(
        "--budget", type=float, default=400.0, help="seconds after which no further model is started"
    )
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    part, parts = (int(n) for n in args.part.split("/"))
    names = (models.names() if args.models == "all" else args.models.split(","))[part - 1 :: parts]
    device, deadline = args.device, time.monotonic() + args.budget
    if device == "cuda" and not torch.cuda.is_available():
        print("no GPU in this machine: nothing is checked")
        return 0
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": lambda: check_kernels(device),
        "dropout": lambda: {"dropout": row("dropout", lambda: check_dropout(device))},
        "models": lambda: check_models(device, names, deadline, args.batch),
        "graphs": lambda: check_graphs(device),
        "large": lambda: check_large(device),
        "templates": lambda: {name: row(name, work) for name, work in gpu_template_checks.rows(device)},
        "masks": lambda: {name: row(name, work) for name, work in gpu_mask_checks.rows(device)},
        "sizes": lambda: {name: row(name, work) for name, work in gpu_size_checks.rows(device)},
    }
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }
    wrong = 0
    exact = torch.backends.cudnn.flags(
        enabled=True, allow_tf32=False
    )  # or float32 convolutions err by more than is looked for
    with config.patch(strict=args.strict), exact:
        for name in args.sections.split(","):
            report[name] = sections[name]()
            report["phase seconds"] = dict(phase_seconds)
            write_json(args.json, report, default=str)
            for label, found in report[name].items():
                if isinstance(found, dict):
                    wrong += "error" in found or not found.get("ok", True)
                    trace = "".join(f"\n      {line}" for line in found.pop("trace", []))
                    print(f"{name}: {label}: {found}{trace}", flush=True)
    print(f"{wrong} rows are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
