"""`python -m bench quantised`: models with weights of quantisation libraries (torchao, quanto, HQQ, bitsandbytes, as
far as they are installed): eager, `torch.compile` and ours in turns, graphs of both captures, and the calls that
ours leaves to aten.

Each scheme runs in a process of its own. The libraries are no requirement of the project:

    pip install --no-deps torchao optimum-quanto hqq termcolor bitsandbytes
    python -m bench quantised --json docs/results/cpu-quantised.json
    python -m bench quantised --schemes "torchao int8" --small
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynamotor
from bench import torchvision_stub
from bench.tool import read_json, write_json
from bench.turns import turns
from dynamotor import counters
from dynamotor.tools.tables import render

COLUMNS = (
    "scheme", "rows", "error", "graphs", "torch.compile's", "left to aten", "eager ms", "torch.compile ms", "ours ms",
    "eager / ours", "torch.compile / ours",
)  # fmt: skip
Quantise = Callable[[nn.Module], nn.Module]
SCHEMES: dict[str, tuple[Quantise, torch.dtype, bool]] = {}  # with the type of activations, whether it trains


def scheme(
    name: str, dtype: torch.dtype = torch.bfloat16, trains: bool = False
) -> Callable[[Quantise], Quantise]:
    """Register a scheme under `library: scheme`."""

    def register(quantise: Quantise) -> Quantise:
        SCHEMES[name] = (quantise, dtype, trains)
        return quantise

    return register


class Block(nn.Module):
    """The feed-forward half of a decoder's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] to the same."""
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The model with other modules for its linear ones."""
    for block in model.children():
        for name in ("up", "gate", "down"):
            setattr(block, name, make(getattr(block, name)))
    return model


@scheme("none: float32", torch.float32)
@scheme("none: bfloat16")
def nothing(model: nn.Module) -> nn.Module:
    """The weights as they are: what quantised ones compare with."""
    return model


@scheme("torchao: int8 weights")
def torchao_int8(model: nn.Module) -> nn.Module:
    return _torchao(model, lambda q: q.Int8WeightOnlyConfig())


@scheme("torchao: int8 weights and activations")
def torchao_int8_dynamic(model: nn.Module) -> nn.Module:
    return _torchao(model, lambda q: q.Int8DynamicActivationInt8WeightConfig())


@scheme("torchao: int4 weights, groups of 32")
def torchao_int4(model: nn.Module) -> nn.Module:
    from torchao.quantization.granularity import PerGroup

    return _torchao(model, lambda q: q.IntxWeightOnlyConfig(torch.int4, PerGroup(32)))


@scheme("torchao: int4 weights, int8 activations", torch.float32)
def torchao_int4_dynamic(model: nn.Module) -> nn.Module:
    return _torchao(model, lambda q: q.Int8DynamicActivationIntxWeightConfig(torch.int4))


@scheme("torchao: float8 weights")
def torchao_float8(model: nn.Module) -> nn.Module:
    return _torchao(model, lambda q: q.Float8WeightOnlyConfig())


@scheme("torchao: training for int4 weights and int8 activations", torch.float32, trains=True)
def torchao_training(model: nn.Module) -> nn.Module:
    from torchao.quantization.qat import QATConfig

    config = lambda q: QATConfig(q.Int8DynamicActivationIntxWeightConfig(torch.int4), step="prepare")  # noqa: E731
    return _torchao(model.train(), config)


@scheme("quanto: int8 weights", torch.float32)
def quanto_int8(model: nn.Module) -> nn.Module:
    return _quanto(model, "qint8")


@scheme("quanto: int4 weights", torch.float32)
def quanto_int4(model: nn.Module) -> nn.Module:
    return _quanto(model, "qint4")


@scheme("quanto: int8 weights and activations", torch.float32)
def quanto_activations(model: nn.Module) -> nn.Module:
    from optimum import quanto

    width = model[0].norm.normalized_shape[0]  # type: ignore[index, union-attr]
    quanto.quantize(model, weights=quanto.qint8, activations=quanto.qint8)
    with quanto.Calibration():
        model(torch.randn(8, width))
    quanto.freeze(model)
    return model


@scheme("HQQ: int4 weights", torch.float32)
def hqq(model: nn.Module) -> nn.Module:
    from hqq.core.quantize import BaseQuantizeConfig, HQQBackend, HQQLinear

    HQQLinear.set_backend(HQQBackend.PYTORCH)
    how = BaseQuantizeConfig(nbits=4, group_size=64)
    return replaced(model, lambda x: HQQLinear(x, how, compute_dtype=torch.float32, device="cpu"))


@scheme("bitsandbytes: int8", torch.float32)
def bitsandbytes_int8(model: nn.Module) -> nn.Module:
    import bitsandbytes

    def make(old: nn.Linear) -> nn.Module:
        sizes = old.in_features, old.out_features, old.bias is not None
        new = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        new.load_state_dict(old.state_dict())
        return new

    return replaced(model, make).to("cpu")


@scheme("bitsandbytes: nf4", torch.float32)
def bitsandbytes_nf4(model: nn.Module) -> nn.Module:
    import bitsandbytes

    def make(old: nn.Linear) -> nn.Module:
        sizes = old.in_features, old.out_features, old.bias is not None
        new = bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        new.load_state_dict(old.state_dict())
        return new

    return replaced(model, make).to("cpu")


def _torchao(model: nn.Module, config: Callable[[Any], Any]) -> nn.Module:
    from torchao import quantization

    quantization.quantize_(model, config(quantization))
    return model


def _quanto(model: nn.Module, weights: str) -> nn.Module:
    from optimum import quanto

    quanto.quantize(model, weights=getattr(quanto, weights))
    quanto.freeze(model)
    return model


class GraphCounter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        """One more."""
        self.graphs += 1
        return gm.forward


def step(call: Callable[..., Any], model: nn.Module, x: torch.Tensor, trains: bool) -> list[torch.Tensor]:
    """The result, and the gradients of a step that trains."""
    if not trains:
        with torch.no_grad():
            return [call(x)]
    result = call(x)
    return [result, *torch.autograd.grad(result.square().mean(), list(model.parameters()))]


def measure(name: str, n_rows: int, width: int, seconds: float) -> dict[str, Any]:
    """The row of a scheme; `missing` where the library is not there, or cannot do it on this machine."""
    quantise, dtype, trains = SCHEMES[name]
    torch.manual_seed(0)
    torchvision_stub.prepare()
    try:
        model = quantise(nn.Sequential(Block(width), Block(width)).to(dtype).eval())
    except (ImportError, AssertionError, NotImplementedError) as error:
        return {"scheme": name, "missing": f"{type(error).__name__}: {error}"[:200]}
    x = torch.randn(n_rows, width).to(dtype)
    wanted = step(model, model, x, trains)
    theirs, ours = GraphCounter(), GraphCounter()
    step(torch.compile(model, backend=theirs), model, x, trains)
    step(dynamotor.compile(model, backend=ours), model, x, trains)
    torch._dynamo.reset()
    dynamotor.reset()
    counters.clear()
    ways = {"eager": model, "torch.compile": torch.compile(model), "ours": dynamotor.compile(model)}
    found = step(ways["ours"], model, x, trains)
    left = {op: n for op, n in counters["fallback"].items() if n}
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(wanted, found, strict=True))
    calls = {way: (lambda call=call: step(call, model, x, trains)) for way, call in ways.items()}
    rounds = turns(calls, seconds=seconds, finish=lambda: None)
    return {
        "scheme": name,
        "rows": n_rows,
        "error": error,
        "graphs": ours.graphs,
        "torch.compile's": theirs.graphs,
        "left": left,
        "ms": {way: 1e3 * statistics.median(one[way] for one in rounds) for way in ways},
        "ratio": {
            way: quartiles([one[way] / one["ours"] for one in rounds]) for way in ways if way != "ours"
        },
    }


def quartiles(values: list[float]) -> list[float]:
    """Median between the quartiles."""
    return [round(q, 3) for q in statistics.quantiles(values, n=4)]


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "missing" in row:
        return [row["scheme"], *["-"] * (len(COLUMNS) - 2), row["missing"][:60]]
    left = ", ".join(f"{n} {op}" for op, n in row["left"].items())
    ratio = [f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in row["ratio"].values()]
    counts = [str(row[key]) for key in ("graphs", "torch.compile's")]
    times = [f"{ms:.3f}" for ms in row["ms"].values()]
    return [row["scheme"], str(row["rows"]), f"{row['error']:.0e}", *counts, left or "-", *times, *ratio]


def section(figures: dict[str, Any]) -> list[str]:
    """The part of docs/libraries.md about them."""
    lines = [
        "## Quantised weights",
        "",
        f"Two feed-forward blocks of width {figures['width']:,} on a CPU ({figures['threads']} threads, torch {figures['torch']}), "
        "activations of one row and of sixteen: error beside eager, graphs beside `torch.compile`'s, aten calls left,",
        "milliseconds, and times as fast with the quartiles of the turns (`python -m bench quantised`).",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    return [*lines, *(f"| {' | '.join(cells(row))} |" for row in figures["rows"])]


def main(argv: list[str] | None = None) -> None:
    """Measure the schemes, each in a process; print the table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench quantised",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schemes", default="", help="those whose name begins so")
    parser.add_argument("--rows", default="1,16", help="of activations")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=4.0, help="of the turns of a row")
    parser.add_argument("--small", action="store_true", help="narrow, one short row")
    parser.add_argument("--json", help="file for the figures; rows that it has are replaced")
    parser.add_argument("--one", nargs=2, metavar=("SCHEME", "ROWS"), help="this row alone, as JSON")
    given = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    width, seconds = (64, 0.1) if given.small else (given.width, given.seconds)
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]), width, seconds)))
        return
    known = {(row["scheme"], row.get("rows")): row for row in read_json(given.json).get("rows", [])}
    command = [sys.executable, "-m", "bench.quantised", *([] if not given.small else ["--small"])]
    command += ["--width", str(width), "--seconds", str(seconds)]
    for name in [name for name in SCHEMES if name.startswith(given.schemes)]:
        for n_rows in [1] if given.small else [int(n) for n in given.rows.split(",")]:
            root = Path(__file__).parents[1]
            done = subprocess.run(
                [*command, "--one", name, str(n_rows)], cwd=root, capture_output=True, text=True, check=False
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            row = json.loads(lines[-1]) if lines else {"scheme": name, "missing": done.stderr[-300:]}
            known[name, row.get("rows")] = row
            print("  ".join(cells(row)), flush=True)
            facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "width": width}
            write_json(given.json, {**facts, "rows": list(known.values())})
    print(render([cells(row) for row in known.values()], COLUMNS))


if __name__ == "__main__":
    main()
