"""A program whose static parts are computed once and again only when the tensors they were computed from have
changed.

>>> call = FoldedCall(program, Part.of(fold, gm))
>>> call(*inputs)            # program(*inputs, *constants)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _C
from ..base import compat
from ..base.events import counters
from ..graph.sizes import numbers
from ..graph.spec import TensorSpec, copy_as
from ..lower.fold import Fold
from ..lower.pass_helpers import placeholders

_below_autograd = compat.BelowAutograd


@dataclass(frozen=True)
class Part:
    """The split-off part: `gm` of the inputs at these positions (with their specs) gives constants of these
    specs.
    """

    gm: fx.GraphModule
    sources: tuple[tuple[int, TensorSpec], ...]
    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(fold: Fold, gm: fx.GraphModule) -> Part:
        """The part that was split off `gm`."""
        specs = [node.meta["val"] for node in placeholders(gm.graph)]
        return Part(
            fold.gm, tuple((i, specs[i]) for i in fold.sources), tuple(specs[len(specs) - fold.count :])
        )


class FoldedCall:
    """Calls `program(*inputs, *constants)`; the constants follow the contents of the static inputs."""

    def __init__(self, program: Callable[..., tuple[Any, ...]], part: Part) -> None:
        self.program, self.part, self._sources, self._specs = program, part, part.sources, part.specs
        self._compute = part.gm.forward
        self._state: tuple[Any, tuple[torch.Tensor, ...]] | None = None

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        return self.program(*inputs, *self.constants(inputs))

    def constants(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The split-off values, for the present static inputs."""
        sources = [inputs[i] for i, _ in self._sources]
        key = self._key(sources)
        state = self._state
        if state is None or state[0] != key:
            counters["fold"]["computed"] += 1
            with torch.inference_mode(False), _below_autograd():
                made = zip(self._compute(*sources), self._specs, strict=True)
                state = self._state = (key, tuple([as_compiled(tensor, spec) for tensor, spec in made]))
        return state[1]

    def _key(self, sources: list[torch.Tensor]) -> tuple[int, bytes]:
        """The sources' contents, as a hash (`(data_ptr, _version)` alone does not see `p.data.mul_(2)`),
        their addresses and how often they were written.
        """
        return _C.fingerprint(sources), _C.tensor_stamps(sources)


class FoldedOnce(FoldedCall):
    """The same, of inputs that cannot be written: the constants are computed once."""

    def _key(self, sources: list[torch.Tensor]) -> tuple[int, bytes]:
        return 0, b""


def as_compiled(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The constant with the strides that the program was compiled for; oneDNN's packed weights have none."""
    if tensor.is_mkldnn or tensor.stride() == spec.stride:
        return tensor
    return copy_as(tensor, numbers(spec.stride))
