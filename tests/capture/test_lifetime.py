"""Objects that a compiled callable keeps alive, and how it behaves at the limit of its entries."""

import contextlib
import gc
import weakref

import pytest
import torch

import dynamotor
from dynamotor.base.events import collect, counters


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_stays():
    """No collection of these tests looks through what other tests have imported."""
    gc.collect()
    gc.freeze()


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        print(end="")
        return y.relu()


def call_once(compiled, train):
    x = torch.randn(3, 4)
    out = compiled(x)
    if train:
        out.sum().backward()
    return weakref.ref(x), weakref.ref(out)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Broken])
def test_arguments_and_results_are_freed(backend, kind):
    compiled = dynamotor.compile(kind(4, 4) if kind is torch.nn.Linear else kind(), backend=backend)
    for train in (False, True, False):
        found = call_once(compiled, train)
        gc.collect()
        assert [ref() for ref in found] == [None, None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_a_dropped_model_is_freed(backend):
    model = Broken()
    compiled = dynamotor.compile(model, backend=backend)
    call_once(compiled, True)
    found = [weakref.ref(model), weakref.ref(model.linear.weight), weakref.ref(compiled._dynamotor)]
    del model, compiled
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_a_model_given_as_argument_is_freed():
    @dynamotor.compile(backend="eager")
    def step(model, x):
        print(end="")
        return model(x).sum()

    model = torch.nn.Linear(3, 3)
    step(model, torch.ones(2, 3))
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_nor_are_its_parameters_kept(backend):
    compiled = dynamotor.compile(lambda model, x: model(x), backend=backend)
    model, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    weights = [weakref.ref(p) for p in model.parameters()]
    for _ in range(2):
        assert torch.equal(compiled(model, x), model(x))
    del model
    gc.collect()
    assert [ref() for ref in weights] == [None, None]
    again = torch.nn.Linear(4, 4)
    assert torch.allclose(compiled(again, x), again(x))


def test_at_the_limit_calls_run_eager_and_reasons_are_looked_for_once():
    def program(x, k):
        return x + len(k)

    dynamotor.reset()
    compiled = dynamotor.compile(program, backend="eager")
    with dynamotor.config.patch(cache_size_limit=3), collect("recompile") as events:
        for n in range(8):
            assert compiled(torch.zeros(1), "a" * n).item() == n
        assert len(compiled.entries) == 3 and len(events) == 3
        assert counters["frames"]["cache_limit"] == 5
        assert compiled(torch.zeros(1), "a").item() == 1, "entries go on serving the calls that they fit"
        assert counters["frames"]["cache_limit"] == 5


@pytest.mark.parametrize("settings", [{"fullgraph": True}, {"options": {"strict": True}}], ids=str)
def test_more_variants_than_the_limit_are_an_error_where_eager_may_not_run(settings):
    compiled = dynamotor.compile(lambda x, k: x + len(k), backend="eager", **settings)
    with dynamotor.config.patch(cache_size_limit=3):
        for n in range(3):
            assert compiled(torch.zeros(1), "a" * n).item() == n
        for n in (3, 4):
            with pytest.raises(dynamotor.CaptureError, match="as many variants as cache_size_limit") as error:
                compiled(torch.zeros(1), "a" * n)
            assert error.value.code == "DM256"
        assert compiled(torch.zeros(1), "a").item() == 1, "entries go on serving the calls that they fit"


def test_few_programs_are_kept_of_long_loops_of_changing_lengths(monkeypatch):
    def program(x):
        for column in range(x.shape[0]):
            x = x.sin() + column
        return x

    monkeypatch.setattr("dynamotor.capture.frontend.LONG", 10)
    compiled = dynamotor.compile(program, backend="eager")
    with pytest.warns(dynamotor.RecompileWarning, match="differs between calls and is needed as a number"):
        for n in (*range(7, 15), *range(7, 15)):
            torch.testing.assert_close(compiled(torch.ones(n)), program(torch.ones(n)))
    assert len(compiled.entries) <= 4
    for n in range(2, 5):  # short ones
        torch.testing.assert_close(compiled(torch.ones(n)), program(torch.ones(n)))


def test_more_shapes_are_kept_where_the_user_says_that_they_change():
    def program(x):
        return x + len(str(x.shape[0]))  # text needs the number: each size is compiled for

    for dynamic, kept in ((None, 3), (False, 3), (True, 9)):
        compiled = dynamotor.compile(program, backend="eager", dynamic=dynamic)
        with dynamotor.config.patch(cache_size_limit=3):
            for n in range(1, 10):
                assert compiled(torch.zeros(n)).sum() == n
        assert len(compiled.entries) == kept


def test_reset_forgets_the_rest_of_broken_functions_too():
    compiled = dynamotor.compile(Broken(), backend="eager")
    x = torch.randn(3, 4)
    compiled(x)
    with collect("capture") as events:
        compiled(x)
        assert not events
        dynamotor.reset()
        compiled(x)
    assert len(events) == 2


def test_a_model_that_breaks_in_a_loop_is_freed():
    class Loops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(4):
                x = self.linear(x)
                print(end="")
            return x

    model = Loops()
    compiled = dynamotor.compile(model, backend="eager")
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))
    found = weakref.ref(model)
    del model, compiled
    gc.collect()
    assert found() is None


