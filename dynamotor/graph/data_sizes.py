"""Unbacked symbols for ops whose result's size (or number) depends on data, in a trace that goes on.

`sizes_from_data` of an op's definition takes `count` before the arguments. `count(lo, hi, of=position of a
tensor, shape=shape)` makes a symbol; with `of`, it returns the one made before for the same contents.

>>> with shape_mode(DataSizes(env)): mask.nonzero().shape
(u0, 2)
"""

from __future__ import annotations

from typing import Any

import torch

from ..base.compat import OpOverload
from .op_definition import definition
from .sizes import INFINITY, Dim, ShapeEnv, Size
from .spec import aten


class DataSizes:
    """Where a trace's unbacked symbols come from. `met`: such an op was met since `begin()`; `made`: symbols
    that it made, for the nodes that bind them.
    """

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.begin()
        self._counted: dict[Any, tuple[Any, Size]] = {}

    def begin(self) -> DataSizes:
        """Another call of the program."""
        self.met, self.made = False, list[Size]()
        return self

    def infer(
        self, func: OpOverload, args: tuple[Any, ...], specs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The specs (or the number) of a data-dependent op's result; raises Unknown where no rule says."""

        def count(
            lo: Dim = 0, hi: Dim = INFINITY, of: int | None = None, shape: tuple[Dim, ...] = ()
        ) -> Size:
            if of is None:
                return self._new(lo, hi)
            tensor = args[of] if isinstance(args[of], torch.Tensor) else _only(args[of])
            if tensor.is_inference():  # its writes are not counted
                return self._new(lo, hi)
            key = func is aten._local_scalar_dense.default, id(tensor), tensor._version, shape
            if key not in self._counted:
                self._counted[key] = tensor, self._new(lo, hi)
            return self._counted[key][1]

        rule = definition(func).sizes_from_data
        assert rule is not None
        found = rule(count, *specs, **kwargs)
        self.met = True
        return found

    def _new(self, lo: Dim, hi: Dim) -> Size:
        made = self.env.unbacked(lo if type(lo) is int else 0, hi if type(hi) is int else INFINITY)
        if type(hi) is Size:
            self.env.tell(">=", hi - made)
        self.made.append(made)
        return made


def _only(indices: Any) -> Any:
    """The only tensor of an index, which is a mask."""
    (tensor,) = [i for i in indices if i is not None]
    return tensor


def holds(kind: str, value: int, negated: bool) -> None:
    """`torch._check` of a comparison with 0 (a node of graphs). The call is repeated in eager, which raises
    what the user wrote.
    """
    answer = value >= 0 if kind == ">=" else value == 0
    if answer if negated else not answer:
        raise RuntimeError("what torch._check(...) says does not hold")
