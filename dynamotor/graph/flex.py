"""`flex_attention` in a graph: the scores as a matrix, changed and masked by functions of the user's whose
bodies are graphs; pointwise parts fuse with the softmax.

>>> node = graph.call_function(FlexAttention(score, mask, scale=0.125), (q, k, v, bias))  # score reads bias
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .subgraphs import Body


class FlexAttention:
    """A node's target. Takes queries (B, H, L, E), keys (B or 1, G, S, E) and values (B or 1, G, S, F) with G
    a divisor of H, then the inputs of the score's and the mask's bodies, then the counts and indices of a
    mask's
    blocks; gives the output (B, H, L, F) in the queries' dtype and the logarithm of the sums (B, H, L).

    blocks: which of a mask's blocks are among the arguments, two tensors each: in part and whole by rows, in
    part and whole by columns; none where no kernel would read them. block: their queries and keys.
    on_gpu: whether kernels may take this node's place.
    """

    def __init__(self, score: Body | None, mask: Body | None, scale: float) -> None:
        self.__name__ = self.__qualname__ = "flex_attention"
        self.score, self.mask, self.scale = score, mask, scale
        self.blocks: list[str | None] = []
        self.block, self.on_gpu = (0, 0), False

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *free: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups = query.size(1) // key.size(1)
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = query.to(exact) @ key.to(exact).transpose(-2, -1) * self.scale
        places = [torch.arange(size, device=query.device) for size in scores.shape]
        n_score = 0 if self.score is None else self.score.n_free
        if self.score is not None:
            scores = _everywhere(self.score, free[:n_score], (0,))(scores, *places)
        if self.mask is not None:
            seen = _everywhere(self.mask, free[n_score : n_score + self.mask.n_free], ())(*places)
            scores = torch.where(seen, scores, torch.full((), -torch.inf, dtype=exact, device=query.device))
        sums = scores.logsumexp(-1)
        sums = torch.where((scores == -torch.inf).all(-1), -torch.inf, sums)
        weights = torch._safe_softmax(scores, -1)
        return weights.to(query.dtype) @ value.to(query.dtype), sums


def _everywhere(body: Body, free: Sequence[torch.Tensor], first: tuple[int, ...]) -> Callable[..., Any]:
    """The function of (first ..., batch, head, query, key) at all places of the scores."""
    run = body.function(free)
    for varying in (3, 2, 1, 0):
        run = torch.vmap(run, (*first, *[0 if i == varying else None for i in range(4)]))
    return run
