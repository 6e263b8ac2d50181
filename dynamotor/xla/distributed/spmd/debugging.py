"""Pictures of how tensors lie on devices.

>>> visualize_tensor_sharding(x); visualize_sharding("{devices=[2,2]<=[4]}")
"""

from __future__ import annotations

from .xla_sharding import visualize_sharding, visualize_tensor_sharding  # noqa: F401
