"""NumPy lays results out by the layouts of its operands; as tensors they have eager's strides
(96002:22227, 26291: `torch.tensor` of an array that is not row-major).
"""

from __future__ import annotations

import pytest
import torch

import dynamotor

pytestmark = pytest.mark.regression

np = pytest.importorskip("numpy")

EXPRESSIONS = """np.sin(a) | a.sum(0) | a.mean(-1) | np.concatenate([a, a], 0) | np.stack([a, a], 1) | a.ravel() |
np.where(a > 0, a, -a) | a.astype(np.float64) | a * 2 + 1 | a.copy() | a.T | a[1:] | np.copy(a) | np.array(a)"""
LAYOUTS = {
    "row-major": lambda: torch.randn(4, 6),
    "column-major": lambda: torch.randn(6, 4).t(),
    "with holes": lambda: torch.randn(4, 12)[:, ::2],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", [e.strip() for e in EXPRESSIONS.split("|")])
def test_strides_are_eagers(text: str, layout: str) -> None:
    scope: dict = {"np": np, "torch": torch}
    exec(
        f"def f(x):\n    a = x.numpy()\n    r = {text}\n    return torch.as_tensor(r), torch.tensor(r)", scope
    )
    x = LAYOUTS[layout]()
    results = scope["f"](x), dynamotor.compile(scope["f"], backend="eager")(x)
    torch.testing.assert_close(results[1], results[0])
    assert [t.stride() for t in results[1]] == [t.stride() for t in results[0]]
