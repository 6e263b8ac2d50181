"""Runs aten ops on CPU tensors and, beside each, its XLA lowering on the same values: the ops families are tested without the device.

>>> with LoweringMode() as mode:
...     torch.nn.functional.gelu(torch.randn(3))
>>> mode.wrong, mode.missing
({}, set())
"""

from __future__ import annotations

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
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.complex64: 2e-5, torch.complex128: 1e-9}


def to_jax(value: Any) -> Any:
    """A torch tensor as a jax array; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value._is_zerotensor():
        return jax.numpy.zeros(tuple(value.shape), jax_dtype(value.dtype))
    value = value.detach().contiguous()
    if value.dtype is torch.bfloat16:
        return jax.numpy.asarray(value.float().numpy()).astype(jax_dtype(value.dtype))
    return jax.numpy.asarray(value.resolve_conj().resolve_neg().numpy())


def to_torch(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(array.astype(np.float32))).to(dtype)
    return torch.from_numpy(np.array(array))


def spec_of(value: Any) -> Any:
    return Spec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


_compiled: dict[Any, Any] = {}


def run(func: Any, rule: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A lowering's result for these values: compiled with arrays as arguments, as in the device's graphs, once for equal shapes."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    rest = [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
    key = (func, tree, repr(rest), tuple((a.shape, a.dtype) for a in arrays), repr(out))

    def call(*given: jax.Array) -> Any:
        more = iter(given)
        return apply(func, rule, *jax.tree.unflatten(tree, [next(more) if r is None else r[0] for r in rest]), out)

    if len(_compiled) > 200:
        _compiled.clear()
    return _compiled.setdefault(key, jax.jit(call))(*arrays)


class LoweringMode(TorchDispatchMode):
    """`missing`: functional ops without a rule; `refused`: reasons of Unsupported; `wrong`: the first mismatch of each op; `right`: ops checked."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: set[str] = set()
        self.refused: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.right: set[str] = set()

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
            self._compare(func, rule, inputs, result)
        return result

    def _compare(self, func, rule, inputs, result) -> None:
        flat = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(r is None or isinstance(r, torch.Tensor) for r in flat):
            return
        out = tuple(spec_of(r) for r in flat) if isinstance(result, (tuple, list)) else spec_of(result)
        try:
            mine = run(func, rule, *inputs, out)
        except Unsupported as refusal:
            self.refused[str(func)] = str(refusal)
            return
        except Exception as error:  # noqa: BLE001 - collected, and asserted on by the test
            self.wrong.setdefault(str(func), f"{type(error).__name__}: {str(error)[:300]}")
            return
        for got, want in zip(mine if isinstance(mine, tuple) else (mine,), flat):
            if want is None:
                continue
            if want._is_zerotensor():  # it has no memory to compare with
                want = torch.zeros(tuple(want.shape), dtype=want.dtype)
            try:
                tolerance = TOLERANCE.get(want.dtype, 0)
                torch.testing.assert_close(to_torch(got, want.dtype), want.contiguous(), rtol=tolerance, atol=tolerance, equal_nan=True)
            except AssertionError as error:
                self.wrong.setdefault(str(func), f"{[spec_of(a) for a in torch.utils._pytree.tree_leaves(inputs)]} {str(error)[:300]}")
                return
        self.right.add(str(func))


def check(fn, *args, **kwargs) -> LoweringMode:
    """Run `fn` and assert that every aten op with a rule agreed; returns the mode for further questions."""
    with LoweringMode() as mode:
        fn(*args, **kwargs)
    assert not mode.wrong, mode.wrong
    return mode


# Samples of an op: in `make test`, and in `make test-all` besides.
FEW_OR_MORE = [2, pytest.param(6, marks=pytest.mark.slow)]


def check_opinfo(name: str, dtype: torch.dtype, samples: int = 3, gradient: bool = True) -> LoweringMode:
    """Run an op of torch's OpInfo database (`torch.testing._internal.common_methods_invocations.op_db`), forward and gradient."""
    from torch.testing._internal.common_methods_invocations import op_db

    mode = LoweringMode()
    for info in (o for o in op_db if o.name == name):
        if dtype not in info.dtypes:
            continue
        wants_grad = gradient and dtype.is_floating_point and info.supports_autograd
        for index, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=wants_grad)):
            if index >= samples:
                break
            with mode:
                result = info(sample.input, *sample.args, **sample.kwargs)
                outs = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor) and r.requires_grad]
                if outs:
                    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs], inputs=None)
    return mode
