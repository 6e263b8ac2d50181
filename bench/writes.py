"""`python -m bench writes`: one row written into a buffer of 1 KB to 1 GB, and steps of a small Llama that decodes
over a static cache: eager, `torch.compile` and ours in turns, and the memory that a call takes beside its buffer.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch

import dynamotor
from bench.tool import write_json
from bench.turns import turns
from dynamotor.tools.tables import render

Form = Callable[..., Any]
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 26, 1 << 30)  # bytes
HEADS, WIDTH = 4, 16
COLUMNS = ("form", "buffer", "eager µs", "torch.compile µs", "ours µs", "ours / eager", "MB beside")


@torch.library.custom_op("dynamotor_bench::write_row", mutates_args=("k",))
def write_row(k: torch.Tensor, x: torch.Tensor, p: torch.Tensor) -> None:
    """A cache's write as a user's op."""
    k.index_copy_(2, p, x)


class Cache(torch.nn.Module):
    """A buffer of a module that a row is written to."""

    def __init__(self, k: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("k", k)

    def forward(self, k: torch.Tensor, x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Write, then read a few rows."""
        own: torch.Tensor = self.k  # type: ignore[assignment]
        own.index_copy_(2, p, x)
        return own[:, :, :4].sum()


FORMS: dict[str, Form] = {
    "index_copy_": lambda k, x, p: k.index_copy_(2, p, x),
    "index_put_": lambda k, x, p: k.index_put_((p * 0, p * 0 + 1, p), x[:, 1, 0]),
    "slice": lambda k, x, p: k[:, :, 2:3].copy_(x),
    "chained views": lambda k, x, p: k[0].transpose(0, 1)[3].copy_(x[0, :, 0]),
    "scatter_": lambda k, x, p: k.scatter_(2, p.expand(1, HEADS, 1, WIDTH), x),
    "custom op": lambda k, x, p: write_row(k, x, p),
}


def _wait(device: str) -> Callable[[], object]:
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def peak(call: Callable[[], object], device: str) -> float:
    """MB that a call takes beside its operands."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return float(torch.cuda.max_memory_allocated() - before) / (1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def row(name: str, form: Form, nbytes: int, seconds: float, device: str) -> dict[str, Any]:
    """The times of one form for a buffer of so many bytes."""
    k = torch.zeros(1, HEADS, nbytes // (4 * HEADS * WIDTH), WIDTH, device=device)
    x, p = torch.randn(1, HEADS, 1, WIDTH, device=device), torch.tensor([3], device=device)
    if name == "buffer of a module":
        form = Cache(k)
    ways = {"eager": form, "torch.compile": torch.compile(form), "ours": dynamotor.compile(form)}
    with torch.no_grad():
        calls = {way: (lambda call=call: call(k, x, p)) for way, call in ways.items()}
        calls["ours"]()
        beside = {way: peak(calls[way], device) for way in ("eager", "ours")}
        rounds = turns(calls, seconds=seconds, finish=_wait(device), turn=0.01)
    torch._dynamo.reset()
    dynamotor.reset()
    micro = {way: 1e6 * statistics.median(one[way] for one in rounds) for way in ways}
    return {
        "form": name,
        "bytes": nbytes,
        "us": micro,
        "mb_beside": beside["ours"],
        "mb_eager": beside["eager"],
    }


def decoding(positions: int, seconds: float, device: str) -> dict[str, Any]:
    """Milliseconds of one step of a small Llama over a static cache of so many positions."""
    from bench import torchvision_stub

    torchvision_stub.prepare()
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=positions, **shape)
    model = LlamaForCausalLM(config).eval().to(device)
    tokens, at = torch.tensor([[7]], device=device), torch.tensor([positions // 2], device=device)

    def step(call: Any) -> Callable[[], Any]:
        cache = StaticCache(config=config, max_cache_len=positions)
        return lambda: call(tokens, past_key_values=cache, position_ids=at[None], use_cache=True).logits

    ways = {"eager": model, "torch.compile": torch.compile(model), "ours": dynamotor.compile(model)}
    with torch.no_grad():
        steps = {way: step(call) for way, call in ways.items()}
        rounds = turns(steps, seconds=seconds, finish=_wait(device))
    return {
        "positions": positions,
        "ms": {way: 1e3 * statistics.median(one[way] for one in rounds) for way in ways},
        "ours_over": {
            way: _quartiles([one["ours"] / one[way] for one in rounds]) for way in ways if way != "ours"
        },
    }


def _quartiles(ratios: list[float]) -> list[float]:
    """The median of the rounds' ratios between the quartiles."""
    return statistics.quantiles(ratios, n=4)


def main(argv: list[str] | None = None) -> None:
    """Time the forms and the decoding, print tables, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench writes", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest buffer")
    parser.add_argument("--positions", default="4096,32768")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(argv)
    forms = {**FORMS, "buffer of a module": write_row}
    rows = []
    for name, form in forms.items():
        for nbytes in (n for n in SIZES if n <= given.largest):
            rows.append(row(name, form, nbytes, given.seconds, given.device))
            print(rows[-1], flush=True)
    steps = [decoding(int(n), 4 * given.seconds, given.device) for n in given.positions.split(",") if n]
    print(*steps, sep="\n")
    lines = [
        [
            one["form"],
            f"{one['bytes'] >> 10} KB",
            *(f"{us:.1f}" for us in one["us"].values()),
            f"{one['us']['ours'] / one['us']['eager']:.2f}",
            f"{one['mb_beside']:.1f}",
        ]
        for one in rows
    ]
    print(render(lines, COLUMNS))
    found = {
        "torch": torch.__version__,
        "device": _device_name(given.device),
        "threads": torch.get_num_threads(),
    }
    found |= {"rows": rows, "decoding": steps}
    write_json(given.json, found)


if __name__ == "__main__":
    main()
