"""Cached helpers and NumPy on plain numbers: answered at trace time, asked again where the answer may
change.
"""

from __future__ import annotations

import enum
import functools
import os
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

x = torch.randn(4, 6)
factor = 2.0


@functools.lru_cache(None)
def places(n, step=1):
    return [i * step for i in range(n)]


@functools.cache
def scale():
    return factor


@functools.lru_cache(1)
def latest(n):
    return (n, factor)


def uses_caches(x):
    return x * scale() + sum(places(5, step=2)) + latest(3)[0]


def sqrt_of_two(x):
    return x * np.sqrt(2.0) + np.float32(0.5) * x - np.log(x.shape[-1])


def sizes(x):
    return (
        x.reshape(int(np.prod(x.shape[:1])), np.prod(x.shape[1:]))
        + np.int64(3)
        + np.ceil(x.shape[0] / 3).item()
    )


def chosen(x):
    return x + 1 if np.isclose(np.mean([1.0, 2.0]), 1.5) and np.max((1, 2)) == 2 else x - 1


class Lazy:
    """An operator as GPyTorch has them: it takes torch's functions over, and its methods keep their results."""

    @classmethod
    def __torch_function__(cls, *_):
        raise AssertionError

    def kept(self, x, **kwargs):
        key = pickle.dumps(kwargs)
        cache = self.__dict__.setdefault("cache", {})
        if key not in cache:
            cache[key] = x * 2
        return cache[key]


def keeps(x):
    lazy = Lazy()
    return lazy.kept(x) + lazy.kept(x) if torch.is_tensor(x) and not torch.is_tensor(lazy) else x


@pytest.mark.parametrize("function", [uses_caches, sqrt_of_two, sizes, chosen, keeps])
def test_in_one_graph(function):
    found = dynamotor.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(found, function(x))


def test_a_cache_that_is_cleared_is_asked_again():
    global factor
    compiled = dynamotor.compile(uses_caches)
    try:
        compiled(x)
        factor = 5.0
        torch.testing.assert_close(compiled(x), uses_caches(x))
        scale.cache_clear()
        torch.testing.assert_close(compiled(x), uses_caches(x))
        assert scale() == 5.0
    finally:
        factor = 2.0
        scale.cache_clear()


def test_what_a_cached_function_returns_may_be_changed():
    def adds(x):
        places(3).append(7)
        return x + sum(places(3))

    places.cache_clear()
    expected = [adds(x) for _ in range(3)]
    places.cache_clear()
    compiled = dynamotor.compile(adds)
    torch.testing.assert_close([compiled(x) for _ in range(3)], expected)


def test_a_cached_function_that_raises():
    @functools.cache
    def refuses(n):
        raise KeyError(n)

    def function(x):
        try:
            return x + refuses(3)
        except KeyError as error:
            return x - error.args[0]

    torch.testing.assert_close(dynamotor.compile(function)(x), function(x))


def test_a_cached_function_of_tensors_breaks():
    @functools.cache
    def doubled(x):
        return x * 2

    found = dynamotor.explain(lambda x: doubled(x) + 1)(x)
    assert found.graph_break_count == 1


class Holder:
    scale = np.float64(2.0)


def test_numpy_scalars_from_outside_are_guarded():
    holder = Holder()
    compiled = dynamotor.compile(lambda x: x * holder.scale + holder.scale)
    for value in (
        np.float64(2.0),
        np.float64(3.0),
        np.float32(3.0),
        np.float64("nan"),
        np.int32(4),
        np.bool_(True),
    ):
        holder.scale = value
        torch.testing.assert_close(compiled(x), x * value + value, equal_nan=True)


def test_functions_of_arrays_without_a_rule_break():
    def function(x):
        return x + np.argsort(x.detach().numpy(), axis=None)[1].item()

    torch.testing.assert_close(dynamotor.compile(function)(x), function(x))
    assert dynamotor.explain(function)(x).graph_break_count >= 1


