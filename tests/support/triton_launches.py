"""Lower a function, write its launches in Triton, run them in Triton's interpreter on CPU tensors and compare
with eager.
"""

import torch
from aten_graphs import aten_graph

from bench.triton_interpret import make_interpreted
from dynamotor.base.config import config
from dynamotor.codegen import triton
from dynamotor.codegen.triton_ops import HELPERS
from dynamotor.codegen.triton_plan import DEFAULT
from dynamotor.graph.spec import GraphInfo
from dynamotor.lower.lower_graph import lower_graph
from dynamotor.lower.program import LoopStep


def launches(fn, *inputs, tuning=DEFAULT):
    """The program of a function, its loop steps as Triton launches."""
    with torch.no_grad(), config.patch(target="triton"):
        return triton.expand(lower_graph(aten_graph(fn, *inputs), GraphInfo("inference", "test")), tuning)


def run(program, *inputs):
    """Its outputs, by way of the interpreter."""
    memory = {
        name: torch.empty_strided(b.spec.shape, b.spec.stride, dtype=b.spec.dtype)
        if b.value is None
        else b.value
        for name, b in program.buffers.items()
    }
    memory.update(zip(program.inputs, inputs, strict=True))
    for step in program.steps:
        assert isinstance(step, LoopStep), step
        f = step.function
        make_interpreted(HELPERS + f.source, f.name, f.grid, step.ints)(*[memory[a] for a in step.args])
    return [
        torch.as_strided(memory[o.name], o.shape, o.stride, memory[o.name].storage_offset() + o.offset)
        for o in program.outputs
    ]


def check(fn, *inputs, tolerance=1e-5, tuning=DEFAULT):
    """Compare with eager; gives the launches' functions."""
    program = launches(fn, *inputs, tuning=tuning)
    got, want = run(program, *inputs), fn(*inputs)
    for a, b in zip(got, want if isinstance(want, (tuple, list)) else (want,), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return [step.function for step in program.steps]
