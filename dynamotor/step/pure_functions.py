"""Functions that an update's Python may call without more guards: those that answer by their arguments
alone.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
import types
from typing import Any

import torch

# Words in the names of functions that draw random numbers.
_RANDOM = """rand normal bernoulli dropout poisson multinomial binomial rrelu uniform cauchy exponential
    geometric seed""".split()  # noqa: SIM905
# Methods and attributes of tensors whose answer is no part of a trace, or that do more than compute.
_UNTRACED = frozenset(
    """apply_ map_ backward register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ set_
    numpy tolist data_ptr storage untyped_storage storage_offset share_memory_ resize_ resize_as_ detach_
    grad_fn is_leaf is_shared record_stream pin_memory is_pinned names rename_ align_to has_names refine_names
    type
    module_load storage_type element_size get_device cuda xpu ipu mtia to_sparse coalesce values indices
    crow_indices
    """.split()  # noqa: SIM905
)
_PLAIN_ATTRIBUTES = frozenset(
    """grad data shape dtype device ndim T mT H mH real imag requires_grad is_sparse is_cuda is_cpu layout
    """.split()  # noqa: SIM905
)
# Not `isinstance` and `type`, which see that a number is a stand-in.
_BUILTINS = frozenset(
    {abs, all, any, bool, dict, enumerate, filter, float, int, len, list, map, max, min, pow, range, reversed}
    | {round, slice, sorted, sum, super, tuple, zip, divmod, iter, next, object}
    | {value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, Exception)}
)
_MADE = ("zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "is_tensor", "scalar_tensor")
_TRUSTED = frozenset(
    "torch torchao dynamotor sympy mpmath numpy triton typing_extensions".split()  # noqa: SIM905
)
_TRUSTED |= frozenset(sys.stdlib_module_names)
# Modules of optimizers whose `step` looks up its parameters, state and options alone.
OPTIMIZERS = ("torch.optim.", "torchao.optim.")


def is_trusted(module: Any) -> bool:
    """Whether functions of a module are PyTorch's, ours or the standard library's."""
    name = module if isinstance(module, str) else ""
    return name.partition(".")[0] in _TRUSTED and not name.startswith("torch.distributed")


@functools.cache
def _torch_functions() -> frozenset[int]:
    """Functions of PyTorch that compute from their arguments alone, by identity."""
    found = [f for functions in torch.overrides.get_overridable_functions().values() for f in functions]
    found += [
        getattr(torch, name) for name in (*_MADE, *(n for n in dir(torch) if n.startswith("_foreach_")))
    ]
    return frozenset(id(f) for f in found if not _draws(getattr(f, "__name__", "")))


@functools.cache
def traced_names() -> frozenset[str]:
    """Attributes of tensors and containers that a trace follows."""
    methods = {getattr(f, "__name__", "") for f in torch.overrides.get_overridable_functions()[torch.Tensor]}
    methods |= {name for name in dir(torch.Tensor) if name.startswith("new_")}
    methods = {name for name in methods if not _draws(name)} - _UNTRACED
    held = {name for kind in (dict, list, tuple, str, float, slice) for name in dir(kind)}
    return frozenset({n for n in methods | held if not n.startswith("__")} | _PLAIN_ATTRIBUTES)


def _draws(name: str) -> bool:
    return any(word in name for word in _RANDOM)


def is_harmless(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """What answers by its arguments alone."""
    if isinstance(value, type):
        named = (torch.Tensor, torch.nn.Parameter, torch.no_grad, torch.enable_grad)
        return value in _BUILTINS or value in named or value in type(optimizer).__mro__
    if not isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
        return False
    if isinstance(value, types.FunctionType) and not is_trusted(value.__globals__.get("__name__")):
        return False
    if value in _BUILTINS or id(value) in _torch_functions() or value is getattr(math, value.__name__, None):
        return True
    return isinstance(value, types.FunctionType) and _updates(value)


def _updates(function: types.FunctionType) -> bool:
    """Whether it is one of PyTorch's functions of updates."""
    name = str(function.__globals__.get("__name__"))
    return name in ("torch.nn.utils.clip_grad", "torch.optim.optimizer") or (
        name.startswith("torch.optim.") and name.rpartition(".")[2] not in ("lr_scheduler", "swa_utils")
    )


def is_of_scheduler(value: Any) -> bool:
    """`step` as a scheduler wraps it: a function that takes no optimizer, around one that does."""
    return (
        type(value) is types.FunctionType and value.__globals__.get("__name__") == "torch.optim.lr_scheduler"
    )
