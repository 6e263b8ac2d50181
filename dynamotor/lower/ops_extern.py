"""Ops that are aten calls by design: matrix products, convolutions, attention. They are not fallbacks."""

from __future__ import annotations

from typing import Any

from .extern import BY_DESIGN, is_layout_agnostic
from .lowering import LoopBuilder, lowerings


def _rule(target: Any) -> Any:
    def rule(ctx: LoopBuilder, *args: Any, **kwargs: Any) -> Any:
        return ctx.extern(target, args, kwargs, agnostic=is_layout_agnostic(target))

    return rule


for _target in BY_DESIGN:
    lowerings.add(_target, _rule(_target))
