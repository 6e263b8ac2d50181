"""A size that equals an expression of others only by a guard: the compiler took both names of it for two
sizes, and the backward, which is compiled when its forward has run, raised an error of the compiler's own at
the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dynamotor
from dynamotor import backends
from dynamotor.base.errors import InternalError
from dynamotor.base.events import counters

pytestmark = pytest.mark.regression


def over_both(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([a.flatten(), b.flatten()])
    return torch.xlogy(weight, F.layer_norm(joined, (weight.shape[0],), weight, bias).abs() + 0.5)


def check(compiled: Any) -> None:
    for n in (9, 7, 16):
        given = [torch.randn(k, dtype=torch.float64, requires_grad=True) for k in (n, n, 2 * n, 2 * n)]
        for want, got in zip(*[torch.autograd.grad(f(*given).sum(), given) for f in (over_both, compiled)]):
            torch.testing.assert_close(got, want)
    assert len(compiled.entries) == 1


def test_both_names_of_a_size_are_one() -> None:
    check(dynamotor.compile(over_both, dynamic=True))


def test_a_backward_that_cannot_be_compiled_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backends.compile_aten

    def no_backwards(gm: Any, info: Any, **options: Any) -> Any:
        if info.kind == "backward":
            raise InternalError("DM911", "no backwards")
        return plain(gm, info, **options)

    monkeypatch.setattr(backends, "compile_aten", no_backwards)
    counters.clear()
    with dynamotor.config.patch(verify=False):
        check(dynamotor.compile(over_both, dynamic=True))
    assert counters["fallback"]["aot.DM911"] == 1
