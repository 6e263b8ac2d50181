"""How exactly float32 products are computed: torch_xla's names for PyTorch's own setting.

>>> set_mat_mul_precision("highest")
"""

from __future__ import annotations

import torch

_NAMES = {"default": "medium", "high": "high", "highest": "highest"}


def set_mat_mul_precision(precision: str) -> None:
    """ "highest" (all bits of float32, PyTorch's default), "high" or "default":
    `torch.set_float32_matmul_precision`.
    """
    torch.set_float32_matmul_precision(_NAMES[precision])


def get_mat_mul_precision() -> str:
    """The name of the setting."""
    return {ours: name for name, ours in _NAMES.items()}[torch.get_float32_matmul_precision()]
