"""Which modules become units of their own: PyTorch's own policies.

>>> transformer_auto_wrap_policy
"""

from __future__ import annotations

from torch.distributed.fsdp.wrap import (  # noqa: F401
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
