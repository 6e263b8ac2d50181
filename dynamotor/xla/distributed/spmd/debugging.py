"""Pictures of how tensors lie on devices.

>>> visualize_tensor_sharding(x)
"""

from __future__ import annotations

from .xla_sharding import visualize_tensor_sharding  # noqa: F401
