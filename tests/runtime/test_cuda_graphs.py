"""When a compiled call is recorded, replayed or run plainly; the recorder here runs the call again instead of a CUDA graph."""

import pytest
import torch

from dynamotor.base.events import counters
from dynamotor.runtime.cuda_graphs import RECORDINGS, WARM_UP, GraphedCall


class Recorder:
    """Replays by running the recorded call again, into the memory of its first results."""

    def __init__(self):
        self.current = 1
        self.foreign = None

    def record(self, call):
        results = call()

        def replay():
            for old, new in zip(results, call(), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        return replay, results

    def stream(self):
        return self.current

    def is_ours(self, tensor):
        return tensor is not self.foreign


@pytest.fixture(autouse=True)
def _count():
    counters["cudagraphs"].clear()


def graphed(call, static=(), mutated=(), recorder=None):
    return GraphedCall(call, frozenset(static), frozenset(mutated), torch.device("cpu"), recorder or Recorder())


def warm(call, *inputs):
    for _ in range(WARM_UP):
        call(*inputs)
    return call


def test_replays_follow_new_inputs_and_the_parameters_contents():
    w = torch.randn(4)
    call = warm(graphed(lambda w, x: (w * x, 3, None), static=[0]), w, torch.randn(4))
    for _ in range(3):
        x = torch.randn(4)
        w.add_(1)
        result, three, nothing = call(w, x)
        assert torch.equal(result, w * x) and (three, nothing) == (3, None)
        del result
    assert counters["cudagraphs"] == {"recorded": 1, "replayed": 3}


def test_results_that_are_still_held_are_never_overwritten():
    call = warm(graphed(lambda x: (x + 1,)), torch.zeros(3))
    first = call(torch.zeros(3))[0]
    second = call(torch.ones(3))[0]
    assert first.tolist() == [1, 1, 1] and second.tolist() == [2, 2, 2]
    view = first[1:]
    del first
    assert call(torch.ones(3))[0].tolist() == [2, 2, 2] and view.tolist() == [1, 1]
    del view
    call(torch.ones(3))
    assert counters["cudagraphs"]["what the last replay gave is still in use"] == 2
    assert counters["cudagraphs"]["replayed"] == 2


def test_a_backward_reads_what_its_forward_left_in_place():
    forward = warm(graphed(lambda x: (x * 2, x.exp())), torch.zeros(3))
    backward = graphed(lambda saved, g: (saved * g,))
    for _ in range(WARM_UP + 3):
        x, g = torch.randn(3), torch.randn(3)
        out, saved = forward(x)
        grad, = backward(saved, g)
        torch.testing.assert_close(grad, x.exp() * g)
        del out, saved, grad
    assert counters["cudagraphs"]["recorded"] == 2 and counters["cudagraphs"]["replayed"]
    assert [i for i, _ in backward._recording.copied] == [1] and [i for i, _ in backward._recording.fixed] == [0]
    before = counters["cudagraphs"]["an input comes from a call that was not replayed"]
    x, g = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(backward(x.exp(), g)[0], x.exp() * g)
    assert counters["cudagraphs"]["an input comes from a call that was not replayed"] == before + 1


def test_a_parameter_that_moves_is_recorded_anew_and_one_that_never_rests_is_left_alone():
    call = warm(graphed(lambda w: (w * 2,), static=[0]), torch.ones(2))
    kept = []
    for n in range(2 * RECORDINGS + 4):
        kept.append(torch.full((2,), float(n)))
        assert call(kept[-1])[0].tolist() == [2 * n, 2 * n]
    assert counters["cudagraphs"]["recorded"] == RECORDINGS and call._refused == "parameters move between calls"


@pytest.mark.parametrize("reason", ["is changed in place", "an input lies on", "an expanded input", "recording failed: no"])
def test_what_cannot_be_recorded_runs_plainly_and_says_why(reason):
    recorder, x = Recorder(), torch.ones(3)
    if "lies on" in reason:
        recorder.foreign = x
    if "expanded" in reason:
        x = torch.ones(1).expand(3)
    if "failed" in reason:
        def refuse(call):
            raise RuntimeError("no")
        recorder.record = refuse
    call = warm(graphed(lambda x: (x + 1,), mutated=[0] if "changed" in reason else (), recorder=recorder), x)
    before = counters["fallback"]["cudagraphs"]
    for _ in range(3):
        assert call(x)[0].tolist() == [2, 2, 2]
    assert reason in call._refused and counters["fallback"]["cudagraphs"] == before + 1


def test_another_stream_runs_plainly():
    recorder = Recorder()
    call = warm(graphed(lambda x: (x + 1,), recorder=recorder), torch.ones(1))
    call(torch.ones(1))
    recorder.current = 2
    assert call(torch.ones(1))[0].tolist() == [2] and counters["cudagraphs"]["another stream"] == 1
