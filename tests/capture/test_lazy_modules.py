"""Lazy modules are initialised by the capture as eager's first call does it: the same parameters, state of random
numbers and results, in one graph."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters


class Between(nn.Module):
    """A lazy layer behind something."""

    def __init__(self, before: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.lazy, self.after = before, nn.LazyLinear(4), after or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.lazy(self.before(x)))


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(4), nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        print("between")
        return self.second(y)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lazy(self.lazy(x))


def images() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6), nn.Linear(6, 2)
    )


def hooked() -> nn.Module:
    model = Between(nn.Identity())
    model.lazy.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int | None]] = {
    "alone": (lambda: nn.LazyLinear(4), (2, 5), 1),
    "between": (lambda: Between(nn.Linear(5, 7), nn.LayerNorm(4)), (2, 5), 1),
    "two": (lambda: Between(nn.LazyLinear(3), nn.LazyLinear(2)), (2, 5), 1),
    "images": (images, (2, 3, 8, 8), 1),
    "transposed": (
        lambda: nn.Sequential(nn.LazyConvTranspose1d(4, 3), nn.LazyInstanceNorm1d(affine=True)),
        (2, 3, 8),
        1,
    ),
    "shared": (Shared, (2, 5), 1),
    "behind random numbers": (lambda: Between(nn.Dropout(0.5)), (2, 5), None),
    "hooked": (hooked, (2, 5), None),
    "printing": (Printing, (2, 5), 2),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def steps(model: nn.Module, call: nn.Module, x: torch.Tensor) -> tuple:
    torch.manual_seed(3)
    results, x = [], x.clone().requires_grad_()
    for _ in range(2):
        model.zero_grad()
        results.append(call(x))
        results[-1].square().sum().backward()
    return (
        results,
        x.grad,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        [p.grad for p in model.parameters()],
        [type(m) for m in model.modules()],
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_lazy_modules(name: str, backend: str) -> None:
    make, shape, graphs = MODELS[name]
    x = torch.randn(shape)
    plain, other = make(), make()
    for mine, others in zip(plain.modules(), other.modules()):  # present parameters are the same
        if type(mine) in (nn.Linear, nn.LayerNorm):
            others.load_state_dict(mine.state_dict())
    want = steps(plain, plain, x)
    before = counters["capture"]["graphs"]
    with config.patch(fallback_random=True):
        got = steps(other, dynamotor.compile(other, backend=backend), x)
    torch.testing.assert_close(got[:5], want[:5])
    assert got[5] == want[5]
    assert torch.equal(got[6], want[6])
    if graphs is not None:
        assert counters["capture"]["graphs"] - before == graphs


def test_an_input_that_does_not_fit() -> None:
    def call(model: nn.Module) -> str:
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(3))
        return str(caught.value)

    lazy = nn.LazyConv2d(4, 3)
    assert call(dynamotor.compile(lazy, backend="eager")) == call(nn.LazyConv2d(4, 3))
    assert lazy.has_uninitialized_params()


def test_a_test_of_data_before_it() -> None:
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (x < 0).any():
                raise ValueError("negative")
            return self.lazy(x)

    model = Checked()
    compiled = dynamotor.compile(model, backend="eager")
    with pytest.raises(ValueError, match="negative"):
        compiled(-torch.ones(2, 3))
    assert model.lazy.has_uninitialized_params()
    assert compiled(torch.ones(2, 3)).shape == (2, 4)
