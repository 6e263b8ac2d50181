"""The share of torch calls that ran compiled is stated, what eager ran is listed, and a low share gives one warning."""

import copy
import warnings

import pytest
import torch

import dynamotor
from dynamotor.base.compat import count_function_modes
from dynamotor.base.events import collect, counters
from dynamotor.capture.compiled_share import WATCHED_GRAPHS, Share


@dynamotor.disable
def left(x):
    return x.sin().cos().exp().tanh()


def mostly_eager(x):
    return left(x.relu()) * 2


def mostly_compiled(x):
    for _ in range(8):
        x = x.relu() * 2
    return left(x).abs() + 1


@pytest.fixture(autouse=True)
def _fresh():
    """No warning depends on the speed of this machine."""
    dynamotor.reset()
    with dynamotor.config.patch(warn_slower=False):
        yield


def told(compiled, *args, calls=12):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(calls):
            compiled(*args)
    return [w for w in found if issubclass(w.category, (dynamotor.EagerWarning, dynamotor.RecompileWarning))]


def test_a_low_share_gives_one_warning_at_the_users_line():
    (warning,) = told(dynamotor.compile(mostly_eager), torch.ones(3))
    assert warning.filename == __file__
    assert "33% of the torch calls ran compiled" in str(warning.message) and "DM222" in str(warning.message)
    assert counters["compiled share"]["mostly_eager"] == 33


def test_a_high_share_gives_none():
    assert not told(dynamotor.compile(mostly_compiled), torch.ones(3))
    assert counters["compiled share"]["mostly_compiled"] == 81
    assert not told(dynamotor.compile(torch.relu), torch.ones(3))


def test_a_whole_graph_is_not_watched():
    compiled = dynamotor.compile(lambda x: x.relu() * 2)
    assert not told(compiled, torch.ones(3))
    assert counters["compiled share"]["test_a_whole_graph_is_not_watched.<locals>.<lambda>"] == 100
    assert compiled.miss.__self__.share.calls == 0


def test_what_an_explanation_says():
    compiled = dynamotor.compile(mostly_eager)
    for _ in range(12):  # then it is watched no more
        compiled(torch.ones(3))
    found = dynamotor.explain(compiled)(torch.ones(3))
    assert found.counts.compiled == 2 and list(found.counts.eager.values()) == [4] and found.share == 1 / 3
    text = str(found)
    assert "left to eager: 4 torch calls: [DM222]" in text and "seconds outside of graphs" in text
    assert str(dynamotor.explain(lambda x: x * 2)(torch.ones(3))).splitlines()[1].startswith("100%")


def test_compiled_code_inside_of_code_that_runs_natively_is_not_counted():
    other = dynamotor.compile(lambda x: x.relu().sin().cos())

    @dynamotor.disable
    def left_too(x):
        return other(x)

    class Reader:
        @property
        def value(self):
            return inner(left_too(torch.ones(3)))

    def inner(x):
        return x.relu().exp().sin()

    reader = Reader()
    compiled = dynamotor.compile(lambda x: x.relu() + reader.value)
    found = [dynamotor.explain(compiled)(torch.ones(3)) for _ in range(2)]
    assert all(each.counts.eager.total() <= 1 for each in found), found[0].counts
    assert counters["frames"]["mode"] == 0


def test_a_function_that_is_compiled_no_more():
    def program(x, n):
        return x.relu().sin() + len(range(n))

    compiled, lengths = dynamotor.compile(program), iter(range(9))
    with dynamotor.config.patch(cache_size_limit=2):
        found = told(lambda: compiled(torch.ones(3), next(lengths)), calls=9)
    assert ["ran compiled" in str(w.message) for w in found] == [
        False,
        True,
    ]  # first: why it is compiled no more
    assert counters["compiled share"]["test_a_function_that_is_compiled_no_more.<locals>.program"] == 0


def test_a_mode_of_the_users_is_left_alone():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    compiled = dynamotor.compile(mostly_eager)
    with Mode():
        compiled(torch.ones(3))
    assert len(seen) == 7  # with `ones`


def test_graphs_that_would_run_op_by_op_are_refused():
    def refuse(gm, inputs):
        from dynamotor.base.events import fall_back

        fall_back("aot.test", what="graph", reason="there is no kernel")
        return gm.forward

    dynamotor.compile(lambda x: x + 1, backend=refuse)(torch.ones(3))
    with pytest.raises(dynamotor.CaptureError, match="there is no kernel") as error:
        dynamotor.compile(lambda x: x + 1, backend=refuse, fullgraph=True)(torch.ones(3))
    assert error.value.code == "DM255"


