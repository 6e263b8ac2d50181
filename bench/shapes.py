"""`python -m dynamotor bench --shapes`: loops whose sizes change from call to call, beside eager and torch.compile in one run.

Each (case, compiler) has a process and caches of its own. The loop runs in eager, then compiled from nothing, each step's
results compared; `beyond` is what compiling cost beyond eager's time. Then the loop runs again and again, in turns with eager:
`again` is eager's time over the compiled one's. For our compiler, `of special` is the speed at a few of the sizes beside graphs
that are compiled for each alone (`dynamic=False`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamotor.api import compile as compile_
from dynamotor.base.events import counters
from dynamotor.tools import torchvision_stub
from dynamotor.tools.measure import turns

TOLERANCE = 2e-3  # of the largest element; sums in other orders
SPECIALS = 3  # sizes that are compared with graphs of their own
COLUMNS = ("case", "compiler", "calls", "eager s", "loop s", "beyond s", "compiles", "again", "of special", "error")
BARS = {"bert-infer": 12, "bert-train": 12, "decode-gpt2": 12, "decode-llama": 12, "resnet": 8, "last-batch": 8, "function": 8}


@dataclass
class Case:
    """What is compiled, and a loop over it: `steps(call)` gives the results of one call after another, the same at each run.

    single(n)(call) makes the call with the n-th sizes alone; count: how many there are.
    """

    model: Any
    steps: Callable[[Any], Iterable[torch.Tensor]]
    single: Callable[[int], Callable[[Any], torch.Tensor]] | None = None
    count: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench --shapes`."""
    parser.add_argument("--shapes", action="store_true", help="loops whose sizes change from call to call")
    parser.add_argument("--cases", default="", help=f"with --shapes: of {', '.join(CASES)}, comma-separated (default: all)")


# The cases ---------------------------------------------------------------------------------------------------------------
def _bert(train: bool) -> Case:
    transformers = _transformers()
    config = transformers.BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, pick = transformers.BertForMaskedLM(config).train(train), random.Random(0)
    sizes = [(pick.randint(2, 12), pick.randint(8, 64)) for _ in range(20 if train else 40)]
    batches = [torch.randint(0, 1000, size) for size in sizes]
    return _batches(model, batches, train, lambda call, ids: call(input_ids=ids).logits)


def _batches(model: nn.Module, batches: Sequence[torch.Tensor], train: bool, forward: Callable[[Any, Any], torch.Tensor]) -> Case:
    """A model over batches: its results, in training all gradients' sums."""
    def one(call: Any, batch: torch.Tensor) -> torch.Tensor:
        if not train:
            with torch.no_grad():
                return forward(call, batch)
        loss = forward(call, batch).float().square().mean()
        loss.backward()
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
        return torch.cat([norms, loss.detach()[None]])

    def single(n: int) -> Callable[[Any], torch.Tensor]:
        return lambda call: one(call, batches[n])

    return Case(model, lambda call: (one(call, batch) for batch in batches), single, len(batches))


def _decode(config: Any, prompts: Sequence[int] = (5, 9, 14), tokens: int = 24) -> Case:
    """Greedy decoding with a cache that grows by a token at each step."""
    transformers = _transformers()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    texts = [torch.randint(0, config.vocab_size, (1, n)) for n in prompts]

    def steps(call: Any) -> Iterable[torch.Tensor]:
        for ids in texts:
            cache = transformers.DynamicCache(config=config)
            for _ in range(tokens):
                with torch.no_grad():
                    out = call(input_ids=ids, past_key_values=cache, use_cache=True)
                yield out.logits
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)

    return Case(model, steps)


def _gpt2() -> Case:
    return _decode(_transformers().GPT2Config(vocab_size=1000, n_embd=128, n_layer=2, n_head=4, n_positions=128))


def _llama() -> Case:
    return _decode(_transformers().LlamaConfig(vocab_size=1000, hidden_size=128, intermediate_size=344, num_hidden_layers=2,
                                               num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128))


class _Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_b(self.b(self.norm_a(self.a(x)).relu()))
        return (y + self.short(x)).relu()


def _residual_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1), _Block(16, 16, 1),
                         _Block(16, 32, 2), _Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))


def _resnet() -> Case:
    images = [torch.randn(4, 3, n, n + 16 * (k % 3)) for k, n in enumerate(range(64, 160, 8))]
    return _batches(_residual_network().eval(), images, False, lambda call, x: call(x))


def _last_batch() -> Case:
    """Three epochs of full batches, each with a smaller last one."""
    images = [torch.randn(n, 3, 48, 48) for n in (16, 16, 16, 16, 7) * 3]
    return _batches(_residual_network().train(), images, True, lambda call, x: call(x))


def _function() -> Case:
    def attention(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.transpose(-1, -2)) / 8 + torch.arange(x.shape[1])
        return torch.nn.functional.gelu(scores.softmax(-1) @ x).mean(1)

    given = [torch.randn(4, n, 64) for n in range(10, 70)]
    return Case(attention, lambda call: (call(x) for x in given), lambda n: lambda call: call(given[n]), len(given))


def _transformers() -> Any:
    torchvision_stub.prepare()
    import transformers

    return transformers


CASES: dict[str, Callable[[], Case]] = {
    "bert-infer": lambda: _bert(False),
    "bert-train": lambda: _bert(True),
    "decode-gpt2": _gpt2,
    "decode-llama": _llama,
    "resnet": _resnet,
    "last-batch": _last_batch,
    "function": _function,
}


