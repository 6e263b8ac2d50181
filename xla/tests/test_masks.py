"""NaN and infinity are not hidden by a mask that it is multiplied with: XLA would make a choice of `x *
mask`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jax", reason="the xla device needs jax")

import dynamotor.xla  # noqa: E402, F401

inf, nan = float("inf"), float("nan")
PRODUCTS = {
    "a mask": lambda x, m: x * m,
    "a mask as floats": lambda x, m: x * m.float(),
    "a mask as integers": lambda x, m: x * m.long(),
    "a choice": lambda x, m: x * torch.where(m, 1.0, 0.0),
    "signs": lambda x, m: x * torch.sign(m.float()),
    "a diagonal": lambda x, m: x * torch.eye(3, device=x.device),
    "a triangle": lambda x, m: x * torch.ones(3, 3, device=x.device).tril(-1),
    "one hot": lambda x, m: x * torch.nn.functional.one_hot(m.long(), 3)[0],
    "of halves": lambda x, m: x.half() * m,
    "divided": lambda x, m: m / (x * 0).nan_to_num(0),
    "a term": lambda x, m: torch.addcmul(torch.ones_like(x), x, m.float()),
    "dropped": lambda x, m: torch.native_dropout(x, 1.0, True)[0],
}


def test_a_mask_hides_nothing() -> None:
    given = torch.tensor([inf, nan, 1.0]), torch.tensor([False, False, True])
    moved = [t.to("xla") for t in given]
    got = {name: product(*moved) for name, product in PRODUCTS.items()}  # one program
    for name, product in PRODUCTS.items():
        torch.testing.assert_close(
            got[name].cpu(),
            product(*given),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_the_gradient_of_a_maximum_shows_nan() -> None:
    x = torch.full((2, 3), nan).to("xla").requires_grad_()
    x.amax(-1, keepdim=True).sum().backward()
    assert x.grad.isnan().all().item()
