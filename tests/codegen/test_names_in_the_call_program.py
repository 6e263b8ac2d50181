"""Ops and functions whose names the generated program uses itself: neither hides the other."""

import pytest
import torch

import dynamotor
from dynamotor.codegen.call_program import HELPERS
from dynamotor.graph.spec import GraphInfo, TensorSpec

pytestmark = pytest.mark.regression

_library = torch.library.Library("dm", "FRAGMENT")
NAMES = sorted(
    {
        *HELPERS,
        "take",
        "new",
        "stream",
        "current_stream",
        "on_device",
        "call",
        "given",
        "k0",
        "k1",
        "arg0",
        "arg1",
        "buf0",
        "buf1",
        "arg0_v0",
        "c",
        "float",
        "lambda",
        "None",
        "as_buf1",
        "check",
        "_",
    }
)


def test_take():
    x, i = torch.randn(300, 300), torch.randint(-90_000, 90_000, (400, 100))
    fast = dynamotor.compile(lambda x, i: torch.take(x * 2, i) + 1)
    torch.testing.assert_close(fast(x, i), torch.take(x * 2, i) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_an_op_of_any_name(name):
    """The op's result is large (a pooled result), the program has kernels before and after it, and a view of
    a parameter.
    """
    _library.define(f"{name}_(Tensor x) -> Tensor")
    _library.impl(f"{name}_", lambda x: x.clone() * 3, "CPU")
    torch.library.register_fake(f"dm::{name}_", torch.empty_like, lib=_library)
    op = getattr(torch.ops.dm, f"{name}_")
    x, w = torch.randn(200, 200), torch.randn(200, 200)
    program = lambda x, w: (op(x.relu() * 2) @ w.t()).exp()  # noqa: E731
    torch.testing.assert_close(dynamotor.compile(program)(x * 0.01, w * 0.01), program(x * 0.01, w * 0.01))


@pytest.mark.parametrize("name", [n for n in NAMES if n.isidentifier()])
def test_a_function_of_any_name(name):
    """What lowering calls may be any Python function: its name is the text's, as far as it is free."""

    def function(x):
        return x.clone() * 3

    function.__name__ = name
    from dynamotor.codegen import call_program
    from dynamotor.lower.program import Buffer, BufRef, ExternStep, Program

    spec = TensorSpec.dense((200, 200), torch.float32)
    buffers = {
        "arg0": Buffer("arg0", spec, "input"),
        "buf0": Buffer("buf0", spec, "temp"),
        "buf1": Buffer("buf1", spec, "output"),
    }
    refs = {n: BufRef.whole(b) for n, b in buffers.items()}
    steps = [
        ExternStep(function, (refs["arg0"],), {}, ("buf0",)),
        ExternStep(torch.ops.aten.neg.default, (refs["buf0"],), {}, ("buf1",), torch.ops.aten.neg.out),
    ]
    built = call_program.CallProgram(
        Program("g", ("arg0",), buffers, steps, (refs["buf1"], refs["buf1"])),
        GraphInfo("inference", "g"),
        lambda e: None,
    )
    x = torch.randn(200, 200)
    torch.testing.assert_close(built(x)[0], -3 * x)
