"""Transforms of torch.func give eager's results under inference_mode and no_grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynamotor


def _cubes(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


def _inside(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.func.grad(_cubes)(x)


TRANSFORMED: list[Callable[[torch.Tensor], Any]] = [
    torch.func.grad(_cubes),
    torch.func.jacrev(_cubes),
    torch.func.jacfwd(_cubes),
    torch.func.hessian(_cubes),
    lambda x: torch.func.grad_and_value(_cubes)(x),
    lambda x: torch.func.vjp(torch.sin, x)[1](x),
    lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    lambda x: torch.vmap(lambda row: row * 2)(x),
    _inside,
]


def _outcome(run: Callable[[torch.Tensor], Any], region: Any) -> Any:
    """Each result's values and whether it is an inference tensor, or the error: PyTorch 2.11 lacks rules."""
    try:
        with region():
            found = run(torch.ones(3))
    except RuntimeError as error:
        return str(error)
    return [
        (part.is_inference(), part.tolist()) for part in (found if isinstance(found, tuple) else (found,))
    ]


@pytest.mark.regression
@pytest.mark.parametrize("region", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_transforms_give_under_inference_mode(region: Any) -> None:
    """They were inference tensors, which no backward may save; eager's are not."""
    for function in TRANSFORMED:
        want = _outcome(function, region)
        assert _outcome(dynamotor.compile(function, backend="aot_eager"), region) == want
