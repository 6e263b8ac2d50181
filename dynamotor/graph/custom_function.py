"""The target of a node that calls a custom autograd function (`torch.autograd.Function`).

>>> graph.call_function(Apply(Reverse), (x, 0.5))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# A C class method since PyTorch 2.14, a Python one before.
own_apply = vars(torch.autograd.Function)["apply"]


@dataclass(frozen=True)
class Apply:
    """The target of a node that calls a custom function. FX writes a method by the name of its module alone,
    and `torch.autograd.function.apply` is none: a graph that ran as it is raised there, and its calls ran
    eager.
    """

    cls: type[torch.autograd.Function]
    held: tuple[tuple[int, Any], ...] = ()  # arguments by place that are no tensors, numbers or containers
    __name__ = "apply"

    def __call__(self, *args: Any) -> Any:
        given = list(args)
        for place, value in self.held:
            given.insert(place, value)
        # The class may have another `apply` that calls this one.
        return own_apply.__get__(None, self.cls)(*given)
