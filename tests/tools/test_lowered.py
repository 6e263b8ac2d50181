"""`lower` gives every stage as text that reads as a program; DYNAMOTOR_DEBUG shows at each level what
base/events.py says.
"""

from __future__ import annotations

import ast
import re

import pytest
import torch
from children import run_forked
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dynamotor
from dynamotor import config
from dynamotor.tools.lowered import Lowered


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.inner(x))
        return self.norm(y) + y.t().softmax(-1).t()


@pytest.fixture
def lowered() -> Lowered:
    return dynamotor.lower(Small(), torch.randn(4, 16))


@pytest.mark.parametrize("stage", ["graph", "joint", "forward", "backward", "call_program"])
def test_graphs_are_python(lowered: Lowered, stage: str) -> None:
    tree = ast.parse(getattr(lowered, stage))
    assert all(isinstance(node, ast.FunctionDef) for node in tree.body) and tree.body


def test_loops_read_as_programs_and_name_their_nodes(lowered: Lowered) -> None:
    text = lowered.loops
    assert "gelu_default" in text and "for t0 in parallel(" in text and "erf(" in text and "sum" in text
    ast.parse(re.sub(r"^(rows|cols|scan)", r"def \1", text, flags=re.MULTILINE).replace(": out ", ": "))


def test_the_schedule_names_calls_and_refused_fusions_with_reasons(lowered: Lowered) -> None:
    assert "aten.addmm.default(" in lowered.schedule and "kernel1(" in lowered.schedule
    assert "does not join" in lowered.schedule and "complete only after the nest" in lowered.schedule


def test_generated_code_holds_each_kernel_once(lowered: Lowered) -> None:
    names = {step.name for program in lowered.record.programs for step in program.kernels}
    assert names and all(lowered.code.count(f"void {name}(") == 1 for name in names)


def test_lines_are_the_users_in_the_backward_too(lowered: Lowered) -> None:
    for program in lowered.record.programs:
        for step in program.steps:
            assert step.lines and all(line.filename == __file__ for line in step.lines), step.name
    lines = {line.lineno for _, line in lowered.record.captures[0].guards if line}
    assert len(lines) >= 2


def test_bytes_operations_and_memory_are_counted() -> None:
    a, b = torch.randn(8, 32), torch.randn(32, 16)
    program = dynamotor.lower(lambda a, b: (a @ b).exp() + 1, a, b).record.programs[0]
    product, kernel = program.steps
    assert product.flops == 2 * 8 * 32 * 16 and product.nbytes == 4 * (8 * 32 + 32 * 16 + 8 * 16)
    assert kernel.flops == 2 * 8 * 16 and kernel.nbytes == 2 * 4 * 8 * 16
    assert program.memory == [4 * 8 * 16, 2 * 4 * 8 * 16]


def test_several_graphs_have_headings_and_inference_has_no_backward() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print(end="")
        return y.cos()

    found = dynamotor.lower(broken, torch.randn(3))
    assert found.graph.count("def forward(") == 2 and found.backward == "" and found.graph.startswith("# ")
    assert (
        str(found.record.captures[0].reason).startswith("[DM211]") and "torch.sin" in str(found) + "torch.sin"
    )


def test_gradients_are_as_before() -> None:
    model, x = Small(), torch.randn(4, 16, requires_grad=True)
    model(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    given = x.grad.clone()
    result = dynamotor.lower(model, x).result
    assert torch.allclose(result, model(x), atol=1e-5)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters())) and torch.equal(
        given, x.grad
    )


PROGRAM = """
import torch, dynamotor
def f(x, n):
    y = x.sin() * n
    print(end="")
    return y.cos() + x
fast = dynamotor.compile(f)
fast(torch.randn(3, requires_grad=True), 2.0).sum().backward()
fast(torch.randn(3, requires_grad=True), 3.0)
"""
# What each level adds, by channel and a piece of its text.
LEVELS = [
    ("breaks", "[DM211]"),
    ("timings", "capture: "),
    ("guards", "x: TensorMatch(Tensor, (3,)"),
    ("code", 'extern "C" void'),
    ("graphs", "joint graph0"),
    ("passes", "joint: remove dead code"),
    ("bytecode", "LOAD_FAST"),
]


def _shown(tmp_path: str, **environment: str) -> str:
    done = run_forked(PROGRAM, DYNAMOTOR_CACHE_DIR=tmp_path, DYNAMOTOR_VERIFY="0", **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("level", [1, 7])
def test_a_debug_level_shows_its_channels_and_those_below(level: int, tmp_path: str) -> None:
    text = _shown(str(tmp_path), DYNAMOTOR_DEBUG=str(level))
    for n, (channel, piece) in enumerate(LEVELS, 1):
        assert (f"[dynamotor:{channel}]" in text) == (n <= level), channel
        assert n > level or piece in text, (channel, text)
    assert "[dynamotor:recompiles]" in text and "argument `n` is 3.0, was 2.0" in text


@pytest.mark.parametrize("channel, piece", LEVELS)
def test_a_channel_is_shown_by_its_name(channel: str, piece: str, capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(log=channel):
        dynamotor.compile(lambda x, n: (print(end=""), (x.sin() + 1).cumsum(0) * n)[1])(
            torch.randn(3, requires_grad=True), 2.0
        )
    assert f"[dynamotor:{channel}]" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [True, False], ids=["all gradients", "of weights alone"])
def test_gradients_of_convolutions_are_counted_as_pytorch_counts_them(wanted: bool) -> None:
    """Their call has several results: counted as one, `lower` and the report of a training step raised."""
    net = nn.Conv2d(3, 8, 3, stride=2, bias=False)
    x = torch.randn(2, 3, 32, 32, requires_grad=wanted)
    with FlopCounterMode(display=False) as counter:
        net(x).sum().backward()
    programs = dynamotor.lower(net, x).record.programs
    calls = [step for program in programs for step in program.steps if "convolution" in step.name]
    assert sum(step.flops for step in calls) == counter.get_total_flops()
