"""A callable whose graphs are slower than eager gives one warning; measuring is not seen by the program."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.compat import TorchDispatchMode
from dynamotor.capture import eager_times
from dynamotor.capture.compiled_share import Share
from dynamotor.capture.eager_times import EagerTimes


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The warnings of a compiled function, where its graphs and eager take so many seconds."""

    def run(
        fn: Any, *args: Any, compiled: float, eager: float, calls: int = 4, options: Any = None
    ) -> list[str]:
        def seconds(run: Any, inputs: Any) -> float:
            run(*inputs)
            return next(turns)

        def measure(share: Share, entry: Any, inputs: Any, seconds: float) -> None:
            original(share, entry, inputs, 1e3)  # a compilation that took long enough

        original, turns = Share.measure, itertools.cycle((compiled, eager))
        monkeypatch.setattr(eager_times, "_seconds", seconds)
        monkeypatch.setattr(Share, "measure", measure)
        with dynamotor.config.patch(check=False), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            function = dynamotor.compile(fn, options=options)
            for _ in range(calls):
                function(*args)
        return [str(w.message) for w in found if w.category is dynamotor.EagerWarning]

    return run


def two_graphs(x: torch.Tensor) -> torch.Tensor:
    y = x.sin() * 2
    print(end="")
    return y.cos() + 1


@pytest.mark.regression
def test_a_wrapper_s_layout_may_be_asked_in_a_trial_run() -> None:
    """An error of the mode would end the process."""
    x, offsets = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 1, 3])
    with eager_times._OnlyComputes(1e9) as mode:
        made = torch.nested.nested_tensor_from_jagged(x, offsets)
        mode.end = 0.0
        assert made.layout is torch.jagged and made.device.type == "cpu" and made.dim() == 3
        with pytest.raises(eager_times._Noticed):
            made.sin()


def test_a_slow_callable_warns_once(measured: Any) -> None:
    (text,) = measured(two_graphs, torch.ones(3), compiled=1.6e-4, eager=2e-5)
    assert "slower than eager PyTorch" in text and "0.32 ms compiled, 0.04 ms in eager" in text


def test_no_warning_of_the_time_that_checks_take(measured: Any) -> None:
    assert not measured(two_graphs, torch.ones(3), compiled=1.6e-4, eager=2e-5, options={"check": True})


@pytest.mark.parametrize("compiled, eager", [(2e-5, 1.6e-4), (1.2e-4, 1e-4), (9e-5, 1e-6)])
def test_no_warning_within_noise(measured: Any, compiled: float, eager: float) -> None:
    assert not measured(lambda x: x.sin() * 2, torch.ones(3), compiled=compiled, eager=eager)


def test_the_shortest_times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)
    monkeypatch.setattr(eager_times, "time", clock)
    times, turns = EagerTimes(), iter(range(100))

    def slow() -> None:
        clock.seconds += 0.002

    def sometimes_slow() -> None:
        if next(turns) % 3:
            slow()

    times._measure(lambda: None, sometimes_slow, (), 60.0)
    assert not times.are_slower
    times._measure(lambda: None, slow, (), 60.0)
    assert times.are_slower


def test_a_graph_whose_memory_alone_takes_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """First calls of models would be a tenth longer."""
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(EagerTimes, "add", lambda self, gm, *rest: graphs.append(gm))
    with dynamotor.config.patch(check=False):
        dynamotor.compile(lambda x: x.sin() + 1)(x := torch.ones(1 << 20))
    monkeypatch.undo()
    runs: list[int] = []
    for seconds in (0.01, 1e3):  # of a compilation
        EagerTimes().add(graphs[0], lambda x: runs.append(1), (x,), seconds)
        assert bool(runs) is (seconds == 1e3)


