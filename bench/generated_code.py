"""Digests of everything that is generated for the twelve models, to show that a restructuring changes none of it.

    python -m bench generated_code --json before.json [--models resnet18,T5ForConditionalGeneration]
    python -m bench generated_code --compare before.json after.json

Each model is lowered at reduced size in inference and training. A digest covers one stage: the captured graph, the
guards, the code that makes the results, the aten graphs, the schedule, the kernels, the call programs. Both runs need
the same list of models, since choices that were measured for one model serve the next, and the same interpreter path,
since texts hold paths of libraries. A difference ends the comparison with status 1.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import re
import sys
from pathlib import Path

import torch

import dynamotor
from dynamotor.base.events import collect

from . import models

STAGES = ("graph", "joint", "forward", "backward", "schedule", "loops", "code", "call_program")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def digests(name: str, train: bool) -> dict[str, str]:
    """A digest of each stage's text for one model."""
    case = models.load(name, small=True, dropout=False)
    model = copy.deepcopy(case.model).train(train)
    args, kwargs = case.make_inputs(0, train=train)
    dynamotor.reset()
    with collect("capture") as captures, torch.set_grad_enabled(train):
        lowered = dynamotor.lower(model, *args, **kwargs)
    texts = {stage: getattr(lowered, stage) for stage in STAGES}
    texts["guards"] = "\n".join(str(guard) for event in captures for guard in event.data["guards"])
    texts["finish"] = "\n".join(event.data["captured"].code for event in captures)
    return {stage: digest(text) for stage, text in texts.items()}


def digest(text: str) -> str:
    """A short digest of a text without addresses."""
    return hashlib.sha256(ADDRESS.sub("0x", text).encode()).hexdigest()[:16]


def differences(files: list[str]) -> list[str]:
    """A line for each stage whose digest differs between two runs."""
    before, after = (json.loads(Path(name).read_text()) for name in files)
    return [
        f"{name}: {stage} differs"
        for name in sorted({*before, *after})
        for stage in sorted({*before.get(name, {}), *after.get(name, {})})
        if before.get(name, {}).get(stage) != after.get(name, {}).get(stage)
    ]


def main() -> int:
    """Write the digests, or compare two files of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="generated-code.json")
    parser.add_argument("--models", default=",".join(models.TWELVE))
    parser.add_argument("--compare", nargs=2, help="files of earlier runs")
    options = parser.parse_args()
    if options.compare:
        lines = differences(options.compare)
        print("\n".join(lines) or "the same text at every stage")
        return 1 if lines else 0
    torch.set_num_threads(1)
    found = {
        f"{name}.{'train' if train else 'infer'}": digests(name, train)
        for name in options.models.split(",")
        for train in (False, True)
    }
    Path(options.json).write_text(json.dumps(found, indent=1))
    print(f"{len(found)} programs, {len(STAGES) + 2} stages each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
