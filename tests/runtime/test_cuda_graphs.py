"""When a compiled call is recorded, replayed or run plainly; the recorder here runs the call again instead of
a CUDA graph.
"""

import ctypes
import threading

import fake_cuda
import pytest
import torch
from warned import text_of

from dynamotor.base.events import counters, forget_warnings
from dynamotor.graph.spec import write
from dynamotor.runtime import cuda_graphs
from dynamotor.runtime.cuda_graphs import (
    ALTERNATES,
    MOST_KEPT,
    RECORDINGS,
    SMALL,
    TINY,
    WARM_UP,
    GraphedCall,
    GraphedSizes,
    in_graph_memory,
)


def at_its_address(value):
    """The same memory as a tensor that does not count among its owners: a graph knows addresses only."""
    if not isinstance(value, torch.Tensor):
        return value
    raw = (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
    return torch.frombuffer(raw, dtype=value.dtype).as_strided(value.shape, value.stride())


class Recorder:
    """Replays by running the recorded call again, into the memory of its first results."""

    def __init__(self):
        self.current = 1
        self.foreign = None

    def record(self, call):
        arguments = [
            x for cell in call.__closure__ if isinstance(cell.cell_contents, list) for x in cell.cell_contents
        ]
        before = [(x, x.clone()) for x in arguments if isinstance(x, torch.Tensor) and 0 not in x.stride()]
        results = call()
        for x, old in before:  # recording runs nothing
            x.copy_(old)
        for cell in call.__closure__:
            if isinstance(cell.cell_contents, list):
                cell.cell_contents[:] = [at_its_address(x) for x in cell.cell_contents]

        def replay():
            for old, new in zip(results, call(), strict=True):
                if isinstance(old, torch.Tensor):
                    write(old, new)

        return replay, results, None

    def stream(self):
        return self.current

    def is_ours(self, tensor):
        return tensor is not self.foreign


@pytest.fixture(autouse=True)
def _count():
    counters["cudagraphs"].clear()


def graphed(call, static=(), mutated=(), recorder=None, n_copied=0):
    return GraphedCall(
        call, frozenset(static), frozenset(mutated), torch.device("cpu"), n_copied, recorder or Recorder()
    )


def warm(call, *inputs):
    for _ in range(WARM_UP):
        call(*inputs)
    return call


def test_recordings_are_kept_by_sizes_and_made_for_those_that_come_again():
    call = GraphedSizes(lambda: graphed(lambda n, x: (x * n,)), symbols=[0], most=2)
    for n in (2, 3, 2, 3, 2, 3, 2):
        x = torch.randn(n)
        assert torch.equal(call(n, x)[0], x * n)
    assert counters["cudagraphs"] == {"recorded": 2, "replayed": 3}
    for n in (4, 3, 2):  # the least recent ones make room, and come back as new
        call(n, torch.randn(n))
    assert counters["cudagraphs"] == {"recorded": 2, "replayed": 3}


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


def test_expanded_inputs_and_results_are_copied_as_they_lie():
    call = warm(
        graphed(lambda x: (x + 1, x.sum(0)[:1].expand(3)), n_copied=2), torch.randn(2, 1).expand(2, 4)
    )
    for _ in range(3):
        x = torch.randn(2, 1).expand(2, 4)
        result, expanded = call(x)
        assert torch.equal(result, x + 1) and torch.equal(expanded, x.sum(0)[:3])
        assert expanded.stride() == (0,)
    assert counters["cudagraphs"] == {"recorded": 1, "replayed": 3}


def test_results_that_are_still_held_are_never_overwritten():
    call = warm(graphed(lambda x: (x + 1,)), torch.zeros(3))
    held = [call(torch.full((3,), float(n)))[0] for n in range(ALTERNATES + 2)]
    assert [h.tolist() for h in held] == [[n + 1.0] * 3 for n in range(ALTERNATES + 2)]
    assert counters["cudagraphs"] == {
        "recorded": ALTERNATES,
        "replayed": ALTERNATES,
        "results of the last replay are still in use": 2,
    }
    view = held[0][1:]
    held.clear()
    assert call(torch.full((3,), 9.0))[0].tolist() == [10, 10, 10] and view.tolist() == [1, 1]
    assert counters["cudagraphs"]["recorded"] == ALTERNATES


def test_a_loop_that_keeps_its_last_result_takes_two_recordings_in_turns():
    call = warm(graphed(lambda x: (x * 2,)), torch.zeros(3))
    for n in range(6):
        out = call(torch.full((3,), float(n)))[0]
        assert out.tolist() == [2.0 * n] * 3
    assert counters["cudagraphs"] == {"recorded": 2, "replayed": 6}


def test_small_results_of_the_users_are_copied_out_and_block_nothing():
    call = warm(graphed(lambda x: (x.sum(), x * 2), n_copied=1), torch.zeros(3))
    losses = []
    for n in range(5):
        loss, saved = call(torch.full((3,), float(n)))
        losses.append(loss)
        assert in_graph_memory(saved) and not in_graph_memory(loss)
        del saved
    assert [x.item() for x in losses] == [0, 3, 6, 9, 12] and counters["cudagraphs"] == {
        "recorded": 1,
        "replayed": 5,
    }
    big = warm(graphed(lambda x: (x + 1,), n_copied=1), torch.zeros(SMALL))
    assert in_graph_memory(big(torch.zeros(SMALL))[0])


def test_what_was_given_comes_back_itself():
    w, x = torch.ones(2), torch.ones(2)
    call = warm(graphed(lambda w, x: (w, x, w[1:], x + 1), static=[0], n_copied=4), w, x)
    for _ in range(3):
        x = torch.randn(2)
        a, b, c, d = call(w, x)
        assert a is w and b is x and c.data_ptr() != w.data_ptr() and torch.equal(d, x + 1)


def test_numbers_are_part_of_a_recording():
    call = warm(graphed(lambda x, n: (x * n,)), torch.ones(2), 3)
    assert call(torch.ones(2), 3)[0].tolist() == [3, 3]
    assert call(torch.ones(2), 4)[0].tolist() == [4, 4] and call(torch.ones(2), 3.0)[0].tolist() == [3, 3]
    assert counters["cudagraphs"]["recorded"] == 3


def test_inference_mode_has_recordings_of_its_own():
    call = graphed(lambda x: (x + 1,))
    for _ in range(2):
        with torch.inference_mode():
            for _ in range(4):
                assert call(torch.ones(2))[0].is_inference()
        with torch.no_grad():
            assert not call(torch.ones(2))[0].is_inference()
    assert counters["cudagraphs"]["recorded"] == 2


def test_two_threads_at_once_get_results_of_their_own():
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def record(self, call):
            replay, results, kept = super().record(call)

            def slowly():
                inside.set()
                go_on.wait(10)
                replay()

            return slowly, results, kept

    call = warm(graphed(lambda x: (x + 1,), recorder=Slow()), torch.zeros(2))
    found = []
    thread = threading.Thread(target=lambda: found.append(call(torch.ones(2))[0]))
    thread.start()
    assert inside.wait(10)
    assert (
        call(torch.zeros(2))[0].tolist() == [1, 1]
        and counters["cudagraphs"]["another thread is in this call"] == 1
    )
    go_on.set()
    thread.join()
    assert found[0].tolist() == [2, 2]


def test_gradients_that_are_kept_and_added_to_are_left_alone():
    backward = warm(graphed(lambda g: (g * 2, g * 3)), torch.zeros(2))
    total = None
    for n in range(1, 4):
        a, b = backward(torch.full((2,), float(n)))
        total = (
            a if total is None else total.add_(a)
        )  # as autograd does: the first one is kept, others are added to it
        del a, b
    assert total.tolist() == [12, 12] and counters["cudagraphs"]["replayed"] == 3


def test_a_call_with_too_much_to_copy_runs_plainly():
    large = torch.zeros(1).expand(cuda_graphs.MOST_COPIED // 4 + 1)  # without its memory
    call = warm(graphed(lambda x: (x[:3] + 1,)), large)
    assert call(large)[0].tolist() == [1, 1, 1] and counters["cudagraphs"] == {"too much to copy": 1}


def test_a_backward_reads_what_its_forward_left_in_place():
    forward = warm(graphed(lambda x: (x * 2, x.exp())), torch.zeros(3))
    backward = graphed(lambda saved, g: (saved * g,))
    for _ in range(WARM_UP + 3):
        x, g = torch.randn(3), torch.randn(3)
        out, saved = forward(x)
        (grad,) = backward(saved, g)
        torch.testing.assert_close(grad, x.exp() * g)
        del out, saved, grad
    assert counters["cudagraphs"]["recorded"] == 2 and counters["cudagraphs"]["replayed"]
    (recording,) = backward._recordings
    assert [i for i, _ in recording.copied] == [1] and recording.fixed == [0]
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
    assert counters["cudagraphs"]["recorded"] == RECORDINGS and "move between calls" in call._refused


@pytest.mark.parametrize("reason", ["an input is on", "recording failed: no"])
def test_what_cannot_be_recorded_runs_plainly_and_says_why(reason):
    recorder, x = Recorder(), torch.ones(3)
    if "is on" in reason:
        recorder.foreign = x
    if "failed" in reason:

        def refuse(call):
            raise RuntimeError("no")

        recorder.record = refuse
    call = warm(graphed(lambda x: (x + 1,), recorder=recorder), x)
    before = counters["fallback"]["cudagraphs"]
    for _ in range(3):
        assert call(x)[0].tolist() == [2, 2, 2]
    assert reason in call._refused and counters["fallback"]["cudagraphs"] == before + 1


def test_a_small_input_that_is_written_is_copied_back():
    """At any address; its version moves as by an op in place."""
    call = graphed(lambda count, x: (count.add_(1) * x,), mutated=[0])
    counts = [torch.full((1,), 4.0) for _ in range(WARM_UP + 3)]  # each at a place of its own
    for count in counts[:WARM_UP]:
        call(count, torch.ones(1))
    for count in counts[WARM_UP:]:
        x, version = torch.full((1,), 2.0), count._version
        assert call(count, x)[0].item() == 10 and count.item() == 5 and count._version > version
    assert counters["cudagraphs"] == {"recorded": 1, "replayed": 3}


def test_tiny_inputs_that_are_written_are_copied_wherever_they_are():
    """As the counters of a cache's layers, which have other places in each cache."""
    place, given = torch.zeros(2), []

    def step(count, steps):
        given.append(count.data_ptr())
        return (count.add_(1) * 2, steps.add_(1) + 0)

    call = warm(graphed(step, mutated=[0, 1], n_copied=2), place[0], torch.tensor(1))
    for count in (place[0], place[1]):
        steps, before = torch.tensor(4), count.item()
        assert [r.item() for r in call(count, steps)] == [2 * before + 2, 5]
        assert [r.item() for r in call(count, steps)] == [2 * before + 4, 6]
        assert (count.item(), steps.item()) == (before + 2, 6)
    assert counters["cudagraphs"] == {"recorded": 1, "replayed": 4} and given[-1] not in (
        place[0].data_ptr(),
        place[1].data_ptr(),
    )


def test_a_small_input_that_stays_is_written_at_its_place():
    count, given = torch.zeros(TINY), []

    def step(count):
        given.append(count.data_ptr())
        return (count.add_(1)[:1] * 2,)

    call = warm(graphed(step, mutated=[0], n_copied=1), count)
    results = [call(count)[0].item() for _ in range(3)]
    assert results == [6, 8, 10] and count[7].item() == 5 and set(given) == {count.data_ptr()}
    other = torch.zeros(TINY)
    assert [call(other)[0].item() for _ in range(2)] == [2, 4]
    assert (other[7].item(), count[7].item()) == (2, 5)


def test_a_large_input_that_is_written_is_written_at_its_place():
    """As a decoder's cache is, by one row a call; another cache makes another recording."""
    rows = SMALL // 4 + 1

    def step(cache, position, x):
        cache[position] = x
        return (cache[:2].sum() + x,)

    call = warm(graphed(step, mutated=[0], n_copied=1), torch.zeros(rows), torch.tensor(0), torch.tensor(1.0))
    for start in (1.0, 5.0):
        cache = torch.zeros(rows)
        for i in range(3):
            result = call(cache, torch.tensor(i), torch.tensor(start + i))[0]
            assert result.item() == sum(start + k for k in range(min(i, 1) + 1)) + start + i
            assert cache[i].item() == start + i
    assert counters["cudagraphs"] == {"recorded": 2, "replayed": 6}


@pytest.mark.parametrize("large", [False, True])
def test_recordings_of_caches_that_come_back_to_their_places_are_kept_while_they_are_small(large):
    more = MOST_KEPT // 4 + 1 if large else 1
    caches = [torch.zeros(SMALL) for _ in range(4)]

    def step(cache):
        return cache.add_(1)[:1] * 2, cache[:1].expand(more) + 1

    call = warm(graphed(step, mutated=[0], n_copied=1), torch.zeros(SMALL))

    def check(cache):
        before = cache[5].item()
        assert call(cache)[0].item() == 2 * (before + 1) and cache[5].item() == before + 1

    for cache in [*caches[:3], caches[0]]:
        check(cache)
    assert counters["cudagraphs"]["recorded"] == (4 if large else 3)
    check(caches[3])  # takes the room of the one that was last replayed longest ago
    for n in (0, 2, 3):
        check(caches[n])
    assert counters["cudagraphs"]["recorded"] == (8 if large else 4)


def test_inputs_that_are_written_and_move_each_time_are_said(recwarn):
    forget_warnings()
    call = warm(graphed(lambda cache: (cache.add_(1)[:1] * 2,), mutated=[0], n_copied=1), torch.zeros(SMALL))
    kept = []
    for _ in range(RECORDINGS + 3):
        kept.append(torch.zeros(SMALL))
        assert call(kept[-1])[0].item() == 2.0 and kept[-1][5].item() == 1
    assert "move between calls" in call._refused and "not replayed as CUDA graphs" in text_of(recwarn)


def test_another_stream_has_a_recording_of_its_own():
    recorder = Recorder()
    call = warm(graphed(lambda x: (x + 1,), recorder=recorder), torch.ones(1))
    call(torch.ones(1))
    recorder.current = 2
    assert call(torch.ones(1))[0].tolist() == [2] and counters["cudagraphs"] == {"recorded": 2, "replayed": 2}


def test_the_recorder_of_a_gpu_records_on_a_stream_of_its_own_and_gives_the_users_back(monkeypatch):
    graphs = fake_cuda.install(monkeypatch)
    user = graphs.current[0]
    recorder = cuda_graphs.CudaRecorder(torch.device("cuda", 0))
    monkeypatch.setattr(cuda_graphs.CudaRecorder, "_streams", {})
    x = torch.ones(2)
    replay, results, scratch = recorder.record(lambda: (x + 1,))
    assert results[0].tolist() == [2, 2] and scratch == () and graphs.current[0] is user
    replay()
    assert graphs.replayed == 1 and recorder.stream() == user.cuda_stream and not recorder.is_ours(x)

    def fails():
        graphs.current[0] = graphs.streams[-1]  # as a recording that CUDA refuses leaves it
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        recorder.record(fails)
    assert graphs.current[0] is user and len(set(graphs.streams)) == 1
    graphs.current[0] = fake_cuda.Stream()  # another stream of the user's
    recorder.record(lambda: (x,))
    assert len(set(graphs.streams)) == 2 and len(graphs.emptied) == 2
    recorder.record(lambda: (x,))
    assert len(graphs.emptied) == 2  # one after another that succeeded frees no memory
