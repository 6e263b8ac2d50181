"""Runs aten ops on CPU tensors and, beside each, its XLA lowering on the same values: the ops families are
tested without the device.

>>> with LoweringMode() as mode:
...     torch.nn.functional.gelu(torch.randn(3))
>>> mode.wrong, mode.missing
({}, set())
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dynamotor.xla.dtypes import jax_dtype
from dynamotor.xla.lowering import Spec, Unsupported, apply, find

jax.config.update("jax_enable_x64", True)
# Tolerances of torch.testing.assert_close for one op on random inputs; sums may be in another order.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.complex64: 2e-5,
    torch.complex128: 1e-9,
}


def to_jax(value: Any) -> Any:
    """A torch tensor as a jax array, a copy; anything else as it is. `jax.numpy.array` would compile a
    program for each shape."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = jax_dtype(value.dtype)
    if value._is_zerotensor():
        return jax.device_put(np.zeros(tuple(value.shape), dtype))
    value = value.detach().contiguous().resolve_conj().resolve_neg()
    value = value.float() if value.dtype is torch.bfloat16 else value
    return jax.device_put(np.array(value.numpy(), dtype))


def to_torch(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(array, np.float32)).to(dtype)
    return torch.from_numpy(np.array(array))


def spec_of(value: Any) -> Any:
    return Spec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


class Case:
    """An op's lowering on given values: a function of arrays, and its key in the cache (`key`)."""

    def __init__(self, func: Any, rule: Any, args: Any, kwargs: Any, out: Any) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        rest = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
        self.key = (func, tree, repr(rest), tuple((a.shape, a.dtype) for a in self.arrays), repr(out))

        def call(*given: jax.Array) -> Any:
            more = iter(given)
            return apply(
                func, rule, *jax.tree.unflatten(tree, [next(more) if r is None else r[0] for r in rest]), out
            )

        self.call = call


_compiled: dict[Any, Any] = {}
_OFTEN, _TOGETHER = 3, 40
# What a lowering says is tested, not LLVM's work on it, which takes a third of the time; the device's own
# tests compile as users do.
_QUICK = {"xla_backend_optimization_level": 0}


def run_all(cases: list[Case]) -> list[Any]:
    """Results of lowerings, or the errors of those that failed. They are compiled with arrays as arguments,
    as in the device's graphs: what has the same key often by itself, the rest many to a program, since XLA's
    time is mostly one of programs."""
    count = Counter(case.key for case in cases)
    results: list[Any] = [None] * len(cases)
    rest = []
    for number, case in enumerate(cases):
        if count[case.key] < _OFTEN and case.key not in _compiled:
            rest.append(number)
        else:
            results[number] = _run_alone(case)
    for begin in range(0, len(rest), _TOGETHER):
        part = rest[begin : begin + _TOGETHER]
        for number, result in zip(part, _run_together([cases[number] for number in part])):
            results[number] = result
    return results


def _run_alone(case: Case) -> Any:
    if len(_compiled) > 200:
        _compiled.clear()
    try:
        return _compiled.setdefault(case.key, jax.jit(case.call, compiler_options=_QUICK))(*case.arrays)
    except Exception as error:  # noqa: BLE001 - collected, and asserted on by the test
        return error


def _run_together(cases: list[Case]) -> list[Any]:
    errors: dict[int, Exception] = {}

    def together(given: list[list[jax.Array]]) -> list[Any]:
        found = []
        for number, (case, arrays) in enumerate(zip(cases, given)):
            try:
                found.append(case.call(*arrays))
            except Exception as error:  # noqa: BLE001 - collected, and asserted on by the test
                errors[number] = error
                found.append(None)
        return found

    try:
        results = jax.jit(together, compiler_options=_QUICK)([case.arrays for case in cases])
    except Exception:  # noqa: BLE001 - XLA refuses one of them: which one is seen alone
        return [_run_alone(case) for case in cases]
    return [errors.get(number, result) for number, result in enumerate(results)]


