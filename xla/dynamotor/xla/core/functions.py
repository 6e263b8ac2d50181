"""Differentiable calls between replicas, and non-maximum suppression.

>>> import dynamotor.xla.core.functions as xf
>>> total = xf.all_reduce(xm.REDUCE_SUM, value)
>>> indices, count = xf.nms(boxes, scores, torch.tensor(0.1), torch.tensor(0.5), 100)
"""

from __future__ import annotations

import torch

from .. import compat, ops_detection as _detection, replication
from ..collectives import (
    differentiable_all_gather as all_gather,  # noqa: F401
    differentiable_all_reduce as all_reduce,
)


class SyncBatchNorm(compat.BatchNorm):
    """Batch normalisation by the mean and variance of all replicas' batches, which are of equal size."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        torch._check_value(input.dim() >= 2, lambda: f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        dims, shape = [0, *range(2, input.dim())], (1, -1, *[1] * (input.dim() - 2))
        count = input.numel() // input.shape[1] * replication.size()
        mean = all_reduce("sum", input.sum(dims), 1 / count)
        centred = input - mean.view(shape)
        variance = all_reduce("sum", centred.square().sum(dims), 1 / count)
        if not (self.running_mean is None or self.running_var is None or self.num_batches_tracked is None):
            self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked
            unbiased = variance.detach() * (count / (count - 1))
            for kept, new in ((self.running_mean, mean.detach()), (self.running_var, unbiased)):
                kept.copy_((1 - share) * kept + share * new)
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        return result if self.weight is None else result * self.weight.view(shape) + self.bias.view(shape)


def nms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: torch.Tensor,
    iou_threshold: torch.Tensor,
    output_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-maximum suppression: from the highest score down, take boxes that overlap none taken before.

    boxes: float [N, 4] as (y0, x0, y1, x1). scores: float [N]. score_threshold: a tensor []; only boxes with
    a higher score count. iou_threshold: a tensor []; boxes whose intersection over union with a taken box is
    higher are dropped. output_size: length of the result, at most N. Returns the indices int64 [output_size]
    (0 behind the last one) and how many are valid, int64 []. DM662 where shapes do not fit.
    """
    _detection.check(boxes, scores, output_size)
    threshold = torch.as_tensor(score_threshold, dtype=scores.dtype).to(boxes.device)
    overlap = torch.as_tensor(iou_threshold, dtype=boxes.dtype).to(boxes.device)
    return torch.ops.dynamotor_xla.nms(boxes, scores, threshold, overlap, output_size)
