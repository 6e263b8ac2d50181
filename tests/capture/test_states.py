"""Regions of inference mode and calls that set the state of random numbers stay in the graph; results, gradients,
modes and the state of random numbers are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters

BACKENDS = ["eager", "aot_eager", "native"]


def run(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, ...]:
    """Results and effects of a call: results, gradients, the next random number, modes."""
    torch.manual_seed(7)
    given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    try:
        results = function(*given)
    except Exception as error:
        results = (type(error), str(error))
    results = results if isinstance(results, tuple) else (results,)
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    after = torch.get_rng_state()
    for result in results:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward(retain_graph=True)
    kinds = [(r.requires_grad, r.is_inference()) for r in results if isinstance(r, torch.Tensor)]
    return results, [a.grad for a in given], after, modes, kinds


def same(got: Any, want: Any) -> None:
    """Equal up to rounding, in tensors and around them."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want)
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            same(one, other)
    else:
        assert got == want


def check(
    function: Callable[..., Any], *args: torch.Tensor, graphs: int | None = 1, backend: str = "eager"
) -> None:
    want = run(function, *args)
    before = counters["capture"]["graphs"]
    with config.patch(fallback_random=True):
        compiled = dynamotor.compile(function, backend=backend)
        for _ in range(3):
            same(run(compiled, *args), want)
    if graphs is not None:
        assert counters["capture"]["graphs"] - before == graphs


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 6).reshape(2, 3)


def w() -> torch.Tensor:
    return torch.linspace(0, 2, 6).reshape(2, 3).requires_grad_()


def forked(x: torch.Tensor) -> Any:
    y = x * 2
    with torch.random.fork_rng():
        y = y + torch.rand(3)
    return y * 3 + torch.rand(3)


