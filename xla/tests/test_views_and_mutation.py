"""Random programs of views, writes and autograd give on the xla device the results of the CPU: values,
strides, who shares memory, gradients and errors.

A program is made while it runs on the CPU: each step is a closure over positions in a pool of tensors, so
that the device replays exactly the same calls. Steps that the CPU refuses are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("jax", reason="the xla device needs jax")

import dynamotor.xla  # noqa: E402, F401
import dynamotor.xla.start  # noqa: E402, F401

aten = torch.ops.aten
Pool = list[torch.Tensor]
Step = Callable[[Pool], None]
_VIEWS = ("select", "slice", "step", "transpose", "permute", "flat", "split", "unsqueeze", "squeeze", "diagonal", "narrow", "chunk", "unbind",
          "unfold", "detach", "alias", "contiguous", "reshape", "flatten", "t", "mT", "movedim", "unflatten", "expand", "as_strided")  # fmt: skip


def _dim(t: torch.Tensor, rng: random.Random) -> int:
    return rng.randrange(-t.dim(), t.dim())


def _view(t: torch.Tensor, rng: random.Random) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A view of a tensor, chosen for its shape."""
    kind = rng.choice(_VIEWS)
    if kind == "unsqueeze":
        dim = rng.randrange(t.dim() + 1)
        return lambda x: x.unsqueeze(dim)
    if kind == "detach":
        return torch.Tensor.detach
    if kind == "alias":
        return lambda x: x[...]
    if kind == "contiguous":
        return torch.Tensor.contiguous
    if kind == "flatten":
        return torch.Tensor.flatten
    if kind == "t" and t.dim() <= 2:
        return torch.Tensor.t
    if t.dim() == 0 or t.numel() == 0:
        return None
    return _view_along(t, kind, rng)