def _kept(want: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a result, whatever is written to it later."""
    if want is None:
        return None
    return (
        torch.zeros(tuple(want.shape), dtype=want.dtype)
        if want._is_zerotensor()
        else want.detach().contiguous().clone()
    )


class LoweringMode(TorchDispatchMode):
    """`missing`: functional ops without a rule; `refused`: reasons of Unsupported; `wrong`: the first
    mismatch of each op; `right`: ops checked. The lowerings run, many in one program, when one of these is
    asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: set[str] = set()
        self._refused: dict[str, str] = {}
        self._wrong: dict[str, str] = {}
        self._right: set[str] = set()
        self._pending: list[tuple[str, Case, list[torch.Tensor | None]]] = []

    refused = property(lambda self: settled([self])[0]._refused)
    wrong = property(lambda self: settled([self])[0]._wrong)
    right = property(lambda self: settled([self])[0]._right)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        # Neither uninitialised values nor zeros without memory can be compared.
        rule = None if "empty" in str(func) or "efficientzero" in str(func) else find(func)
        inputs = tree_map(to_jax, (args, kwargs)) if rule is not None and not rule.random else None
        result = func(*args, **kwargs)
        if rule is None:
            self.missing.add(str(func))
        elif inputs is not None:
            flat = list(result) if isinstance(result, (tuple, list)) else [result]
            if all(r is None or isinstance(r, torch.Tensor) for r in flat):
                out = (
                    tuple(spec_of(r) for r in flat) if isinstance(result, (tuple, list)) else spec_of(result)
                )
                self._pending.append((str(func), Case(func, rule, *inputs, out), [_kept(r) for r in flat]))
        return result

    def _judge(self, name: str, case: Case, wanted: list[torch.Tensor | None], found: Any) -> None:
        if isinstance(found, Unsupported):
            self._refused[name] = str(found)
        elif isinstance(found, Exception):
            self._wrong.setdefault(name, f"{type(found).__name__}: {str(found)[:300]}")
        else:
            self._compare(name, case, found, wanted)

    def _compare(self, name: str, case: Case, found: Any, wanted: list[torch.Tensor | None]) -> None:
        for got, want in zip(found if isinstance(found, (tuple, list)) else (found,), wanted):
            if want is None:
                continue
            try:
                tolerance = TOLERANCE.get(want.dtype, 0)
                torch.testing.assert_close(
                    to_torch(got, want.dtype), want, rtol=tolerance, atol=tolerance, equal_nan=True
                )
            except AssertionError as error:
                self._wrong.setdefault(
                    name, f"{[(a.shape, str(a.dtype)) for a in case.arrays]} {str(error)[:300]}"
                )
                return
        self._right.add(name)


def settled(modes: list[LoweringMode]) -> list[LoweringMode]:
    """The same modes, after the lowerings that they wait for were run, those of all of them together."""
    pending = [(mode, *one) for mode in modes for one in mode._pending]
    for mode in modes:
        mode._pending = []
    for (mode, name, case, wanted), found in zip(pending, run_all([case for _, _, case, _ in pending])):
        mode._judge(name, case, wanted, found)
    return modes


_COMPANY = 16
_made: dict[str, LoweringMode | Exception] = {}


def company(request: pytest.FixtureRequest, collect: Callable[..., LoweringMode]) -> LoweringMode:
    """`collect(**parameters)` of this test, whose lowerings are compiled with those of the next tests of the
    same function: XLA's time is mostly one of programs. Nothing is wrong in it."""
    item = request.node
    if item.nodeid not in _made:
        alike = [other for other in request.session.items if other.function is item.function]
        place = alike.index(item)
        found = {
            other.nodeid: _collected(collect, other.callspec.params)
            for other in alike[place : place + _COMPANY]
        }
        settled([mode for mode in found.values() if isinstance(mode, LoweringMode)])
        _made.update(found)
    mode = _made.pop(item.nodeid)
    if isinstance(mode, Exception):
        raise mode
    assert not mode.wrong, mode.wrong
    return mode


def _collected(collect: Callable[..., LoweringMode], parameters: dict[str, Any]) -> LoweringMode | Exception:
    torch.manual_seed(0)
    try:
        return collect(**parameters)
    except Exception as error:  # noqa: BLE001 - raised in the test that it belongs to
        return error


def gather(fn, *args, **kwargs) -> LoweringMode:
    """Run `fn`, and remember what its ops' lowerings are to be compared with."""
    with LoweringMode() as mode:
        fn(*args, **kwargs)
    return mode


def check(fn, *args, **kwargs) -> LoweringMode:
    """Run `fn` and assert that every aten op with a rule agreed; returns the mode for further questions."""
    mode = gather(fn, *args, **kwargs)
    assert not mode.wrong, mode.wrong
    return mode


# Samples of an op: in `make test`, and in `make test-all` besides.
FEW_OR_MORE = [2, pytest.param(6, marks=pytest.mark.slow)]


@functools.cache
def _op_db() -> list[Any]:
    """torch's OpInfo database, without its look through the sources of the stack for a unittest at each sample."""
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.opinfo import core

    core.extract_test_fn = common_utils.extract_test_fn = lambda: None
    return common_methods_invocations.op_db


def check_opinfo(name: str, dtype: torch.dtype, samples: int = 3, gradient: bool = True) -> LoweringMode:
    """Run an op of torch's OpInfo database (`torch.testing._internal.common_methods_invocations.op_db`),
    forward and gradient.
    """
    mode = LoweringMode()
    for info in (o for o in _op_db() if o.name == name):
        if dtype not in info.dtypes:
            continue
        wants_grad = gradient and dtype.is_floating_point and info.supports_autograd
        for index, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=wants_grad)):
            if index >= samples:
                break
            with mode:
                result = info(sample.input, *sample.args, **sample.kwargs)
                outs = [
                    r
                    for r in torch.utils._pytree.tree_leaves(result)
                    if isinstance(r, torch.Tensor) and r.requires_grad
                ]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs], inputs=None)
    return mode
