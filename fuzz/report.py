"""A finding as a test that can be pasted beside the tests of its room."""

from __future__ import annotations

import hashlib

from .program import Program
from .trial import TARGETS, XLA


def test_of(program: Program, problems: list[str]) -> str:
    """The text of a test that fails as the program does."""
    name = "test_found_" + hashlib.sha256((program.source() + repr(program.inputs)).encode()).hexdigest()[:8]
    lines = [f"def {name}():", *(f"    # {p[:100]}" for p in problems[:3])]
    lines += ["    " + line for line in program.source().rstrip().splitlines()]
    inputs = ", ".join(i.text() for i in program.inputs)
    lines += [
        "",
        "    def inputs():",
        f"        torch.manual_seed({program.seed})",
        f"        return [{inputs}]",
        "",
    ]
    if program.target in XLA:
        call = f"problems(f, inputs, {program.cotangents}, {program.target!r})"
        return "\n".join([*lines, f"    assert fuzz.xla.{call} == []"]) + "\n"
    settings = ", ".join(f"{k}={v!r}" for k, v in TARGETS.get(program.target, {}).items())
    place = 'on_device("cuda"), ' if program.target == "cuda" else ""
    lines += [
        f"    with {place}dynamotor.config.patch({settings}):",
        f"        same_as_eager(f, inputs, {program.cotangents})",
    ]
    return "\n".join(lines) + "\n"


HEADER = """import dynamotor
import torch
import torch.nn.functional as F
from fuzz.compare import differences, observe
from fuzz.place import on_device


def same_as_eager(f, inputs, cotangents=()):
    want = observe(f, inputs(), cotangents)
    compiled = dynamotor.compile(f)
    for _ in range(2):
        junk = [torch.full((n,), float("nan")) for n in (1, 8, 64, 512) for _ in range(50)]
        del junk  # unwritten memory is seen
        assert differences(want, observe(compiled, inputs(), cotangents)) == []
"""