def _view_along(
    t: torch.Tensor, kind: str, rng: random.Random
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A view that moves, cuts or splits dimensions."""
    dim = _dim(t, rng)
    length = t.shape[dim]
    start = rng.randrange(length)
    end = rng.randrange(start + 1, length + 1)
    if kind == "select":
        return lambda x: x.select(dim, start)
    if kind == "slice":
        return lambda x: x.transpose(0, dim)[start:end].transpose(0, dim)
    if kind == "step":
        step = rng.randrange(1, 4)
        return lambda x: aten.slice.Tensor(x, dim, start, end, step)
    if kind == "narrow":
        return lambda x: x.narrow(dim, start, end - start)
    if kind == "split":
        return lambda x: x.split(start + 1, dim)[-1]
    if kind == "chunk":
        return lambda x: x.chunk(2, dim)[0]
    if kind == "unbind":
        return lambda x: x.unbind(dim)[start]
    if kind == "squeeze":
        return lambda x: x.squeeze(dim)
    if kind == "unfold":
        size = rng.randrange(1, length + 1)
        return lambda x: x.unfold(dim, size, size + start)
    other = _dim(t, rng)
    if kind == "mT" or kind == "t":
        return (lambda x: x.mT) if t.dim() > 1 else None
    if kind == "reshape":
        shape = rng.choice([[-1, length], [length, -1], [-1], [1, -1]])
        return lambda x: x.reshape(shape)
    if kind == "movedim":
        return lambda x: x.movedim(dim, other)
    if kind == "unflatten":
        return lambda x: x.unflatten(dim, (-1, 2) if length % 2 == 0 else (length, 1))
    if kind == "expand":
        return lambda x: x.unsqueeze(0).expand(start + 1, *x.shape)
    if kind == "as_strided":
        return lambda x: x.as_strided((2, 2), (1, 2), start if start else None)
    if kind == "transpose":
        return lambda x: x.transpose(dim, other)
    if kind == "diagonal":
        offset = rng.randrange(-2, 3)
        return (lambda x: x.diagonal(offset, dim, other)) if (dim - other) % t.dim() else None
    if kind == "permute":
        order = rng.sample(range(t.dim()), t.dim())
        return lambda x: x.permute(order)
    return (lambda x: x.view(-1)) if t.is_contiguous() else None


def _write(t: torch.Tensor, rng: random.Random) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """An in-place write of a tensor; the second argument is another tensor of the pool."""
    number = rng.uniform(-2, 2) if t.dtype.is_floating_point or t.dtype.is_complex else rng.randint(-3, 3)
    writes: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
        lambda x, y: x.add_(number), lambda x, y: x.mul_(number), lambda x, y: x.add_(y), lambda x, y: x.copy_(y), lambda x, y: x.zero_(),
        lambda x, y: x.fill_(number), lambda x, y: x.clamp_(-1, 1), lambda x, y: x.masked_fill_(x > 0, number), lambda x, y: x.sub_(y, alpha=number),
        lambda x, y: x.sigmoid_(), lambda x, y: torch.mul(x.detach(), 0.5, out=x.detach()), lambda x, y: x.addcmul_(y, y, value=number),
        lambda x, y: x.lerp_(y, 0.25), lambda x, y: x.detach().mul_(0.9), lambda x, y: x.tril_(), lambda x, y: x.data.add_(0.5),
    ]  # fmt: skip
    if t.dim() and t.numel():
        dim, index = (
            _dim(t, rng),
            torch.tensor(sorted(rng.sample(range(t.shape[0]), max(1, t.shape[0] // 2)))),
        )
        place = rng.randrange(t.shape[0])
        writes += [
            lambda x, y: x.__setitem__(place, number), lambda x, y: x.__setitem__(slice(place, None), y), lambda x, y: x.__setitem__(x < 0, number),
            lambda x, y: x.__setitem__(index.to(x.device), number), lambda x, y: x.index_fill_(0, index.to(x.device), number),
            lambda x, y: x.index_add_(0, index.to(x.device), x.detach()[index.to(x.device)] * 0.5),
            lambda x, y: x.__setitem__((Ellipsis, 0), y.sum()), lambda x, y: x.copy_(x.flip(dim)), lambda x, y: x.cumsum_(dim),
            lambda x, y: x.select(dim, 0).mul_(number), lambda x, y: x.transpose(0, dim)[place:].neg_() if dim == 0 else x.neg_(),
            lambda x, y: x.index_copy_(0, index.to(x.device), x.detach()[index.to(x.device)] + 1),
        ]  # fmt: skip
    return rng.choice(writes)


def _sine(x: torch.Tensor) -> torch.Tensor:
    """In double precision, since a float32 sine of an integer may be rounded in two ways, depending on the
    processor's vector width.
    """
    return x.sin() if x.is_complex() else x.double().sin()


def _fresh(t: torch.Tensor, rng: random.Random) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return rng.choice(
        [
            lambda x, y: x * 2,
            lambda x, y: x + y,
            lambda x, y: _sine(x),
            lambda x, y: x.clone(),
            lambda x, y: x.sum(0) if x.dim() else x * 3,
        ]
    )


def _expanded(t: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape))


def _step(pool: Pool, rng: random.Random) -> Step | None:
    at, other = rng.randrange(len(pool)), rng.randrange(len(pool))
    kind = rng.random()
    if kind < 0.45:
        view = _view(pool[at], rng)
        return None if view is None else lambda pool: pool.append(view(pool[at]))
    if kind < 0.85:
        if _expanded(pool[at]):
            return None  # the device refuses them all, the CPU some
        write = _write(pool[at], rng)

        def step(pool: Pool) -> None:
            # Another view of the same memory is read from a copy: the CPU reads its own writes.
            write(pool[at], pool[at] if at == other else pool[other].clone())

        return step
    if kind < 0.95:
        fresh = _fresh(pool[at], rng)
        return lambda pool: pool.append(fresh(pool[at], pool[other]))
    return (lambda pool: pool.__delitem__(at)) if len(pool) > 2 else None


def program(start: Pool, rng: random.Random, length: int) -> tuple[Pool, list[Step]]:
    """Run a random program on CPU tensors; (the pool at its end, its steps)."""
    pool, steps = list(start), []
    for _ in range(length):
        step = _step(pool, rng)
        if step is None:
            continue
        saved = [t.detach().clone() for t in pool]
        count = len(pool)
        try:
            step(pool)
        except (RuntimeError, IndexError):
            # A refused write must not have changed anything for the replay to be the same.
            assert len(pool) == count and all(torch.equal(a, b.detach()) for a, b in zip(saved, pool)), (
                "the CPU refused half a step"
            )
            continue
        steps.append(step)
    return pool, steps


def replay(start: Pool, steps: list[Step], rng: random.Random) -> Pool:
    """The same steps on the device, with a few reads in between: these must not matter."""
    pool = list(start)
    for step in steps:
        step(pool)
        if rng.random() < 0.15:
            rng.choice(pool).detach().cpu()
    return pool


def inputs(rng: random.Random, dtype: torch.dtype) -> Pool:
    shapes = [(3, 4), (2, 3, 4), (4,), (5, 5), ()]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    picked = rng.sample(shapes, 3)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(shape, generator=generator, dtype=dtype) for shape in picked]
    return [torch.randint(-5, 5, shape, generator=generator).to(dtype) for shape in picked]


def same(want: Pool, got: Pool) -> None:
    assert len(want) == len(got)
    for at, (a, b) in enumerate(zip(want, got)):
        assert (b.stride(), b.storage_offset(), b.is_contiguous()) == (
            a.stride(),
            a.storage_offset(),
            a.is_contiguous(),
        ), at
        torch.testing.assert_close(
            b.detach().cpu(),
            a.detach().contiguous(),
            rtol=1e-9,
            atol=1e-9,
            msg=lambda text, at=at: f"tensor {at}: {text}",
        )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex128, torch.uint8], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_values_of_random_programs(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    start = inputs(rng, dtype)
    want, steps = program([t.clone() for t in start], rng, 25)
    same(want, replay([t.to("xla") for t in start], steps, rng))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_gradients_of_random_programs(seed: int) -> None:
    rng = random.Random(seed)
    start = inputs(rng, torch.float64)
    leaves = [t.clone().requires_grad_() for t in start]
    want, steps = program([leaf * 1 for leaf in leaves], rng, 15)
    twins = [t.to("xla").requires_grad_() for t in start]
    got = replay([leaf * 1 for leaf in twins], steps, rng)
    same(want, got)
    error = _backward(want)
    other = _backward(got)
    assert (error is None) == (other is None), (error, other)
    if error is None:
        same(*([t.grad if t.grad is not None else torch.zeros_like(t) for t in ts] for ts in (leaves, twins)))
        # Gradients share memory with nothing: a parameter's is changed in place.
        for grad in [t.grad for t in (*leaves, *twins) if t.grad is not None]:
            grad.mul_(2)
        same(*([t.grad if t.grad is not None else torch.zeros_like(t) for t in ts] for ts in (leaves, twins)))


def _backward(pool: Pool) -> RuntimeError | None:
    try:
        terms = [t.square().sum() * (at + 1) for at, t in enumerate(pool) if t.requires_grad]
        if terms:
            torch.stack(terms).sum().backward()
    except RuntimeError as error:
        return error
    return None