# One measurement, in a process of its own --------------------------------------------------------------------------------
def measured(name: str, compiler: str, seconds: float) -> dict[str, Any]:
    """The row of a case and a compiler ("ours" or "torch.compile")."""
    torch.manual_seed(0)
    case = CASES[name]()
    wanted = _copies(case.steps(case.model))  # warms eager up
    start = time.perf_counter()
    for _ in case.steps(case.model):
        pass
    eager_s = time.perf_counter() - start
    call = compile_(case.model) if compiler == "ours" else torch.compile(case.model)
    start = time.perf_counter()
    got = _copies(case.steps(call))
    loop_s = time.perf_counter() - start
    compiles = counters["frames"]["captured"] if compiler == "ours" else _dynamo_compiles()
    error = max(_error(w, g) for w, g in zip(wanted, got, strict=True))
    row = {"case": name, "compiler": compiler, "calls": len(wanted), "eager_s": eager_s, "loop_s": loop_s,
           "beyond_s": loop_s - eager_s, "compiles": compiles, "error": error}
    rounds = turns({"eager": lambda: _drain(case, case.model), "again": lambda: _drain(case, call)},
                   seconds=seconds, finish=_nothing, least=3, turn=0.0)
    row["again"] = statistics.median(r["eager"] / r["again"] for r in rounds)
    row["eager_again_s"], row["again_s"] = (statistics.median(r[k] for r in rounds) for k in ("eager", "again"))
    if compiler == "ours" and case.single is not None:
        row["of_special"] = _of_special(case, call, seconds)
    return row


def _of_special(case: Case, call: Any, seconds: float) -> list[float]:
    """The general graph's speed of the special one's, at sizes spread over the loop."""
    assert case.single is not None
    found = []
    for n in range(1, case.count, max(1, case.count // SPECIALS)):
        step = case.single(n)
        special = compile_(case.model, dynamic=False)
        step(special)
        rounds = turns({"special": lambda: step(special), "general": lambda: step(call)},  # noqa: B023
                       seconds=seconds / SPECIALS, finish=_nothing, turn=0.01)
        found.append(statistics.median(r["special"] / r["general"] for r in rounds))
    return found


def _copies(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [copy.deepcopy(one.detach()) for one in results]


def _drain(case: Case, call: Any) -> None:
    for _ in case.steps(call):
        pass


def _nothing() -> None:
    """A CPU has finished when the call returns."""


def _error(want: torch.Tensor, got: torch.Tensor) -> float:
    if want.shape != got.shape:
        return float("inf")
    return float((want - got).abs().max() / want.abs().max().clamp(min=1e-12))


def _dynamo_compiles() -> int:
    return sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]


# The bench ---------------------------------------------------------------------------------------------------------------
def _row(name: str, compiler: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row from a fresh process with fresh caches."""
    with tempfile.TemporaryDirectory(prefix="dynamotor-bench-") as cache:
        env = {**os.environ, "DYNAMOTOR_CACHE_DIR": f"{cache}/dynamotor", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        command = [sys.executable, "-m", __spec__.name, name, compiler, str(args.seconds)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"case": name, "compiler": compiler, "failed": f"no result within {args.timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"case": name, "compiler": compiler, "failed": tail}
    return json.loads(lines[-1])


def _cells(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["case"], row["compiler"], row["failed"][:100]]
    special = " ".join(f"{x:.2f}" for x in row.get("of_special", ())) or "-"
    return [row["case"], row["compiler"], str(row["calls"]), f"{row['eager_s']:.2f}", f"{row['loop_s']:.2f}",
            f"{row['beyond_s']:.2f}", str(row["compiles"]), f"{row['again']:.2f}", special, f"{row['error']:.0e}"]


def main(args: argparse.Namespace) -> int:
    """Run the cases; 0 when every result was right."""
    names = [name for name in args.cases.split(",") if name] or list(CASES)
    compilers = [{"dynamotor": "ours", "inductor": "torch.compile"}.get(c, c) for c in args.compilers.split(",")]
    rows: list[dict[str, Any]] = []
    print("  ".join(COLUMNS))
    for name in names:
        for compiler in compilers:
            if compiler != "eager":  # every row has eager beside it
                rows.append(_row(name, compiler, args))
                print("  ".join(_cells(rows[-1])), flush=True)
                _write(rows, args.json or "dynamotor-bench.json")
    for name, ratio in _beside(rows).items():
        print(f"{name}: {ratio:.1f} times less beyond eager's time than torch.compile (bar: {BARS[name]})")
    return int(any("failed" in row or row["error"] > TOLERANCE for row in rows))


def _write(rows: Sequence[dict[str, Any]], path: str) -> None:
    """What there is so far: torch.compile takes minutes."""
    result = {"command": " ".join(sys.argv[1:]), "torch": torch.__version__, "python": platform.python_version(),
              "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "cpu": torch.backends.cpu.get_cpu_capability(),
              "rows": rows, "beyond_of_ours": _beside(rows)}
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def _beside(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """torch.compile's time beyond eager's over ours, by case."""
    beyond = {(r["case"], r["compiler"]): r["beyond_s"] for r in rows if "failed" not in r}
    return {case: beyond[case, "torch.compile"] / max(beyond[case, "ours"], 1e-3) for case, compiler in beyond
            if compiler == "ours" and (case, "torch.compile") in beyond}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
