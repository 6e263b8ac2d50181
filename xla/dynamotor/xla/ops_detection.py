"""Non-maximum suppression with a result of fixed size, as one XLA loop.

>>> indices, count = torch.ops.dynamotor_xla.nms(boxes, scores, torch.tensor(0.1), torch.tensor(0.5), 100)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from .errors import require
from .lowering import op
from .transfer import download, upload

torch.library.define(
    "dynamotor_xla::nms",
    "(Tensor boxes, Tensor scores, Tensor score_threshold, Tensor iou_threshold, int output_size) -> "
    "(Tensor, Tensor)",
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
    require(
        boxes.dim() == 2
        and boxes.shape[1] == 4
        and scores.shape == boxes.shape[:1]
        and 0 <= output_size <= boxes.shape[0],
        "DM662",
        f"nms got boxes {list(boxes.shape)}, scores {list(scores.shape)} and output_size {output_size}",
        why="boxes are [N, 4], scores [N], and output_size is at most N",
    )


@op(torch.ops.dynamotor_xla.nms)
def _nms(
    boxes: jax.Array,
    scores: jax.Array,
    score_threshold: jax.Array,
    iou_threshold: jax.Array,
    output_size: int,
) -> Any:
    n = boxes.shape[0]
    zero = jnp.zeros((), jnp.int64)
    if not output_size:  # as where there are no boxes
        return jnp.zeros(0, jnp.int64), zero
    order = jnp.argsort(scores, stable=True, descending=True)
    boxes, valid = boxes[order], scores[order] > score_threshold

    def unfinished(state: tuple) -> jax.Array:
        i, count, _, _ = state
        return (i < n) & (count < output_size)

    def step(state: tuple) -> tuple:
        i, count, alive, chosen = state
        take = alive[i]
        beaten = take & (_overlap(boxes[i], boxes) > iou_threshold) & (jnp.arange(n) > i)
        chosen = jnp.where(take, chosen.at[count].set(order[i]), chosen)
        return i + 1, count + take, alive & ~beaten, chosen

    _, count, _, chosen = jax.lax.while_loop(
        unfinished, step, (zero, zero, valid, jnp.zeros(output_size, order.dtype))
    )
    return chosen, count


@torch.library.impl("dynamotor_xla::nms", "CPU")
def _cpu(*args: Any) -> tuple[torch.Tensor, ...]:
    check(args[0], args[1], args[4])
    arrays = [upload(tensor, jax.devices("cpu")[0]) for tensor in args[:4]]
    return tuple([download(found, torch.int64) for found in _nms(*arrays, args[4])])


def _overlap(box: jax.Array, boxes: jax.Array) -> jax.Array:
    """Intersection over union of one box and many; any two opposite corners describe a box. 0 where both are
    empty.
    """
    minimum, maximum = jnp.minimum, jnp.maximum
    top, bottom = minimum(box[0], box[2]), maximum(box[0], box[2])
    left, right = minimum(box[1], box[3]), maximum(box[1], box[3])
    tops, bottoms = minimum(boxes[:, 0], boxes[:, 2]), maximum(boxes[:, 0], boxes[:, 2])
    lefts, rights = minimum(boxes[:, 1], boxes[:, 3]), maximum(boxes[:, 1], boxes[:, 3])
    height = minimum(bottom, bottoms) - maximum(top, tops)
    width = minimum(right, rights) - maximum(left, lefts)
    zero = jnp.zeros_like(height)
    shared = maximum(height, zero) * maximum(width, zero)
    union = (bottom - top) * (right - left) + (bottoms - tops) * (rights - lefts) - shared
    return jnp.where(union > 0, shared / jnp.where(union > 0, union, jnp.ones_like(union)), zero)