def test_only_the_first_calls_are_watched():
    with collect("share") as events:
        compiled = dynamotor.compile(mostly_eager)
        for _ in range(9):
            compiled(torch.ones(3))
    assert [event.data["name"] for event in events] == ["mostly_eager"] * 2
    assert not compiled.miss.__self__.share.watching


def test_regions_that_are_open_at_a_break_end_as_in_eager() -> None:
    """Counting adds no mode above a region's: its end would take that away."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.device("meta"):
            torch.set_num_threads(torch.get_num_threads())
            inside = torch.ones(2)
        return inside, torch.ones(2) + x

    compiled = dynamotor.compile(fn, backend="eager")
    for _ in range(3):
        assert [t.device.type for t in compiled(torch.ones(2))] == ["meta", "cpu"]
        assert torch._C._len_torch_function_stack() == 0


class _Inner:
    """A frame hook that gives the function how graphs are called within it, and counts the modes at its end."""

    def call(self, function, *args, around=None):
        function(around or (lambda f, *args: f(*args)), *args)
        return count_function_modes()


def test_a_native_call_that_is_a_long_loop_is_watched_for_a_while():
    share = Share("loop", lambda: ())
    run = share.natively("a break", _Inner())

    def loop(call_graph, count):
        for _ in range(count):
            call_graph(torch.relu, torch.ones(1))

    assert run(loop, WATCHED_GRAPHS - 1) == 1 and share.watching
    assert run(loop, 2) == 0 and not share.watching and count_function_modes() == 0
    assert run(loop, 2) == 0


@pytest.mark.slow  # PyTorch imports its own compiler for the shapes of some ops
def test_a_check_inside_a_distribution_leaves_only_the_branch_to_eager():
    def density(x, s):
        covariance = torch.eye(4) * s[..., None]
        # `torch.compile` turns the checks of distributions off for the rest of the process.
        return torch.distributions.MultivariateNormal(x, covariance, validate_args=True).log_prob(x + 1)

    x, s = torch.randn(3, 4), torch.rand(3, 4) + 1
    compiled = dynamotor.compile(density, backend="eager")
    torch.testing.assert_close(compiled(x, s), density(x, s))
    assert counters["compiled share"][density.__qualname__] >= 95
    torch.testing.assert_close(compiled(x * 2, s + 1), density(x * 2, s + 1))
    with pytest.raises(ValueError, match="PositiveDefinite"):
        compiled(x, -s)


@pytest.mark.regression
def test_parameters_that_are_made_before_a_graph_count_as_eager() -> None:
    model = torch.nn.Linear(3, 3)

    def copied(x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(model)(x)

    compiled = dynamotor.compile(copied, backend="eager")
    compiled(torch.ones(3))
    counts = dynamotor.explain(compiled)(torch.ones(3)).counts
    assert counts.eager == {"a parameter that the function makes is allocated before the graph": 2}


class _Encoder(torch.nn.Module):
    """PyTorch's encoder takes padded rows out and puts zeros there, unless a torch function mode is on."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        y = x + 1
        y.sum().item()
        return self.layers(y, src_key_padding_mask=torch.arange(5).expand(2, 5) > 2) * 2


@dynamotor.disable
def _run_disabled(model, x):
    return model(x)


def _asks(x):
    y = x.sum().item() + x
    return y * 2 if torch.overrides.has_torch_function((x,)) else y * 3


def _eager_asks(x):
    return dynamotor.disable(_asks)(x)


def programs_that_see_modes():
    model = _Encoder().eval()
    x = torch.randn(2, 5, 4)
    yield "a model behind a break", model, (x,)
    yield (
        "layers alone",
        lambda x, mask: model.layers(x, src_key_padding_mask=mask),
        (x, torch.ones(2, 5) < 0),
    )
    yield "a model of a disabled function", lambda x: _run_disabled(model, x) + 1, (x,)
    yield "a model among arguments", lambda model, x: _run_disabled(model, x) + 1, (model, x)
    yield "a question of the program", _asks, (x,)
    yield "a question in a disabled function", _eager_asks, (x,)


@pytest.mark.regression
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", range(6))
def test_code_that_answers_by_the_modes_that_are_on_is_not_counted(place):
    name, fn, args = list(programs_that_see_modes())[place]
    compiled = dynamotor.compile(fn)
    with torch.no_grad():
        want = fn(*args)
        for _ in range(10):  # from the ninth call on nothing is counted
            torch.testing.assert_close(compiled(*args), want, msg=name)
