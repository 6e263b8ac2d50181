"""How far two results are from each other: one number a model, relative to the size of the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

ZERO = 1e-12  # of the largest gradient: what float64's rounding leaves of a zero, and no other program does


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output in a fixed order: containers, ModelOutput and cache objects are
    walked.
    """
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for value in output.values() for t in output_tensors(value)]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in output_tensors(value)]
    if hasattr(output, "layers") or hasattr(output, "self_attention_cache"):  # transformers' caches
        return [t for value in vars(output).values() for t in output_tensors(value)]
    if type(output).__module__.startswith("transformers.cache_utils"):
        return [t for value in vars(output).values() for t in output_tensors(value)]
    return []


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest |ours - reference| over the largest |reference|; infinite where shapes or NaNs differ."""
    if ours.shape != reference.shape:
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    a, b = ours.detach().double(), reference.detach().double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    difference = (a - b).nan_to_num(nan=0.0, posinf=float("inf")).abs().max().item()
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return difference / scale if scale > 0 else difference


def largest_error(ours: Iterable[torch.Tensor], reference: Iterable[torch.Tensor]) -> float:
    """The largest `relative_error` over two lists of tensors; infinite where their lengths differ."""
    a, b = list(ours), list(reference)
    if len(a) != len(b):
        return float("inf")
    return max((relative_error(x, y) for x, y in zip(a, b)), default=0.0)


def gradient_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest difference of any gradient, relative to that gradient's size but at least a millionth of the
    largest one.

    A gradient that is zero in exact arithmetic (a key's bias under softmax) is rounding noise in every
    program; without the floor its relative error says nothing. One that float64 shows to be zero counts
    relative to the largest gradient.
    """
    if found.keys() != expected.keys():
        return float("inf")
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=0.0)
    worst = 0.0
    for name, reference in expected.items():
        if found[name].shape != reference.shape:
            return float("inf")
        if not reference.numel():
            continue
        difference = (found[name].double() - reference.double()).abs().max().item()
        if difference != difference:
            return float("inf")
        size = reference.abs().max().item()
        scale = largest if size <= ZERO * largest else max(size, 1e-6 * largest, 1e-30)
        worst = max(worst, difference / scale if scale else difference)
    return worst


@dataclass(frozen=True)
class Errors:
    """How far a float32 (or lower) program is from the same program in float64: outputs, and gradients when
    it trains.
    """

    out: float
    grad: float | None

    @staticmethod
    def of(
        outputs: Iterable[torch.Tensor],
        expected: Iterable[torch.Tensor],
        model: torch.nn.Module | None,
        reference: torch.nn.Module,
    ) -> Errors:
        """Compare outputs, and the gradients of `model` (None: there are none) with those of `reference`."""
        gradients = None
        if model is not None:
            found, wanted = (
                {n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference)
            )
            gradients = gradient_error(found, wanted)
        return Errors(largest_error(outputs, expected), gradients)

    def fine(self, eagers: Errors, tolerance: float = 1e-3) -> bool:
        """Small, or no larger than twice what eager's own rounding does."""
        return self.out <= max(tolerance, 2 * eagers.out) and (
            self.grad is None or self.grad <= max(tolerance, 2 * (eagers.grad or 0.0))
        )

    def cells(self) -> list[str]:
        """Two cells of a table."""
        return [f"{self.out:.1e}", "-" if self.grad is None else f"{self.grad:.1e}"]
