"""A region that a graph enters is left also if an op inside raises: with every backend, after a graph break,
and in graphs that run op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor

BAD = torch.tensor([99])
REGIONS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "inference_mode": torch.inference_mode,
    "device": lambda: torch.device("cpu"),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}
BACKENDS: dict[str, Any] = {
    "eager": "eager",
    "aot_eager": "aot_eager",
    "callable": lambda gm, inputs: gm.forward,
    "native": "native",
}


def modes() -> tuple[Any, ...]:
    nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
        torch.is_anomaly_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        nesting,
    )


def plain(region: Any, x: torch.Tensor) -> Any:
    with region():
        return (x * 2).index_select(0, BAD)


def behind_a_break(region: Any, x: torch.Tensor) -> Any:
    with region():
        y = x * 2
        print(end="")
        return y.index_select(0, BAD)


def nested(region: Any, x: torch.Tensor) -> Any:
    with torch.no_grad(), region(), torch.autocast("cpu", torch.bfloat16):
        return (x @ x).index_select(0, BAD)


def op_by_op(region: Any, x: torch.Tensor) -> Any:
    """A leaf that is created inside leaves the graph to eager PyTorch."""
    leaf = torch.ones(2, requires_grad=True)
    with region():
        return x.detach().index_select(0, BAD), leaf


def after_a_write(region: Any, x: torch.Tensor) -> Any:
    """The graph may not run again, so that the error is raised from outside of the frame."""
    x = x.detach()
    with region():
        print(end="")
        x.add_(1)
        return x.index_select(0, BAD)


def after_a_write_in_one_graph(region: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    with region():
        return (x @ x).index_select(0, BAD)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    "program", [plain, behind_a_break, nested, op_by_op, after_a_write, after_a_write_in_one_graph]
)
def test_a_region_is_left_when_an_op_raises(program: Callable[..., Any], region: str, backend: str) -> None:
    compiled = dynamotor.compile(program, backend=BACKENDS[backend])
    before = modes()
    for _ in range(2):
        x = torch.ones(4, 4, requires_grad=program is not after_a_write_in_one_graph)
        with pytest.raises(IndexError):
            compiled(REGIONS[region], x)
        assert modes() == before


class Noted:
    """A context manager of the program's own."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("in")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.log.append("out" if kind is None else "out by an error")


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_the_frame_are_left_when_a_graph_that_wrote_raises(backend: str) -> None:
    log: list[str] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            with Noted(log):
                print(end="")
                x.add_(1)
                return x.index_select(0, BAD)
        finally:
            log.append("finally")

    compiled = dynamotor.compile(program, backend=BACKENDS[backend])
    for _ in range(2):
        log.clear()
        with pytest.raises(IndexError):
            compiled(torch.ones(4, 4))
        assert log == ["in", "out by an error", "finally"]


def _made_on_a_device(x):
    with torch.device("meta"):
        made, named = torch.ones(2), torch.zeros(2, device="cpu")
        asked = torch.get_default_device().type
        with torch.device("cpu"):
            inner = torch.rand(1)
    return made, named, inner, torch.ones(2) + x, asked


def _a_break_in_a_region(x):
    with torch.device("meta"):
        before = torch.ones(2)
        torch.set_num_threads(torch.get_num_threads())
        after = torch.nn.Linear(2, 3).weight
    return before, after, torch.ones(2) + x


def _an_error_in_a_region(x):
    try:
        with torch.device("meta"):
            raise ValueError(torch.ones(2))
    except ValueError as error:
        return error.args[0], torch.ones(2) + x


def _left_open(x):
    torch.device("meta").__enter__()
    return torch.ones(2)


@pytest.mark.regression
@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize(
    "fn",
    [_made_on_a_device, _a_break_in_a_region, _an_error_in_a_region, _left_open],
    ids=lambda fn: fn.__name__,
)
def test_regions_of_a_device(fn, backend):
    """They were entered while the trace was made: its program made tensors elsewhere, and a break left them open."""

    def seen(run):
        depth = torch._C._len_torch_function_stack()
        devices = [str(getattr(one, "device", one)) for one in run(torch.ones(2))]
        opened = torch._C._len_torch_function_stack() - depth
        for _ in range(opened):
            torch.device("meta").__exit__(None, None, None)
        return devices, opened

    compiled = dynamotor.compile(fn, backend=backend)
    assert seen(compiled) == seen(compiled) == seen(fn)


@pytest.mark.regression
def test_an_error_behind_a_break_in_a_recorded_function():
    """The profiler's region had not been entered: leaving it was an AssertionError."""
    seen = dynamotor.disable(lambda x: x)

    def fn(x):
        with torch.autograd.profiler.record_function("part"):
            return seen(x.sin()).reshape(7)

    with pytest.raises(RuntimeError, match="shape"):
        dynamotor.compile(fn, backend="eager")(torch.ones(2))


def eager_backend(gm, example_inputs):
    return gm.forward


@pytest.mark.regression
def test_an_exception_of_a_with_block_that_only_the_trace_raised_has_a_traceback():
    """CPython's WITH_EXCEPT_START crashes on a raised exception without one."""

    class Swallow:
        def __enter__(self):
            return self

        def __exit__(self, kind, value, traceback):
            print(end="")
            return True

    def f(x):
        with Swallow():
            raise KeyError("gone")
        return x + 1

    compiled = dynamotor.compile(f, backend=eager_backend)
    assert compiled(torch.ones(1)).item() == 2 == compiled(torch.ones(1)).item()


@pytest.mark.regression
@pytest.mark.parametrize("mode", [[1], None, 1])
def test_a_mode_that_is_no_boolean(mode: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(mode):
            return x + 1

    compiled = dynamotor.compile(function, backend="eager")
    for _ in range(2):
        with pytest.raises(TypeError, match="must be bool"):
            compiled(torch.ones(2))
