"""Twelve kernels of BERT and ResNet: eager, torch.compile and ours side by side, calls interleaved, medians.

python -m bench.kernels --threads 2 --json kernels.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dynamotor import api
from dynamotor.base.config import config

Case = tuple[Callable[..., Any], list[Tensor]]


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, -1)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def add_layer_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + y, (x.shape[-1],), weight, bias)


def embedding_layer_norm(
    index: Tensor, table: Tensor, position: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    return F.layer_norm(table[index] + position, (table.shape[-1],), weight, bias)


def softmax_backward(g: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(g, y, -1, torch.float32) * 0.125


def gelu_backward(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(g, x)


def layer_norm_backward(g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    weighted = g * weight
    dx = weighted - weighted.mean(-1, True) - normal * (weighted * normal).mean(-1, True)
    return dx, (g * normal).sum(0), g.sum(0)


def bias_gradient(g: Tensor) -> Tensor:
    return g.sum(0)


def _batch_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    scale = torch.rsqrt(var + 1e-5) * weight
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


def batch_norm_relu(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(_batch_norm(x, mean, var, weight, bias))


def batch_norm_add_relu(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, other: Tensor
) -> Tensor:
    return F.relu(_batch_norm(x, mean, var, weight, bias) + other)


def transpose_add(x: Tensor, y: Tensor) -> Tensor:
    return x.view(512, 12, 64).transpose(0, 1).contiguous() + y


def cases(seed: int = 0) -> dict[str, Case]:
    """The functions with their inputs, sizes of BERT-base at 512 tokens and of a ResNet's first stage at
    batch 8.
    """
    g = torch.Generator().manual_seed(seed)

    def r(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    image, channels = r(8, 64, 56, 56), [r(64), r(64).abs(), r(64), r(64)]
    return {
        "softmax": (softmax, [r(12, 512, 512), r(512)]),
        "gelu": (gelu, [r(512, 3072)]),
        "gelu_tanh": (gelu_tanh, [r(512, 3072)]),
        "add_layer_norm": (add_layer_norm, [r(512, 768), r(512, 768), r(768), r(768)]),
        "embedding_layer_norm": (
            embedding_layer_norm,
            [torch.randint(0, 1000, (512,), generator=g), r(1000, 768), r(512, 768), r(768), r(768)],
        ),
        "softmax_backward": (softmax_backward, [r(12, 512, 512), torch.softmax(r(12, 512, 512), -1)]),
        "gelu_backward": (gelu_backward, [r(512, 3072), r(512, 3072)]),
        "layer_norm_backward": (layer_norm_backward, [r(512, 768), r(512, 768), r(768)]),
        "bias_gradient": (bias_gradient, [r(512, 3072)]),
        "batch_norm_relu": (batch_norm_relu, [image, *channels]),
        "batch_norm_add_relu": (batch_norm_add_relu, [image, *channels, r(8, 64, 56, 56)]),
        "transpose_add": (transpose_add, [r(512, 768), r(12, 512, 64)]),
    }


def once(fn: Callable[[], Any], calls: int = 5) -> float:
    """Microseconds of the fastest of a few calls in a row."""
    best = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def error(got: Any, want: Any) -> float:
    """Largest difference over the largest value."""
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    return max(((a - b).abs().max() / (b.abs().max() + 1e-9)).item() for a, b in pairs)


def run(compilers: list[str], rounds: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Medians in microseconds by case and compiler, with ours' error under "error"."""
    makers: dict[str, Callable[[Any], Any]] = {
        "eager": lambda fn: fn,
        "inductor": lambda fn: torch.compile(fn, dynamic=False),
        "dynamotor": lambda fn: api.compile(fn, fullgraph=True),
    }
    table: dict[str, dict[str, float]] = {}
    runs: dict[tuple[str, str], tuple[Callable[[], Any], list[float]]] = {}
    with torch.no_grad():
        for name, (fn, inputs) in cases(seed).items():
            want = fn(*inputs)
            for compiler in compilers:
                compiled = makers[compiler](fn)
                got = compiled(*inputs)
                runs[name, compiler] = (lambda c=compiled, i=inputs: c(*i)), []
                if compiler == "dynamotor":
                    table[name] = {"error": error(got, want)}
        for _ in range(rounds):
            for call, times in runs.values():
                times.append(once(call))
    for (name, compiler), (_, times) in runs.items():
        table.setdefault(name, {})[compiler] = statistics.median(times)
    return table


def report(table: dict[str, dict[str, float]], compilers: list[str]) -> str:
    """The table as text, with sums and ours against the others."""
    lines = [f"{'microseconds':22s}" + "".join(f"{c:>11s}" for c in compilers) + f"{'error':>10s}"]
    sums = {c: sum(row[c] for row in table.values()) for c in compilers}
    for name, row in table.items():
        lines.append(
            f"{name:22s}" + "".join(f"{row[c]:11.0f}" for c in compilers) + f"{row.get('error', 0):10.1e}"
        )
    lines.append(f"{'sum':22s}" + "".join(f"{sums[c]:11.0f}" for c in compilers))
    if "dynamotor" in sums:
        lines += [
            f"dynamotor / {c}: {sums['dynamotor'] / sums[c]:.2f}" for c in compilers if c != "dynamotor"
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--compilers", default="eager,inductor,dynamotor")
    parser.add_argument("--json", help="write the table to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    compilers = options.compilers.split(",")
    with config.patch(strict=True):
        table = run(compilers, options.rounds)
    print(report(table, compilers))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"threads": options.threads, "microseconds": table}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
