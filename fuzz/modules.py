"""PyTorch's module database, in training and evaluation: results, gradients, buffers.

>>> [t.name for t in trials(0, "float32", training=True)]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import dynamotor

from .compare import Outcome, observe
from .databases import module_infos
from .operators import ERRORS, relaid
from .trial import Trial, examine, targets

DTYPES = ("float32", "float64", "bfloat16")


def trials(number: int, dtype: str, training: bool) -> Iterator[Trial]:
    """Trials of one module in one dtype: every sample as it is and with transposed inputs."""
    info, wide = module_infos()[number], getattr(torch, dtype)
    if wide not in info.dtypes or info.name.startswith("nn.Lazy"):  # their parameters do not exist yet
        return
    torch.default_generator.manual_seed(0)
    gradients = info.supports_gradgrad is not None
    try:
        known = list(info.module_inputs_func(info, "cpu", wide, gradients, training))
    except ERRORS:
        return
    for n, sample in enumerate(known):
        for layout in ("", "transposed", "channels_last"):
            name = f"{info.name} {dtype} {'training' if training else 'evaluation'} {n} {layout}".strip()
            yield _trial(name, info.module_cls, sample, wide, training, layout)


def _trial(name: str, kind: Any, sample: Any, dtype: torch.dtype, training: bool, layout: str) -> Trial:
    made, given = sample.constructor_input, sample.forward_input
    leaves, tree = tree_flatten((given.args, given.kwargs))

    def prepare(compiled: bool) -> Callable[[], Outcome]:
        torch.default_generator.manual_seed(0)
        module = kind(*copy.deepcopy(made.args), **copy.deepcopy(made.kwargs)).to(dtype).train(training)
        start = copy.deepcopy(module.state_dict())
        held = [*module.parameters(), *module.buffers()]
        call = dynamotor.compile(module) if compiled else module

        def run() -> Outcome:
            with torch.no_grad():
                module.load_state_dict(start)
            for tensor in held:
                tensor.grad = None
            torch.default_generator.manual_seed(0)
            fresh = [_again(leaf, layout) for leaf in leaves]
            places = [n for n, leaf in enumerate(fresh) if isinstance(leaf, torch.Tensor)]

            def forward(*tensors: torch.Tensor) -> Any:
                given = list(fresh)
                for place, tensor in zip(places, tensors[: len(places)], strict=True):
                    given[place] = tensor
                args, kwargs = tree_unflatten(given, tree)
                return call(*args, **kwargs)

            return observe(forward, [fresh[n] for n in places] + held, None)

        return run

    return Trial(name, prepare)


def _again(leaf: Any, layout: str) -> Any:
    """A new leaf of the same numbers."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    return relaid(leaf.detach().clone(), layout).requires_grad_(leaf.requires_grad)


def by_name(name: str) -> Trial:
    """The trial of this name, as reports give it."""
    dtype = next(word for word in name.split() if word in DTYPES)
    number = next(n for n, info in enumerate(module_infos()) if name.startswith(f"{info.name} {dtype} "))
    return next(t for t in trials(number, dtype, " training " in name) if t.name == name)


def is_right(name: str, target: str = "") -> bool:
    """Whether the trial of this name gives eager's results: for tests."""
    return not examine([by_name(name)], target or targets()[0])[0].problems