def test_programs_with_effects_run_once_and_draw_the_same_numbers(measured: Any) -> None:
    calls = []

    @torch.library.custom_op("eager_times::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    counted.register_fake(lambda x: torch.empty_like(x))
    measured(lambda x: counted(x) * 2, torch.ones(3), compiled=1e-5, eager=1e-5, calls=1)
    assert len(calls) == 1
    x = torch.zeros(3)
    measured(lambda x: x.add_(1), x, compiled=1e-5, eager=1e-5, calls=1)
    assert x.tolist() == [1, 1, 1]
    after = []
    for warn_slower in (True, False):
        dynamotor.reset()
        torch.manual_seed(0)
        with dynamotor.config.patch(warn_slower=warn_slower):
            measured(lambda x: x + torch.rand(3), x, compiled=1e-5, eager=1e-5, calls=1)
        after.append(torch.rand(1))
    assert after[0] == after[1]


def test_a_callable_as_backend_is_called_once(measured: Any) -> None:
    calls = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        run = dynamotor.backends.native(gm, inputs)
        return lambda *given: calls.append(1) or run(*given)

    with dynamotor.config.patch(check=False):
        dynamotor.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    assert calls == [1]


def adds_to_itself(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x * 2


def adds_to_a_list(x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x], 1.0)
    return x * 2


def writes_an_option(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(x, inplace=True) - 1


def writes_statistics(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(6.0).view(2, 3)
    return torch.nn.functional.batch_norm(rows, x, torch.ones(3), training=True)


@pytest.mark.parametrize("fn", [adds_to_itself, adds_to_a_list, writes_an_option, writes_statistics])
def test_a_graph_that_writes_its_input_is_not_measured(measured: Any, fn: Any) -> None:
    x, expected = torch.zeros(3), torch.zeros(3)
    assert not measured(fn, x, compiled=1.0, eager=1e-5)
    for _ in range(4):
        fn(expected)
    torch.testing.assert_close(x, expected)


def test_a_graph_that_draws_is_not_measured(measured: Any) -> None:
    """A generator would have to be set back, and other threads that draw would get the same numbers twice."""
    assert not measured(lambda x: torch.dropout(x, 0.5, True), torch.ones(3), compiled=1.6e-4, eager=2e-5)
    assert not measured(lambda x: x + torch.rand(3), torch.ones(3), compiled=1.6e-4, eager=2e-5)
    assert measured(lambda x: torch.dropout(x, 0.5, False) + 1, torch.ones(3), compiled=1.6e-4, eager=2e-5)


class Only(TorchDispatchMode):
    """Notes the aten calls below a mode under test."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


def drawn(x: torch.Tensor) -> Any:
    return torch.rand_like(x)


def drawn_by_a_generator(x: torch.Tensor) -> Any:
    return torch.rand(3, generator=torch.Generator().manual_seed(0)) + x


def written_through_a_view(x: torch.Tensor) -> Any:
    return x.view(1, 3).t().add_(1)


def written_as_out(x: torch.Tensor) -> Any:
    return torch.mul(x, 2, out=x)


def written_rows(x: torch.Tensor) -> Any:
    return torch.nn.functional.embedding(torch.tensor([0]), x[:, None], max_norm=0.1)


def written_own(x: torch.Tensor) -> Any:
    y = x.sin()
    y.view(-1)[1:].mul_(2)
    return y, torch.nn.functional.batch_norm(y[None], torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize(
    "fn, passes",
    [(written_own, True)]
    + [
        (fn, False)
        for fn in (drawn, drawn_by_a_generator, written_through_a_view, written_as_out, written_rows)
    ],
)
def test_the_first_run_ends_before_what_the_program_could_notice(fn: Any, passes: bool) -> None:
    x = torch.ones(3)
    state, version = torch.get_rng_state(), x._version
    ends = contextlib.nullcontext() if passes else pytest.raises(eager_times._Noticed)
    with ends, torch.no_grad(), eager_times._OnlyComputes(60.0):
        fn(x)
    assert (
        torch.equal(x, torch.ones(3)) and x._version == version and torch.equal(state, torch.get_rng_state())
    )


def test_the_first_run_ends_when_its_time_or_memory_is_up() -> None:
    x = torch.ones(100)
    with pytest.raises(eager_times._Noticed), Only() as below, eager_times._OnlyComputes(0.0):
        x.sin().cos()
    assert not below.calls
    with pytest.raises(eager_times._Noticed), Only() as below, eager_times._OnlyComputes(60.0, 700):
        x.sin().cos().exp()
    assert below.calls == ["aten::sin", "aten::cos"]


@pytest.mark.parametrize("watch", [sys.settrace, sys.setprofile, None], ids=["trace", "profile", "profiler"])
def test_nothing_is_measured_under_a_profiler(measured: Any, watch: Any) -> None:
    with contextlib.ExitStack() as stack:
        if watch is None:
            stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        else:
            before = sys.gettrace() if watch is sys.settrace else sys.getprofile()
            stack.callback(watch, before)
            watch(lambda *_: None)
        assert not measured(lambda x: x.sin() * 2, torch.ones(3), compiled=1.0, eager=1e-5)


def test_warnings_are_given_as_often(measured: Any) -> None:
    counts = []
    for warn_slower in (True, False):
        dynamotor.reset()
        with (
            dynamotor.config.patch(warn_slower=warn_slower, check=False),
            warnings.catch_warnings(record=True) as found,
        ):
            warnings.simplefilter("always")
            measured(lambda x: x + 1, torch.ones(3), compiled=1.0, eager=1.0)
            compiled = dynamotor.compile(lambda x: torch.nn.functional.mse_loss(x, x[:1]))
            for _ in range(3):
                compiled(torch.ones(3))
        counts.append(len([w for w in found if "target size" in str(w.message)]))
    assert counts[0] == counts[1]