def forked_and_seeded(x: torch.Tensor) -> Any:
    y = torch.nn.functional.dropout(x, 0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        y = y + torch.rand(3)
    return y * 3 + torch.rand(3)


def forked_twice(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        a = torch.rand(3)
        with torch.random.fork_rng():
            a = a + torch.randn(3)
        b = torch.randn(3)
    return x + a, b * torch.rand(3)


def not_forked(x: torch.Tensor) -> Any:
    with torch.random.fork_rng(enabled=False):
        y = x + torch.rand(3)
    return y


def seeded(x: torch.Tensor) -> Any:
    torch.manual_seed(5)
    return torch.nn.functional.dropout(x, 0.5) + 1


def repeated(x: torch.Tensor) -> Any:
    state = torch.get_rng_state()
    a = torch.rand(3)
    torch.set_rng_state(state)
    return x + a, torch.rand(3), state


def forked_dropout(w: torch.Tensor) -> Any:
    y = torch.nn.functional.dropout(w * 2, 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        y = torch.nn.functional.dropout(y.sin(), 0.5) * w
    return torch.nn.functional.dropout(y, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [forked, forked_and_seeded, forked_twice, not_forked, seeded, repeated],
    ids=lambda f: f.__name__,
)
def test_random_state(function: Callable[..., Any], backend: str) -> None:
    check(function, x(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_state_with_gradients(backend: str) -> None:
    check(forked_dropout, w(), backend=backend)


def test_a_seed_in_a_graph_repeats_the_compilers_own_numbers() -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            y = torch.nn.functional.dropout(x, 0.5)
        return y

    compiled = dynamotor.compile(draws)
    ones = torch.ones(1000)
    state = torch.get_rng_state()
    first = compiled(ones)
    assert torch.equal(first, compiled(ones)) and torch.equal(state, torch.get_rng_state())
    assert 0 < int((first == 0).sum()) < 1000


def raises_inside(x: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        y = x + torch.rand(3)
        z = x[torch.randint(9, 10, (1,))]
    return y + z


def raises_in_inference(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        y = x + 1
        z = y[torch.full((1,), 9)]
    return z


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [raises_inside, raises_in_inference], ids=lambda f: f.__name__)
def test_a_region_is_left_when_its_graph_raises(function: Callable[..., Any], backend: str) -> None:
    check(function, x(), backend=backend, graphs=None)


def printing(x: torch.Tensor) -> Any:
    y = x * 2
    with torch.random.fork_rng():
        print("inside")
        y = y + torch.rand(3)
    return y + torch.rand(3)


def printing_in_inference(x: torch.Tensor) -> Any:
    y = x * 2
    with torch.inference_mode():
        y = y + 1
        print("inside")
        y = y + 2
    return y, x + 1


@pytest.mark.parametrize("function", [printing, printing_in_inference], ids=lambda f: f.__name__)
def test_a_graph_that_breaks_in_a_region(function: Callable[..., Any]) -> None:
    check(function, x(), graphs=3 + (function is printing_in_inference))


def inference(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.inference_mode():
        z = (y + 1) * 2
    return y * 3, z


def inference_of_views(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.inference_mode():
        z = y.view(-1)
        u = x.t()
        v = z + 1
    return y, z, u, v, v.view(2, 3)


def inference_returned_as_it_is(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        z = x + 1
        flags = z.is_inference(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return z, x, flags, torch.is_grad_enabled()


def normal_inside(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.inference_mode(False):
        z = (y + 1) * 2
    return y * 3 + z


def normal_in_inference(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        a = x + 1
        with torch.inference_mode(False):
            b = (x * w).sin()
        c = b.cos() * a
    return a, b * 2, c


def graded_again(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.no_grad():
        a = x * w
        with torch.inference_mode(False):
            b = x * w
            with torch.no_grad():
                c = x * w
        d = x * w
    return a, b, c, d, x * w


def under_autocast(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ w.t()
        with torch.inference_mode():
            b = a @ a
            with torch.autocast("cpu", enabled=False):
                c = x @ w.t()
            d = b @ b
        e = x @ w.t()
    return a, b, c, d, e, x @ w.t()


def written_inside(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x + 1
    with torch.inference_mode():
        y.add_(1)
        z = x.clone()
        z.mul_(2)
    return y, z


def written_argument(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        x.add_(1)
    return x * w


def met_by_gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        z = x + 1
    return z + w


def saved_for_a_backward(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        z = x + 1
    return z * w


def written_outside(x: torch.Tensor, w: torch.Tensor) -> Any:
    with torch.inference_mode():
        z = x + 1
    z.add_(1)
    return z


def with_sizes_of_data(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x * w
    with torch.inference_mode():
        z = y[y > 0] * 2
    return y, z


@torch.inference_mode()
def decorated(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x * w


def calls_decorated(x: torch.Tensor, w: torch.Tensor) -> Any:
    return decorated(x, w) + 1, x * w


ONE_GRAPH = [
    inference,
    inference_of_views,
    inference_returned_as_it_is,
    normal_inside,
    normal_in_inference,
    graded_again,
    under_autocast,
    written_inside,
    written_argument,
    met_by_gradients,
    with_sizes_of_data,
    calls_decorated,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", ONE_GRAPH, ids=lambda f: f.__name__)
def test_inference_mode(function: Callable[..., Any], backend: str) -> None:
    check(function, x(), w(), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [saved_for_a_backward, written_outside], ids=lambda f: f.__name__)
def test_what_eager_refuses(function: Callable[..., Any], backend: str) -> None:
    check(function, x(), w(), backend=backend, graphs=None)


def left_open(x: torch.Tensor) -> Any:
    region = torch.inference_mode()
    region.__enter__()
    y = x + 1
    region.__exit__(None, None, None)
    return y * 2


def test_a_region_entered_by_name() -> None:
    check(left_open, x())


REGION = torch.inference_mode()


def of_outside(x: torch.Tensor) -> Any:
    with REGION:
        y = x + 1
    return y


def test_a_region_object_from_outside_breaks() -> None:
    check(of_outside, x(), graphs=None)


def test_a_region_inside_a_transform_or_checkpoint() -> None:
    def forked_in_vmap(x: torch.Tensor) -> Any:
        def one(row: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return row + 1

        return torch.vmap(one)(x)

    def forked_in_checkpoint(x: torch.Tensor, w: torch.Tensor) -> Any:
        def part(x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                return x.sin() * torch.rand(3)

        return torch.utils.checkpoint.checkpoint(part, x * w, use_reentrant=False)

    check(forked_in_vmap, x(), graphs=None)
    check(forked_in_checkpoint, x(), w(), graphs=None)
