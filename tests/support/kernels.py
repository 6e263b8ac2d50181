"""Helpers of tests that plant a fault in an emitter."""

import pytest

from dynamotor.codegen import cpp, triton


def forget_kernels(patch: pytest.MonkeyPatch) -> None:
    """Until the test ends, no kernel is taken from those that were written before."""
    for room in (cpp, triton):
        patch.setattr(room, "_memo", {})
