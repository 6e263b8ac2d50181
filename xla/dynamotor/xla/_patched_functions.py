"""Functions of PyTorch that torch_xla replaces, under their names there: PyTorch's own work on the device.

>>> clip_grad_norm_(model.parameters(), 1.0)
"""

from __future__ import annotations

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
