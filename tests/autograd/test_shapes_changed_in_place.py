"""`t_()` of a tensor that other views show (91001:5626): eager makes the history of those views again by addresses,
PyTorch for tensors without memory by the views' ops, on the turned tensor: gradients of other elements came back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from shapes_written import FUNCTIONS, a_view_alone, gradient

import dynamotor

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_eagers(function: Callable) -> None:
    expected = gradient(function, "cpu")
    for backend in ("native", "aot_eager"):
        torch.testing.assert_close(gradient(dynamotor.compile(function, backend=backend), "cpu"), expected)


def test_a_view_alone_or_a_tensor_alone_is_compiled() -> None:
    fast = dynamotor.compile(a_view_alone, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(fast, "cpu"), gradient(a_view_alone, "cpu"))
