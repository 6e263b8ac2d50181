"""Activation checkpointing: PyTorch's own, which looks after the random state of the device.

>>> y = checkpoint(block, x, use_reentrant=False)
"""

from __future__ import annotations

from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: F401
