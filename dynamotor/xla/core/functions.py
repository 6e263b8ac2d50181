"""Differentiable calls between replicas, and non-maximum suppression.

>>> import dynamotor.xla.core.functions as xf
>>> total = xf.all_reduce(xm.REDUCE_SUM, value)
>>> indices, count = xf.nms(boxes, scores, torch.tensor(0.1), torch.tensor(0.5), 100)
"""

from __future__ import annotations

import torch

from .. import collectives
from .. import ops_detection as _detection


def all_reduce(
    reduce_type: str, value: torch.Tensor, scale: float = 1.0, groups: list[list[int]] | None = None
) -> torch.Tensor:
    """Reduce a tensor over the replicas, like `xm.all_reduce`, with gradients. The result is a new tensor.

    reduce_type: xm.REDUCE_SUM, MUL, AND, OR, MIN or MAX. value: this replica's tensor. scale: the result is multiplied by it.
    groups: replica ordinals that reduce among themselves, as [[0, 1], [2, 3]]; None: all of them together.
    """
    return collectives.differentiable_all_reduce(reduce_type, value, scale, groups)


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The tensors of all replicas, in the order of their ordinals, concatenated along `dim`: `xm.all_gather` with gradients."""
    return collectives.differentiable_all_gather(value, dim)


def nms(
    boxes: torch.Tensor, scores: torch.Tensor, score_threshold: torch.Tensor, iou_threshold: torch.Tensor, output_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-maximum suppression: from the highest score down, take boxes that overlap none taken before.

    boxes: float [N, 4] as (y0, x0, y1, x1). scores: float [N]. score_threshold: a tensor []; only boxes with a higher
    score count.
    iou_threshold: a tensor []; boxes whose intersection over union with a taken box is higher are dropped.
    output_size: length of the result, at most N. Returns the indices int64 [output_size] (0 behind the last one) and how
    many are valid, int64 []. DM662 where shapes do not fit.
    """
    _detection.check(boxes, scores, output_size)
    threshold = torch.as_tensor(score_threshold, dtype=scores.dtype).to(boxes.device)
    overlap = torch.as_tensor(iou_threshold, dtype=boxes.dtype).to(boxes.device)
    return torch.ops.dynamotor_xla.nms(boxes, scores, threshold, overlap, output_size)
