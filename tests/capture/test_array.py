"""NumPy arrays in a captured program: their results are NumPy's (types, dtypes, numbers, shared memory), in one graph
where PyTorch computes the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dynamotor
from dynamotor.base.events import counters

RNG = np.random.default_rng(0)
F = RNG.standard_normal((3, 4)).astype(np.float32)
D = RNG.standard_normal((3, 4))
N = np.arange(12).reshape(3, 4) - 5
T = torch.linspace(-1, 2, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _anew() -> None:
    dynamotor.reset()


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, list | tuple):
        assert len(got) == len(want)
        for pair in zip(got, want):
            same(*pair)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, equal_nan=True)
    elif isinstance(want, np.ndarray | np.generic):
        assert got.dtype == want.dtype and got.shape == want.shape
        if want.dtype == object:
            assert (got == want).all()
            return
        np.testing.assert_allclose(got, want, rtol=1e-5 if want.dtype == np.float32 else 1e-12, atol=1e-6)
    else:
        assert got == (pytest.approx(want, rel=1e-5, nan_ok=True) if type(want) is float else want)


# Of an array `a` of floats and a tensor `t`.
OF_FLOATS: list[Callable[[Any, Any], Any]] = [
    lambda a, t: (t + 1).numpy(),
    lambda a, t: (t.detach().cpu().numpy(), t.numpy().T, t[0, 0].numpy(), t.sum().numpy()),
    lambda a, t: torch.from_numpy(a) * t,
    lambda a, t: (torch.tensor(a), torch.as_tensor(a), torch.tensor(a.T), torch.asarray(a) + 1),
    lambda a, t: (torch.tensor(a, dtype=torch.float64), torch.as_tensor(a, dtype=torch.float16)),
    lambda a, t: (a * 2, 2 / a, a - a.T.T, a**2, -a, a + 0.1, a @ a.T, 1 - a, 3.0 * a),
    lambda a, t: (a < 0, 0.3 + a, a == a, a != 2, (a < 0) & (a > -1), ~(a < 0), (a < 1) | (a > 2)),
    lambda a, t: (np.sqrt(np.abs(a)), np.exp(a), np.sin(a), np.tanh(a), np.arctan(a), np.floor(a), np.rint(a)),
    lambda a, t: (np.maximum(a, a * 2), np.hypot(a, a), np.add(a, 1), np.multiply(2.0, a), np.square(a)),
    lambda a, t: (a.sum(), a.mean(), a.max(), a.min(), a.std(), a.var(), (a < 0).any(), (a < 0).all()),
    lambda a, t: (a.sum(0), np.sum(a, axis=1), a.mean(axis=(0, 1)), np.max(a, 1, keepdims=True), a.min(axis=-1)),
    lambda a, t: (np.std(a, axis=0, ddof=1), a.var(1), np.mean(a, axis=0, keepdims=True), a.std(ddof=1)),
    lambda a, t: (a.sum() + 1, a.mean() * a, a.sum() / a.size, a[0, 0] + 1, -a.max(), a.min() < 0),
    lambda a, t: (a[0], a[1, 2], a[:, 1:], a[..., 0], a[None], a[1, ...], a[1, 2, ...], a[-1][0]),
    lambda a, t: (a[a > 0], a[np.array([2, 0])], a[a < 0] * 2),
    lambda a, t: (a.shape, a.ndim, a.size, len(a), a.dtype, a.T.shape, a[0].shape),
    lambda a, t: (a.reshape(4, 3), np.reshape(a, (2, 6)), a.reshape((12,)), a.ravel(), a.T.ravel(), a.transpose()),
    lambda a, t: (np.expand_dims(a, 0), a.transpose((1, 0)), np.transpose(a), a.copy()),
    lambda a, t: (np.where(a > 0, a, 0.0), np.where(a > 0, a, -a), np.clip(a, -0.5, 0.5), a.clip(0, 1)),
    lambda a, t: (np.concatenate([a, a]), np.stack([a, a * 2], axis=1), np.concatenate((a, a), 1)),
    lambda a, t: (a.astype(np.float64), a.astype("float32"), (a > 0).astype(np.float32)),
    lambda a, t: (np.zeros((2, 3)) + 1, np.ones(3, dtype=np.float32) * 2, np.array([1, 2]) + 1, np.arange(4) * 2),
    lambda a, t: (np.stack([0.5, np.float32(2)]), np.expand_dims(3, 0), np.where(True, 2, 1)),
    lambda a, t: (np.array([1.5, 2.5]), np.full((2,), 7), np.eye(2), np.linspace(0, 1, 5)),
    lambda a, t: torch.from_numpy(np.sin(t.numpy()) + np.cos(t.numpy())).relu(),
    lambda a, t: (a[0, 0].item(), a.sum().item(), a[:1, 0].item()),
    lambda a, t: (a.dtype.type(2) * a, np.float64(0.5) + np.prod(a.shape), a * np.pi),
    lambda a, t: (t.numpy(), a, torch.from_numpy(a).numpy().sum(0)),
]  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("number", range(len(OF_FLOATS)))
@pytest.mark.parametrize("a", [F, D], ids=["float32", "float64"])
def test_results_are_numpys_in_one_graph(number: int, a: Any) -> None:
    fn = OF_FLOATS[number]
    compiled = dynamotor.compile(fn)
    for scale in (1, 2):
        same(compiled(a * a.dtype.type(scale), T * scale), fn(a * a.dtype.type(scale), T * scale))
    assert counters["capture"]["graphs"] <= 1 and not counters["breaks"]


ODD: list[Callable[[Any, Any], Any]] = [
    lambda a, t: (a / 2, a // 2, a % 3, a**2, a + 0.5, a * 2, a - 1, a.sum(), a.mean(), a.max(0), -a, np.abs(a)),
    lambda a, t: (a > 0, np.sqrt(a * a), a & 1, a.sum(axis=0), np.sum(a > 0), (a > 0).sum(), (a > 0).mean()),
    lambda a, t: (a.argmax(), np.argsort(a, axis=1), np.unique(a), np.median(a), np.linalg.norm(a)),
    lambda a, t: ([row.sum() for row in a], list(a[0]), a.tolist(), float(a[0, 0]), int(a[1, 1]), bool(a[0, 1])),
    lambda a, t: (a.astype(np.int32), a.astype(bool), a.flags.c_contiguous, a.strides, a.nbytes, a.base is None),
    lambda a, t: (a[::-1], a[:, ::2], a[(a > 0) & (a < 3)], a[[0, 1]], a[np.array([[0, 1], [1, 0]])]),
    lambda a, t: (a + a.astype(np.float64), a * np.float64(2), np.add(a, a, dtype=np.float64), np.outer(a[0], a[0])),
    lambda a, t: (str(a[0]), repr(a.shape), f"{a[0, 0]:.3f}", np.array2string(a[0])),
    lambda a, t: (np.dot(a, a.T), np.einsum("ij->i", a), np.tile(a, 2), np.cumsum(a), np.sign(a), np.isclose(a, a)),
    lambda a, t: (np.sin(t), t * 2 + torch.as_tensor(a), np.asarray(t), np.array(t), np.add(1, 2)),
    lambda a, t: (a.sum() > 0 and a.mean(), a.any() or 3, not (a > 9).any(), a is a, a.T is a.T, t.numpy() is t.numpy()),
    lambda a, t: ("yes" if a.max() > 1 else "no", a.sum() == a.sum(), isinstance(a, np.ndarray), type(a.sum())),
    lambda a, t: (isinstance(a.sum(), np.floating), isinstance(a.sum(), float), np.isscalar(a.sum()), np.ndim(a), np.shape(a)),
    lambda a, t: (a[:, 0][a[:, 0] > 0].sum(), np.sqrt(2.0) * a, a.item(3), np.float32(2) * a),
    lambda a, t: t.sum().numpy().mean(0),
    lambda a, t: (np.nan_to_num(a), np.maximum(a, 0), np.minimum(1.5, a), a.max(initial=9), a.sum(dtype=np.float64)),
]  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("number", range(len(ODD)))
@pytest.mark.parametrize("a", [F, D, N, N.astype(np.int32), F[:0]], ids=["f4", "f8", "i8", "i4", "empty"])
def test_what_pytorch_has_no_equal_of_is_numpys_own(number: int, a: Any) -> None:
    fn = ODD[number]
    compiled = dynamotor.compile(fn)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = fn(a, T)
            except Exception as error:
                with pytest.raises(type(error)):
                    compiled(a, T)
            else:
                same(compiled(a, T), want)


def of_plain_numbers(a: Any, t: Any) -> Any:
    sizes = np.array(a.shape)
    rest = (sizes % np.power(2, 2)) > 0
    parts = (sizes // 2).tolist() + [int(n) for n in np.cumsum(sizes).tolist()]
    if not rest.all() and sizes.argmax() == 1 and np.sort(sizes)[0] == 3:
        sizes[0] = 5
        view = sizes[1:]
        sizes[1] = 7
        return t * 2 + parts[1], sizes, view, sizes.sum(), parts, np.ones(2) / 0.5
    return t


def test_arrays_of_plain_numbers_are_known() -> None:
    compiled = dynamotor.compile(of_plain_numbers)
    for a in (F, F[:2]):
        same(compiled(a, T), of_plain_numbers(a, T))
    assert counters["capture"]["graphs"] == 2 and not counters["breaks"]


def adds_in_place(a: Any, t: Any) -> Any:
    b = a
    b += 1
    b *= 2.0
    s = b.sum()
    s += 1
    return b, s


def sets_items(a: Any, t: Any) -> Any:
    a[0] = 0
    a[1, 2] = 5.5
    a[:, 3] = a[:, 0] * 2
    a[a < 0] = 0
    return a.sum()


def writes_through_tensors(a: Any, t: Any) -> Any:
    torch.from_numpy(a).mul_(2)
    view = t.numpy()
    view += 1
    t.add_(1)
    copied = torch.tensor(a)
    copied.zero_()
    number = a[0, 0]
    a[0, 0] = 9
    return a, t, view, number, view.base is not None


def made_in_the_call(a: Any, t: Any) -> Any:
    y = t * 2
    n = y.numpy()
    y.add_(1)
    z = torch.from_numpy(n)
    z[0] = 7
    return y, n, z, z is y, y.numpy() is n


@pytest.mark.parametrize("fn", [adds_in_place, sets_items, writes_through_tensors, made_in_the_call])
@pytest.mark.parametrize("a", [F, D], ids=["f4", "f8"])
def test_memory_is_shared_as_in_eager(fn: Callable[..., Any], a: Any) -> None:
    compiled = dynamotor.compile(fn)
    mine, eager = (copy.deepcopy((a, T)) for _ in range(2))
    for _ in range(3):
        same(compiled(*mine), fn(*eager))
        same(mine, eager)
    out, _ = compiled(*mine), fn(*eager)
    same(mine, eager)
    if fn is made_in_the_call:
        out[0].fill_(3)
        assert (out[1] == 3).all() and (out[2] == 3).all()


def test_an_array_and_a_tensor_over_one_memory() -> None:
    def fn(a: Any, t: Any) -> Any:
        t.mul_(2)
        return a + 1, t

    compiled = dynamotor.compile(fn)
    for shares in (False, True, False):
        first, second = F.copy(), F.copy()
        mine = first, torch.from_numpy(first) if shares else T.clone()
        eager = second, torch.from_numpy(second) if shares else T.clone()
        same(compiled(*mine), fn(*eager))
        same(mine, eager)


def _readonly() -> Any:
    a = F.copy()
    a.flags.writeable = False
    return a


CHANGES: dict[str, Callable[[], Any]] = {
    "dtype": lambda: D,
    "whole numbers": lambda: N,
    "shape": lambda: F[:2],
    "strides": lambda: F.T.copy().T,
    "backwards": lambda: F[::-1],
    "read only": _readonly,
    "bytes": lambda: F.astype(">f4"),
    "a subclass": lambda: np.matrix(F),
    "a list": lambda: [1.0, 2.0],
    "a tensor": lambda: T,
    "objects": lambda: np.array([[1.5, 2]], dtype=object),
    "a number": lambda: np.float32(3),
    "no dimension": lambda: np.array(2.0, dtype=np.float32),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fn", [lambda a: a * 2, lambda a: torch.as_tensor(a) + 1], ids=["array", "tensor"])
def test_another_array_at_the_next_call_is_seen(fn: Callable[..., Any], change: str) -> None:
    compiled = dynamotor.compile(fn)
    for a in (F, CHANGES[change](), F, CHANGES[change]()):
        try:
            want = fn(a)
        except Exception as error:
            with pytest.raises(type(error)):
                compiled(a)
        else:
            same(compiled(a), want)


def test_errors_that_numpy_is_asked_for_are_raised() -> None:
    compiled = dynamotor.compile(lambda a: np.sqrt(a) * 2)
    same(compiled(np.abs(F)), np.sqrt(np.abs(F)) * 2)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        compiled(F)


def test_gradients_go_past_arrays() -> None:
    def fn(x: Any) -> Any:
        scale = np.abs(x.detach().numpy()).max(axis=0)
        return (x * torch.from_numpy(scale)).sum()

    grads = []
    for run in (dynamotor.compile(fn, fullgraph=True), fn):
        x = T.clone().requires_grad_()
        run(x).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    with pytest.raises(RuntimeError, match="requires grad"):
        dynamotor.compile(lambda x: x.numpy())(T.clone().requires_grad_())


def rows_are_views(a):
    for row in a:
        row += 1
    return a * 2


def moved_is_a_view(a):
    b = a.swapaxes(0, 1)
    b[0] = 3
    return a + 1, b


def flat_is_a_copy(a):
    b, c = a.flatten(), a.ravel()
    b += 1
    c -= 1
    return a, b, c


def array_copies_and_asarray_does_not(a):
    b, c = np.array(a), np.asarray(a)
    b += 1
    c -= 2
    return a, b, c, c is a


def first(a):
    x, *rest = a
    return x * 2, rest


FOUND_BY_TORCHDYNAMOS_TESTS = [
    rows_are_views,
    moved_is_a_view,
    flat_is_a_copy,
    array_copies_and_asarray_does_not,
    first,
    lambda a: a.transpose(1, 0) * 2,
    lambda a: a.transpose((1, 0)) + a.real.T,
    lambda a: a.astype(np.dtype("float64")) + np.finfo(np.float64).eps,
    lambda a: (a + 1, np.dtype("float32") == a.dtype, a.dtype.kind, str(a.dtype), np.iinfo("int32").max),
    lambda a: (a + 1, np.issubdtype(a.dtype, np.floating), np.issubdtype(a.dtype, np.integer)),
    lambda a: np.zeros(a.shape) + a,
    lambda a: np.full((3, 4), 2.0) * a - np.ones_like(a) + np.zeros_like(a),
    lambda a: (np.maximum(a, 0), np.minimum(1.5, a)),
    lambda a: (a.argmax(axis=1), np.argmin(a, axis=0), np.cumsum(a, axis=0), np.prod(a, axis=1)),
    lambda a: (np.array([a, a]), np.squeeze(a[None]), np.array([a[0, 0], a[1, 1]])),
    lambda a: [row.sum() for row in a],
    lambda a: (a.imag, a.imag[1:] + a[1:], a.real, (a > 0).imag, a.reshape(4, 3).imag.T),
]


@pytest.mark.parametrize("fn", FOUND_BY_TORCHDYNAMOS_TESTS)
def test_as_numpy_does_in_one_graph(fn):
    compiled = dynamotor.compile(fn, backend="eager", fullgraph=True)
    for _ in range(2):
        mine, theirs = (np.arange(12, dtype=np.float32).reshape(3, 4) - 5 for _ in range(2))
        got, want = compiled(mine), fn(theirs)
        got, want = (r if isinstance(r, tuple | list) else (r,) for r in (got, want))
        assert [type(x) for x in got] == [type(x) for x in want]
        for x, y in zip((*got, mine), (*want, theirs), strict=True):
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)
            np.testing.assert_allclose(x, y, rtol=1e-6) if isinstance(
                x, np.ndarray
            ) else np.testing.assert_equal(x, y)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_complex_arrays_are_views(dtype):
    def fn(a):
        return torch.from_numpy(a.real) + 1, a.imag, a.imag[0] * 2

    a = (np.arange(6) * (1 + 2j)).astype(dtype).reshape(2, 3)
    compiled = dynamotor.compile(fn, backend="eager")
    for _ in range(2):
        got = compiled(a)
        same(got, fn(a))
        assert np.shares_memory(got[1], a)


def test_zeros_that_nobody_may_write():
    def writes(a):
        part = a.imag
        part[0] = 1
        return part

    def adds(a):
        part = a.imag[1:]
        part += a[1:]
        return part

    for fn in (writes, adds):
        with pytest.raises(ValueError, match="read-only"):
            dynamotor.compile(fn, backend="eager")(F)
    part = dynamotor.compile(lambda a: a.imag[1:], backend="eager", fullgraph=True)(F)
    assert not part.flags.writeable
