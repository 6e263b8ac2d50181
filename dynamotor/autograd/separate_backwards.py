"""Backwards of several outputs of one compiled graph, one after the other.

`first.backward(); second.backward()` works in eager where both graphs share no saved tensor. A compiled
graph is one node for all outputs, and PyTorch frees the tensors that a node saved after its first backward.
So a backward in which only some of the independent outputs take part leaves behind the tensors that the
backwards of the others read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import compat
from ..graph.spec import TensorSpec

# From the tangents that do not arrive to the places among the saved tensors.
Reads = Callable[[frozenset[int]], frozenset[int]]


@dataclass(frozen=True)
class SeparateBackwards:
    """The tangents of a node in `parts` that share saved tensors (see `reach.saving_parts`), of `n_tangents`
    in all.

    reads: the saved tensors that a backward without some tangents reads.
    """

    n_tangents: int
    parts: tuple[frozenset[int], ...]
    reads: Reads

    @staticmethod
    def of(tangents: Sequence[int], parts: Sequence[int], reads: Reads) -> SeparateBackwards | None:
        """For a node with these tangents, and groups of tangents (bits); None where one backward takes them
        all."""
        own = [frozenset(k for k, tangent in enumerate(tangents) if part >> tangent & 1) for part in parts]
        own = [part for part in own if part]
        whole = not own or own[0] == frozenset(range(len(tangents)))
        return None if whole else SeparateBackwards(len(tangents), tuple(own), reads)

    def leave(self, ctx: Any, saved: Sequence[torch.Tensor], arriving: frozenset[int]) -> None:
        """Keep on a node's context what backwards of the tangents that do not arrive now will read, unless
        PyTorch keeps it."""
        if not compat.keeps_graph():
            ctx.left = self._left(frozenset(range(self.n_tangents)), arriving, saved)

    def take(self, ctx: Any, arriving: frozenset[int]) -> list[torch.Tensor] | None:
        """The tensors that an earlier backward left for these tangents; None where it freed one of them."""
        left: _Left | None = getattr(ctx, "left", None)
        absent = frozenset(range(self.n_tangents)) - arriving
        if left is None or not arriving <= left.tangents or not self.reads(absent) <= left.kept:
            return None
        saved = [one.tensor() if isinstance(one, _Saved) else one.empty() for one in left.saved]
        if not compat.keeps_graph():
            ctx.left = self._left(left.tangents, arriving, saved)
        return saved

    def _left(
        self, tangents: frozenset[int], arriving: frozenset[int], saved: Sequence[torch.Tensor]
    ) -> _Left | None:
        left = tangents - frozenset[int]().union(*(part for part in self.parts if part & arriving))
        if not left:
            return None
        whole = frozenset(range(self.n_tangents))
        backwards = [left, *(part for part in self.parts if part <= left)]
        kept = frozenset[int]().union(*(self.reads(whole - one) for one in backwards))
        return _Left(
            left, kept, [_Saved.of(t) if k in kept else TensorSpec.of(t) for k, t in enumerate(saved)]
        )


@dataclass(frozen=True)
class _Saved:
    """A saved tensor as its version counter was."""

    saved: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Saved:
        return _Saved(tensor, -1 if tensor.is_inference() else tensor._version)

    def tensor(self) -> torch.Tensor:
        """The tensor, if nothing has written into it."""
        if not self.saved.is_inference() and self.saved._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of sizes {tuple(self.saved.shape)} is at version "
                f"{self.saved._version}, and version {self.version} was saved"
            )
        return self.saved


@dataclass(frozen=True)
class _Left:
    """The tangents whose backward may still come, and the saved tensors: a spec stands for one that none
    reads."""

    tangents: frozenset[int]
    kept: frozenset[int]  # the places of those that are kept
    saved: Sequence[_Saved | TensorSpec]
