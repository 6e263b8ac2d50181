"""One worker of `xla_opinfo`: checks cells (an op and a dtype) that it reads as JSON lines, and writes a row
for each.

>>> check_cell("add", "", "float32", samples=2)["status"]
'pass'
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from dynamotor.xla import metrics

# (relative, absolute)
TOLERANCE = {
    "float32": (1e-4, 1e-5),
    "float64": (1e-7, 1e-7),
    "bfloat16": (1.6e-2, 1e-2),
    "float16": (1e-2, 1e-3),
    "complex64": (1e-4, 1e-5),
}
SHAPE_ONLY = re.compile(
    r"(empty|bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|rand|uniform|dropout|rrelu|resize_"
    r"|svd_lowrank|pca_lowrank|new_empty|scaled_dot_product_attention_dropout)"
)


def check_cell(name: str, variant: str, dtype: str, samples: int) -> dict[str, Any]:
    """Run one cell: {"status": "pass" | "wrong" | "error", "fell_back": [...], "reason": ...}."""
    info = next(o for o in op_db if o.name == name and o.variant_test_name == variant)
    kind = getattr(torch, dtype)
    gradient = kind in info.dtypes and kind.is_floating_point and info.supports_autograd
    metrics.clear()
    row: dict[str, Any] = {
        "op": name + (f".{variant}" if variant else ""),
        "dtype": dtype,
        "status": "pass",
        "samples": 0,
    }
    torch.manual_seed(0)
    for index, sample in enumerate(info.sample_inputs("cpu", kind, requires_grad=gradient)):
        if index >= samples:
            break
        try:
            expected = run_sample(info, sample, "cpu", gradient)
        except Exception:  # noqa: BLE001 - a sample that the CPU refuses says nothing
            continue
        row["samples"] += 1
        try:
            compare(
                run_sample(info, sample, "xla", gradient), expected, shape_only=bool(SHAPE_ONLY.search(name))
            )
        except AssertionError as error:
            row.update(status="wrong", reason=f"sample {index}: {str(error)[:300]}")
            break
        except Exception as error:  # noqa: BLE001 - reported
            row.update(status="error", reason=f"sample {index}: {type(error).__name__}: {str(error)[:300]}")
            break
    row["fell_back"] = sorted(
        n.removeprefix("aten::") for n in metrics.all_counters() if n.startswith("aten::")
    )
    return row


def run_sample(info: Any, sample: Any, device: str, gradient: bool) -> tuple[list[Any], list[Any]]:
    """(results, gradients) of one sample on a device, as CPU values."""

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().clone() if device == "cpu" else value.detach().to(device)
            return moved.requires_grad_(value.requires_grad)
        return torch.device(device) if isinstance(value, torch.device) or value == "cpu" else value

    moved = tree_map(place, (sample.input, sample.args, sample.kwargs))
    result = info(moved[0], *moved[1], **moved[2])
    if sample.output_process_fn_grad is not None and gradient:
        result = sample.output_process_fn_grad(result)
    outputs = tree_leaves(result)
    grads: list[Any] = []
    if gradient:
        wanting = [
            t for t in tree_leaves(moved) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
        ]
        graded = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if wanting and graded:
            weights = [torch.ones_like(t) for t in graded]
            grads = list(torch.autograd.grad(graded, wanting, weights, allow_unused=True))
    host = lambda v: v.detach().cpu() if isinstance(v, torch.Tensor) else v  # noqa: E731
    return [host(v) for v in outputs], [host(v) for v in grads]


def compare(mine: tuple, expected: tuple, shape_only: bool) -> None:
    """AssertionError where results or gradients differ."""
    for what, left, right in (("result", mine[0], expected[0]), ("gradient", mine[1], expected[1])):
        assert len(left) == len(right), f"{len(left)} {what}s, the CPU gives {len(right)}"
        for index, (a, b) in enumerate(zip(left, right)):
            if not isinstance(b, torch.Tensor):
                assert (
                    shape_only
                    or a == b
                    or (a != a and b != b)
                    or (isinstance(b, float) and abs(a - b) <= 1e-4 * abs(b))
                ), f"{what} {index}: {a} is not {b}"
                continue
            assert a.shape == b.shape and a.dtype == b.dtype, (
                f"{what} {index}: {a.dtype}{list(a.shape)}, the CPU gives {b.dtype}{list(b.shape)}"
            )
            if not shape_only:
                relative, absolute = TOLERANCE.get(str(b.dtype).removeprefix("torch."), (0, 0))
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=relative,
                    atol=absolute,
                    equal_nan=True,
                    check_stride=False,
                    msg=lambda text, what=what, index=index: f"{what} {index}: {text}",
                )


def work(samples: int) -> None:
    """A worker: reads cells from stdin as JSON lines, writes a row for each."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        cell = json.loads(line)
        print(json.dumps({"start": cell}), flush=True)
        print(json.dumps({"row": check_cell(*cell, samples)}), flush=True)


if __name__ == "__main__":
    work(int(sys.argv[1]))
