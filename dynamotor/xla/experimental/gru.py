"""`torch.nn.GRU`, which is a loop on the device as it stands (recurrent.py): its compile time does not grow
with the length.
"""

from __future__ import annotations

from torch.nn import GRU  # noqa: F401
