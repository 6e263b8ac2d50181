"""Eager mode, loops that are compiled once (`scan`, `gradient_accumulation`)."""

from ..regions import compile, eager_mode, eager_mode_context, is_eager_mode

__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]