def test_einops_is_one_graph():
    einops = pytest.importorskip("einops")

    def function(x):
        y = einops.reduce(einops.rearrange(x, "a (b c) -> b a c", b=2), "b a c -> a c", "mean")
        return einops.repeat(y, "a c -> a k c", k=3)

    expected = function(x)  # einops looks for its backends at the first call
    torch.testing.assert_close(dynamotor.compile(function, fullgraph=True)(x), expected)


def test_subclasses_are_asked_again_at_each_call():
    class Base:
        pass

    class First(Base):
        scale = 2.0

    def scaled(x):
        return [x * cls.scale for cls in Base.__subclasses__()]

    compiled, x = dynamotor.compile(scaled, fullgraph=True), torch.ones(2)
    assert len(compiled(x)) == len(compiled(x)) == 1
    made = type("Second", (Base,), {"scale": 3.0})
    assert [t.tolist() for t in compiled(x)] == [[2.0, 2.0], [3.0, 3.0]] and made


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (
            x[torch.LongTensor([0, 2])],
            torch.FloatTensor((1.0, 2.0)),
            torch.BoolTensor([True, False]),
            torch.Tensor([1, 2]),
        ),
        lambda x: (
            tuple(torch.LongTensor(2, 3).shape),
            torch.Tensor(4) * 0 == 7,
            torch.DoubleTensor(2).zero_(),
        ),
        lambda x: (
            torch.func.functional_call(LINEAR, {"weight": x[0].new_ones(4, 4) * 2, "bias": x[0]}, (x,))
            + LINEAR(x)
        ),
    ],
)
def test_constructors_of_before_and_functional_calls(function):
    x = torch.randn(3, 4)
    kept = dict(LINEAR.named_parameters())
    torch.testing.assert_close(dynamotor.compile(function, backend="eager", fullgraph=True)(x), function(x))
    assert all(after is kept[name] for name, after in LINEAR.named_parameters())


LINEAR = torch.nn.Linear(4, 4)


def test_a_mark_for_the_cuda_graphs_of_torch_compile_is_passed_over():
    def function(x):
        state = torch.zeros(3)
        torch._dynamo.mark_static_address(state)
        return x + state

    x = torch.randn(3)
    assert torch.equal(dynamotor.compile(function, backend="eager", fullgraph=True)(x), x)


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.add_(2),
        lambda a: a[0].fill_(3),
        lambda a: a.view(2, 1).float()[1:].mul_(0),
        lambda a: torch.add(a, 1, out=a),
        lambda a: a.__setitem__(1, 7.0),
        lambda a: a.unbind()[0].sub_(1),
        lambda a: KEPT.append(a),
    ],
)
def test_numbers_of_a_tensor_that_was_written_are_what_was_written(write):
    def function(x):
        a = torch.ones(2)
        b = a * 2
        first = a.tolist()
        write(a)
        return x + a.tolist()[0] + a.tolist()[1] * 10 + first[1] * 100 + b.tolist()[0] * 1000

    x = torch.randn(3)
    assert torch.equal(dynamotor.compile(function, backend="eager")(x), function(x))


KEPT = []


@pytest.mark.parametrize(
    "read",
    [len, list, dict, lambda env: env.get("DYNAMOTOR_ODD", "no"), lambda env: "DYNAMOTOR_ODD" in env],
)
def test_the_environment_is_a_mapping_whose_answers_are_guarded(read, monkeypatch):
    def function(x):
        return x + 1, read(os.environ)

    compiled = dynamotor.compile(function, backend="eager", fullgraph=True)
    for value in ("1", "2", None):
        if value is None:
            monkeypatch.delenv("DYNAMOTOR_ODD")
        else:
            monkeypatch.setenv("DYNAMOTOR_ODD", value)
        assert compiled(x)[1] == read(os.environ)


