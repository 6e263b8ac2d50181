"""The families of transformers in families.txt, small and with random weights: inference, training and
generate beside eager in float64 and beside torch.compile's counts of graphs.

python -m bench families --json docs/results/families.json [--names A,B] [--phases infer,train,generate]
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.tool import read_json, write_json

from . import models
from .beside import (
    Row,
    Tensors,
    Way,
    add_shares,
    gradients_of,
    in_child,
    measure,
    named,
    output_tensors,
    printed,
    state_of,
)
from .share import aside

LIST = Path(__file__).with_name("families.txt")
PHASES = ("infer", "train", "generate")
# Why a family takes more graphs than with torch.compile.
REASONS: dict[str, str] = {
    "IBertForMaskedLM": "ranges of quantisation are numbers of data; the calls between two breaks are a graph here",
    "NystromformerForMaskedLM": "fails under both compilers: its code takes no mask of all pairs, which transformers makes in traces",
    "EfficientNetForImageClassification": "in this small form nothing comes through: gradients of 1e-20, zeros in eager, are compared",
    "Wav2Vec2ForCTC": "CTC's loss and the lengths of its targets are numbers of data, in eager for both compilers",
    "HubertForCTC": "CTC's loss and the lengths of its targets are numbers of data, in eager for both compilers",
    "ReformerModelWithLMHead": "each layer's seed is a number beyond 64 bits, for which the rest of the frame is captured anew",
}
# Families without code for float64: eager in float32 is their reference.
INEXACT = frozenset(("XGLMForCausalLM", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM"))


def infer(case: models.ModelCase, way: Way) -> Tensors:
    """Two calls on different inputs of one size."""
    compiled = way.compile(way.cast(copy.deepcopy(case.model)).eval())
    found: Tensors = {}
    with torch.no_grad():
        for seed in (0, 1):
            with aside():
                _, inputs = case.make_inputs(seed)
            out = compiled(**{k: way.cast(v) for k, v in inputs.items()})
            found |= named(**{f"out{seed}": output_tensors(out)})
    return found


def train(case: models.ModelCase, way: Way) -> Tensors:
    """Two steps of SGD: losses, the first gradients, and the final parameters and buffers."""
    model = way.cast(copy.deepcopy(case.model)).train()
    compiled, optimizer = way.compile(model), torch.optim.SGD(model.parameters(), lr=1e-2)
    found: Tensors = {}
    for seed in (0, 1):
        with aside():
            _, inputs = case.make_inputs(seed, train=True)
        optimizer.zero_grad()
        loss = case.loss(
            compiled(**{k: v if isinstance(v, bool) else way.cast(v) for k, v in inputs.items()})
        )
        loss.backward()
        found |= named(**{f"loss{seed}": [loss]})
        if seed == 0:
            found |= gradients_of(model)
        optimizer.step()
    return found | state_of(model)


def generate(case: models.ModelCase, way: Way) -> Tensors:
    """Four tokens by greedy choice, with the compiled forward, as transformers' own pages do it."""
    model = copy.deepcopy(case.model).eval()
    model.forward = way.compile(model.forward)
    _, inputs = case.make_inputs(0)
    first = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
    return {"tokens": model.generate(**first, max_new_tokens=4, min_new_tokens=4, do_sample=False)}


def one(name: str, phase: str, known: dict[str, Any] | None = None) -> Row:
    """A phase of a family; of a row that is `known`, the shares of now."""
    case = models.load(name, small=True, dropout=False)
    if phase == "generate" and not (hasattr(case.model, "can_generate") and case.model.can_generate()):
        return Row(name, error="no generate")
    program = partial({"infer": infer, "train": train, "generate": generate}[phase], case)
    if known is not None:
        return add_shares(Row(**known), program)
    return measure(name, program, exact=phase != "generate" and name not in INEXACT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file for the figures; an earlier run's are kept")
    parser.add_argument("--names", default="")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument(
        "--shares", action="store_true", help="only the compiled share of rows that are there"
    )
    parser.add_argument("--timeout", type=float, default=120.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = read_json(options.json)
    listed = models.names(LIST)
    models.load(listed[0], small=True)  # the children begin with transformers imported
    for name in options.names.split(",") if options.names else listed:
        for phase in options.phases.split(","):
            known = found.get(phase, {}).get(name) if options.shares else None
            row = in_child(name, partial(one, name, phase, known), options.timeout)
            if known is not None and row.share is None:
                print(f"{phase} {name}: not measured, the row stays as it is: {row.error}", flush=True)
                continue
            if row.error != "no generate":
                found.setdefault(phase, {})[name] = asdict(row)
                print(phase, printed(row), flush=True)
        write_json(options.json, found)


if __name__ == "__main__":
    main()