def test_what_a_frame_held_that_an_exception_left_is_given_back_with_the_exception():
    """The capture's own exceptions held their frames, and those all callers, until a garbage collection."""
    held = []

    class Held:
        pass

    def raises(x):
        local = Held()
        held.append(weakref.ref(local))
        raise ValueError(x.shape)

    def f(x):
        try:
            raises(x)
        except ValueError as error:
            raise KeyError(1) from error

    compiled = dynamotor.compile(f, backend="eager")
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(KeyError):
                compiled(torch.ones(3))
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_what_a_local_class_closes_over_is_freed(backend):
    """A class was remembered as not trusted, with the functions of its body and their cells."""

    def run():
        linear = torch.nn.Linear(4, 4)

        class Local(torch.nn.Module):
            def forward(self, x):
                return linear(x)

        dynamotor.compile(Local(), backend=backend)(torch.randn(3, 4))
        return weakref.ref(linear)

    linear = run()
    gc.collect()
    assert linear() is None


@contextlib.contextmanager
def region():
    yield 2


def check_that_a_first_call_lets_go(program, backend):
    """Its input is free as soon as the caller lets go of it, without the collector."""
    compiled = dynamotor.compile(program, backend=backend)
    gc.disable()
    try:
        x = torch.ones(3)
        given = weakref.ref(x)
        compiled(x)
        del x
        assert given() is None
    finally:
        gc.enable()


def test_a_first_call_leaves_nothing_to_the_collector():
    """A generator knew the frames that it was made in, which knew it."""

    def program(x):
        with region() as k:
            y = sum(v * k for v in [x, x + 1])
            print(end="")
            return y + 1

    check_that_a_first_call_lets_go(program, "eager")


def test_a_number_that_is_handed_on_leaves_nothing_to_the_collector():
    """It knew the frames that it was read in, which held it."""

    def program(x):
        n = [x.sum().long().item()]
        return torch.tensor([0 + n[0]]) / x.shape[0]

    check_that_a_first_call_lets_go(program, lambda gm, inputs: gm.forward)


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(4, 4), Broken])
def test_the_last_reference_frees_a_model(backend, kind, _no_collector):
    model = kind()
    compiled = dynamotor.compile(model, backend=backend)
    call_once(compiled, True)
    weight = weakref.ref(next(model.parameters()))
    del model, compiled
    assert weight() is None


def function_of(model):
    return dynamotor.compile(lambda x: model(x))


def test_the_last_reference_frees_a_function(_no_collector):
    model = torch.nn.Linear(4, 4)
    compiled = function_of(model)
    call_once(compiled, True)
    weight = weakref.ref(model.weight)
    del model, compiled
    assert weight() is None


def test_what_was_taken_of_a_compiled_model_outlives_it(_no_collector):
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    expected, compiled = model(x), dynamotor.compile(model)
    call, forward = compiled.__call__, compiled.forward
    del model, compiled
    torch.testing.assert_close((call(x), forward(x)), (expected, expected))


def test_a_model_that_holds_its_compiled_self_is_collected():
    model = torch.nn.Linear(4, 4)
    model.fast = dynamotor.compile(model)
    model.fast(torch.randn(2, 4))
    weight = weakref.ref(model.weight)
    del model
    gc.collect()
    assert weight() is None