def test_a_partial_from_outside_or_made_in_the_trace_is_called_kept_and_rebuilt():
    scaled = functools.partial(torch.mul, other=3.0)

    def function(x):
        own = functools.partial(scaled, other=x.shape[0])
        own.name = "own"
        return own(x), own, scaled.func, own.keywords

    y, own, func, keywords = dynamotor.compile(function, backend="eager", fullgraph=True)(x)
    assert torch.equal(y, x * 4) and torch.equal(own(x), y)
    assert (own.func, own.args, own.keywords, own.name) == (
        torch.mul,
        (),
        keywords,
        "own",
    ) and func is torch.mul


class Colour(enum.Enum):
    RED = 1
    BLUE = 2
    CRIMSON = 1


@pytest.mark.parametrize(
    "read", [list, len, reversed, lambda kinds: Colour.BLUE in kinds, lambda kinds: kinds["BLUE"]]
)
def test_enums_are_read_as_their_python_says(read):
    def function(x):
        found = read(Colour)
        return x + 1, list(found) if read is reversed else found

    assert dynamotor.compile(function, backend="eager", fullgraph=True)(x)[1] == function(x)[1]


def test_a_cache_of_shapes_that_differ_is_not_asked() -> None:
    einops = pytest.importorskip("einops")
    compiled = dynamotor.compile(
        lambda x: einops.rearrange(x, "(a b) (c d) -> (a c) (b d)", b=2, d=2) + 1,
        backend="eager",
        fullgraph=True,
    )
    dynamotor.reset()
    for n in (4, 6, 8, 10):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), einops.rearrange(x, "(a b) (c d) -> (a c) (b d)", b=2, d=2) + 1)
    assert counters["capture"]["graphs"] == 2


class _Flags(enum.Flag):
    ONE = enum.auto()
    TWO = enum.auto()


def test_the_inverse_of_a_flag():
    def program(x, flags):
        return x + 1 if flags & ~_Flags.ONE else x

    compiled = dynamotor.compile(program, backend="eager", fullgraph=True)
    for flags in (_Flags.ONE, _Flags.TWO, _Flags.ONE | _Flags.TWO):
        assert torch.equal(compiled(torch.ones(2), flags), program(torch.ones(2), flags))


def test_an_averaged_model_is_captured():
    model = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(3, 3))
    compiled, x = dynamotor.compile(model, backend="eager", fullgraph=True), torch.randn(2, 3)
    torch.testing.assert_close(compiled(x), model(x))
    model.update_parameters(torch.nn.Linear(3, 3))
    torch.testing.assert_close(compiled(x), model(x))


class _Counting:
    def __init__(self) -> None:
        self.calls = 0

    @functools.cache  # noqa: B019
    def scaled(self, k: int) -> int:
        self.calls += 1
        return k * self.calls


@pytest.mark.parametrize("what", ["appends", "reads", "sets an attribute", "raises", "warns"])
def test_a_function_with_a_cache_runs_where_eager_runs_it(what: str) -> None:
    log: list[Any] = []
    counting = _Counting()

    @functools.cache
    def kept(k: int) -> int:
        if what == "raises":
            log.append(k)
            raise ValueError(k)
        if what == "appends":
            log.append(k)
        if what == "warns":
            warnings.warn(f"{k} is new", stacklevel=1)
        return len(log) if what == "reads" else k

    def program(x: torch.Tensor, k: int) -> torch.Tensor:
        log.append("before")
        counting.calls += 10
        warnings.warn("before", stacklevel=1)
        try:
            return x * (counting.scaled(k) if what == "sets an attribute" else kept(k))
        except ValueError:
            return x
        finally:
            log.append("behind")

    def run(fn: Any) -> Any:
        log.clear()
        kept.cache_clear()
        _Counting.scaled.cache_clear()
        counting.calls = 0
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            results = [fn(torch.ones(2), k).tolist() for k in (1, 1, 2, 2, 1)]
        words = [str(w.message) for w in shown if "dynamotor" not in str(w.message)]
        return results, list(log), counting.calls, words

    assert run(dynamotor.compile(program)) == run(program)
