"""Calls that write into their arguments, users' ops and aten's in-place kernels: they get the memory of what
they write where nothing reads the old contents later (`claim.py`), else copies.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..base import compat
from ..base.compat import OpOverload
from ..graph.custom_writes import new_results, split_arguments
from ..graph.spec import TensorSpec
from .claim import IN_PLACE, claim
from .extern import awaited
from .ir import ExternNode
from .program import BufRef, ExternStep, refs
from .realize import Realizer, same_layout
from .value import LoopValue


class NewResults:
    """Calls an op that also returns arguments, and gives its other results."""

    def __init__(self, target: OpOverload) -> None:
        self.target = target
        self.__name__ = target._schema.name.partition("::")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        new = new_results(self.target, awaited(self.target)(*args, **kwargs))
        return new[0] if len(new) == 1 else tuple(new)

    def __repr__(self) -> str:
        return f"{self.target}"


def write_in_place(
    ctx: Realizer, node: fx.Node, args: tuple[Any, ...], func: OpOverload, written: list[str]
) -> Any:
    """The new results of the op, then the tensors that it has written."""
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=True))
    contents: list[LoopValue] = []

    def own(x: Any) -> Any:
        if not isinstance(x, LoopValue):
            return x
        ref = _memory(ctx, x)
        contents.append(LoopValue(x.shape, x.dtype, ref=ref))
        return ref

    def read(x: Any) -> Any:
        return _as_laid_out(ctx, x) if isinstance(x, LoopValue) else x

    given |= {name: _each(own, given[name]) for name in written}
    given = {name: value if name in written else _each(read, value) for name, value in given.items()}
    specs = node.meta["val"] if isinstance(node.meta["val"], tuple) else (node.meta["val"],)
    new = [_result(ctx, spec) for spec in specs[: len(specs) - len(contents)]]
    names = tuple(value.ref.name for value in new if value.ref is not None)
    mutates = tuple(dict.fromkeys(value.ref.name for value in contents if value.ref is not None))
    target = awaited(func) if len(new) == len(func._schema.returns) else NewResults(func)
    call_args, kwargs = split_arguments(func, given)
    step = ExternStep(target, call_args, kwargs, names, None, mutates, True, (), node.meta.get("where"))
    ctx.add(ExternNode(step, frozenset(ref.name for ref in refs((call_args, kwargs))), names, mutates))
    made = (*new, *contents)
    return made if isinstance(node.meta["val"], tuple) else made[0]


def aten_in_place(ctx: Realizer, node: fx.Node, args: Any, kwargs: Any) -> LoopValue | None:
    """An update of part of a tensor by aten's kernel that writes into it; None where it is to be copied
    anyway.
    """
    func, x = IN_PLACE.get(node.target), args[0] if args else None
    if func is None or not isinstance(x, LoopValue) or x.dtype is not node.meta["val"].dtype:
        return None
    mine = claim(ctx, x)
    if mine is None:
        return None

    def read(x: Any) -> Any:
        return _as_laid_out(ctx, x) if isinstance(x, LoopValue) else x

    call_args, kwargs = (mine, *_each(read, tuple(args[1:]))), _each(read, dict(kwargs))
    where = node.meta.get("where")
    step = ExternStep(func, call_args, kwargs, (), None, (mine.name,), True, (), where)
    ctx.add(ExternNode(step, frozenset(ref.name for ref in refs((call_args, kwargs))), (), (mine.name,)))
    return LoopValue(x.shape, x.dtype, ref=mine)


def _each(change: Any, value: Any) -> Any:
    return compat.tree_map(change, value, is_leaf=lambda x: isinstance(x, LoopValue))


def _memory(ctx: Realizer, x: LoopValue) -> BufRef:
    """Memory to be written, laid out as in eager."""
    stride = x.stride or ctx.realize(x).stride
    there = x.ref is not None and same_layout(x.ref, stride)
    return (claim(ctx, x) if there else None) or ctx.copy(x, stride)


def _as_laid_out(ctx: Realizer, x: LoopValue) -> BufRef:
    """Memory to be read, laid out as in eager; apart from memory that the call writes."""
    ref = ctx.realize(x)
    stride = x.stride or ref.stride
    return ref if same_layout(ref, stride) and ref.name not in ctx.claimed.values() else ctx.copy(x, stride)


def _result(ctx: Realizer, spec: TensorSpec) -> LoopValue:
    buffer = ctx.new_buffer(TensorSpec(spec.shape, spec.stride, spec.dtype, spec.device))
    return LoopValue(spec.shape, spec.dtype, ref=BufRef.whole(buffer))
