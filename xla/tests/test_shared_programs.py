"""Programs that the core's tests have, too, on the device xla."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("jax")
import torch  # noqa: E402
from piecewise import check  # noqa: E402
from shapes_written import FUNCTIONS, a_view_alone, gradient  # noqa: E402

import dynamotor.xla  # noqa: E402, F401
from dynamotor.extension_api import XlaError  # noqa: E402


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shapes_changed_under_other_views_are_refused(function: Callable) -> None:
    with pytest.raises(XlaError, match="DM620"):
        gradient(function, "xla")


def test_shapes_of_a_view_alone_or_a_tensor_alone_are_changed() -> None:
    torch.testing.assert_close(gradient(a_view_alone, "xla").cpu(), gradient(a_view_alone, "cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_pieces_meet_as_in_eager(dtype: torch.dtype) -> None:
    check("xla", dtype)
