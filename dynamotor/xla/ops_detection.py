"""Non-maximum suppression with a result of fixed size, as one XLA loop.

>>> indices, count = torch.ops.dynamotor_xla.nms(boxes, scores, torch.tensor(0.1), torch.tensor(0.5), 100)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from ..base.errors import XlaError
from .lowering import op

torch.library.define(
    "dynamotor_xla::nms",
    "(Tensor boxes, Tensor scores, Tensor score_threshold, Tensor iou_threshold, int output_size) -> (Tensor, Tensor)",
)


@torch.library.register_fake("dynamotor_xla::nms")
def _fake(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: torch.Tensor,
    iou_threshold: torch.Tensor,
    output_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(boxes, scores, output_size)
    return boxes.new_empty(output_size, dtype=torch.int64), boxes.new_empty((), dtype=torch.int64)


def check(boxes: torch.Tensor, scores: torch.Tensor, output_size: int) -> None:
    """DM662 where shapes do not fit together."""
    if (
        boxes.dim() != 2
        or boxes.shape[1] != 4
        or scores.shape != boxes.shape[:1]
        or not 0 <= output_size <= boxes.shape[0]
    ):
        raise XlaError(
            "DM662",
            f"nms got boxes {list(boxes.shape)}, scores {list(scores.shape)} and output_size {output_size}",
            why="boxes are [N, 4], scores [N], and output_size is at most N",
        )


@torch.library.impl("dynamotor_xla::nms", "CPU")
def _cpu(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    score_threshold: torch.Tensor,
    iou_threshold: torch.Tensor,
    output_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(boxes, scores, output_size)
    chosen: list[int] = []
    for index in torch.sort(scores, descending=True, stable=True).indices.tolist():
        if len(chosen) == output_size or not scores[index] > score_threshold:
            break
        if not chosen or not (_overlap(torch, boxes[index], boxes[chosen]) > iou_threshold).any():
            chosen.append(index)
    padded = chosen + [0] * (output_size - len(chosen))
    return torch.tensor(padded, dtype=torch.int64), torch.tensor(len(chosen))


@op(torch.ops.dynamotor_xla.nms)
def _nms(
    boxes: jax.Array,
    scores: jax.Array,
    score_threshold: jax.Array,
    iou_threshold: jax.Array,
    output_size: int,
) -> Any:
    n = boxes.shape[0]
    order = jnp.argsort(scores, stable=True, descending=True)
    boxes, valid = boxes[order], scores[order] > score_threshold

    def unfinished(state: tuple) -> jax.Array:
        i, count, _, _ = state
        return (i < n) & (count < output_size)

    def step(state: tuple) -> tuple:
        i, count, alive, chosen = state
        take = alive[i]
        beaten = take & (_overlap(jnp, boxes[i], boxes) > iou_threshold) & (jnp.arange(n) > i)
        chosen = jnp.where(take, chosen.at[count].set(order[i]), chosen)
        return i + 1, count + take, alive & ~beaten, chosen

    zero = jnp.zeros((), jnp.int64)
    _, count, _, chosen = jax.lax.while_loop(
        unfinished, step, (zero, zero, valid, jnp.zeros(output_size, order.dtype))
    )
    return chosen, count


def _overlap(np: Any, box: Any, boxes: Any) -> Any:
    """Intersection over union of one box and many; any two opposite corners describe a box. 0 where both are
    empty.
    """
    minimum, maximum = np.minimum, np.maximum
    top, bottom = minimum(box[0], box[2]), maximum(box[0], box[2])
    left, right = minimum(box[1], box[3]), maximum(box[1], box[3])
    tops, bottoms = minimum(boxes[:, 0], boxes[:, 2]), maximum(boxes[:, 0], boxes[:, 2])
    lefts, rights = minimum(boxes[:, 1], boxes[:, 3]), maximum(boxes[:, 1], boxes[:, 3])
    height = minimum(bottom, bottoms) - maximum(top, tops)
    width = minimum(right, rights) - maximum(left, lefts)
    zero = np.zeros_like(height)
    shared = maximum(height, zero) * maximum(width, zero)
    union = (bottom - top) * (right - left) + (bottoms - tops) * (rights - lefts) - shared
    return np.where(union > 0, shared / np.where(union > 0, union, np.ones_like(union)), zero)
