"""Ops whose result is as long as the data say: values are the CPU's, and the data never go there."""

import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")

import dynamotor  # noqa: E402
import dynamotor.xla  # noqa: E402
from dynamotor.xla import metrics  # noqa: E402

NAN = float("nan")
CASES = {
    "nonzero": lambda d: torch.tensor([[0, 3], [1, 0]], device=d).nonzero(),
    "nonzero of nothing": lambda d: torch.zeros(3, 2, device=d).nonzero(),
    "nonzero of a number": lambda d: torch.tensor(3.0, device=d).nonzero(),
    "nonzero as a tuple": lambda d: torch.tensor([[0.0, NAN], [1, 0]], device=d).nonzero(as_tuple=True),
    "masked_select": lambda d: (
        torch.arange(6.0, device=d).view(2, 3).t().masked_select(torch.tensor([True, False], device=d))
    ),
    "masked_select of booleans": lambda d: torch.tensor([True, False, True], device=d).masked_select(
        torch.tensor([True, True, False], device=d)
    ),
    "mask": lambda d: torch.arange(6.0, device=d)[torch.arange(6, device=d) % 2 == 0],
    "masks": lambda d: torch.arange(24.0, device=d).view(2, 3, 4)[
        :, torch.tensor([[True] * 4, [False] * 4, [True, False] * 2], device=d)
    ],
    "mask of a number": lambda d: torch.arange(3.0, device=d)[torch.tensor(True, device=d)],
    "mask and positions": lambda d: torch.arange(6.0, device=d).view(2, 3)[
        torch.tensor([True, True], device=d), torch.tensor([2, 0], device=d)
    ],
    "unique_consecutive": lambda d: torch.unique_consecutive(
        torch.tensor([1, 1, 2, 1], device=d), return_inverse=True, return_counts=True
    ),
    "unique_consecutive columns": lambda d: torch.unique_consecutive(
        torch.tensor([[1, 1, 2], [3, 3, 3]], device=d), return_inverse=True, dim=1
    ),
    "unique_consecutive of nothing": lambda d: torch.unique_consecutive(torch.zeros(0, device=d)),
    "histogram": lambda d: torch.histogram(torch.tensor([0.5, 2, 1, 1, NAN], device=d), 3, range=(0.5, 2.0)),
    "histogram of its own range": lambda d: torch.histogram(torch.ones(3, device=d), 2, density=True),
    "histogram between edges": lambda d: torch.histogram(
        torch.tensor([[0.0, 1], [2, 5]], device=d),
        torch.tensor([0.0, 1.0, 2.0], device=d),
        weight=torch.tensor([[1.0, 2], [3, 4]], device=d),
    ),
    "bincount": lambda d: torch.bincount(torch.tensor([1, 4, 1], device=d)),
    "bincount of bytes": lambda d: torch.bincount(
        torch.tensor([1, 200, 1], dtype=torch.uint8, device=d), minlength=2
    ),
    "bincount of nothing": lambda d: torch.bincount(torch.zeros(0, dtype=torch.long, device=d), minlength=3),
    "bincount with weights": lambda d: torch.bincount(
        torch.tensor([1, 4, 1], device=d), torch.tensor([0.5, 2.0, 1.0], device=d), 7
    ),
    "bincount with half weights": lambda d: torch.bincount(
        torch.tensor([1, 0], device=d), torch.tensor([0.5, 2.0], dtype=torch.half, device=d)
    ),
    "unique": lambda d: torch.unique(
        torch.tensor([[3, 1], [3, 2]], device=d), return_inverse=True, return_counts=True
    ),
    "unique of nothing": lambda d: torch.unique(torch.zeros(0, device=d), return_counts=True),
    "unique of booleans": lambda d: torch.unique(
        torch.tensor([True, False, True], device=d), return_inverse=True
    ),
    "unique of nan": lambda d: torch.unique(torch.tensor([NAN, 1, NAN, -0.0, 0.0], device=d)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_cpus(name):
    metrics.clear()
    found = CASES[name]("xla")
    assert not [key for key in metrics.all_counters() if key.startswith("aten::")]
    back = [t.cpu() for t in found] if isinstance(found, tuple) else [found.cpu()]
    expected = CASES[name]("cpu")
    torch.testing.assert_close(
        back, list(expected) if isinstance(found, tuple) else [expected], equal_nan=True
    )


def test_what_is_refused_on_the_cpu_is_refused():
    for device in ("cpu", "xla"):
        for wrong in (torch.tensor([-1, 2]), torch.tensor([[1]]), torch.tensor([1.5])):
            with pytest.raises(RuntimeError):
                torch.bincount(wrong.to(device))
        with pytest.raises(IndexError):
            torch.ones(3, device=device)[torch.ones(2, dtype=torch.bool, device=device)]
        with pytest.raises(RuntimeError):
            torch.ones(2, device=device).masked_select(torch.ones(2, dtype=torch.long, device=device))


def test_gradients_and_compiled_graphs_go_through():
    def f(x):
        return (x * 2).masked_select(x > 0).square().sum()

    x = torch.randn(5)
    wanted = torch.autograd.grad(f(y := x.clone().requires_grad_()), y)[0]
    for g in (f, dynamotor.compile(f, backend="xla")):
        mine = x.to("xla").requires_grad_()
        g(mine).backward()
        torch.testing.assert_close(mine.grad.cpu(), wanted)


def test_torchvisions_nms_keeps_its_boxes() -> None:
    if not hasattr(torch.ops.torchvision, "nms"):
        torch.library.define(
            "torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6], [0, 0, 1, 1]], device="xla")
    scores = torch.tensor([0.5, 0.9, 0.9, -float("inf")], device="xla")
    assert torch.ops.torchvision.nms(boxes, scores, 0.5).tolist() == [1, 2, 3]
    assert torch.ops.torchvision.nms(boxes[:0], scores[:0], 0.5).tolist() == []
