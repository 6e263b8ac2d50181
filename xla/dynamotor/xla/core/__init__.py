"""`xla_model` and `functions`: the calls that training scripts make."""

from . import functions, xla_model

__all__ = ["functions", "xla_model"]
