"""A kernel loads a buffer after its own store of it, also where the loop around the store has one step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dynamotor

pytestmark = pytest.mark.regression


def norm_of_one_column(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed = F.layer_norm(x, x.shape[-1:])
    return torch.softmax(normed * scale + normed, 0).sum((0, 1)), normed.mean(-1, keepdim=True)


@pytest.mark.parametrize("target", ["triton", "cpp"])
def test_a_value_is_not_loaded_before_it_is_stored(target: str) -> None:
    inputs = torch.randn(2, 1), torch.randn(()).requires_grad_()
    with dynamotor.config.patch(target=target):
        lines = dynamotor.lower(norm_of_one_column, *inputs).code.splitlines()
        compiled = dynamotor.compile(norm_of_one_column)
    loads = "tl.load(", "ld<"
    stores = "tl.store(", "st<"
    for start in (n for n, line in enumerate(lines) if line.lstrip().startswith(("def ", 'extern "C"'))):
        loaded: set[str] = set()
        for line in lines[start + 1 :]:
            if line.startswith(("def ", "@", 'extern "C"')):
                break
            loaded |= {p for p in POINTERS if any(f"{op}{p} " in line for op in loads)}
            assert not any(f"{op}{p} " in line for p in loaded for op in stores), line
    for _ in range(2):
        junk = [torch.full((n,), float("nan")) for n in (1, 2, 4, 8) for _ in range(50)]
        del junk
        for ours, theirs in zip(compiled(*inputs), norm_of_one_column(*inputs), strict=True):
            torch.testing.assert_close(ours, theirs)


POINTERS = [f"p{n}" for n in range(12)]
