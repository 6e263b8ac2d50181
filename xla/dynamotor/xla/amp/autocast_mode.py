"""`torch.autocast` for XLA devices: `autocast(xm.xla_device())` is `torch.autocast("xla")`."""

from __future__ import annotations

import torch

from ..errors import require


class autocast(torch.autocast):  # noqa: N801 - the name that scripts use
    """Within this, matrix products and convolutions run in `dtype`, sums and losses in float32.

    device: an XLA device. enabled: False leaves everything as it is. dtype: torch.bfloat16 (what None means)
    or torch.float16. cache_enabled: convert a weight once a region. DM668 for a device that is not XLA's.
    """

    def __init__(
        self,
        device: str | torch.device,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool | None = True,
    ) -> None:
        require(
            torch.device(device).type == "xla",
            "DM668",
            f"{device} is not an XLA device",
            cure=f'use torch.autocast("{torch.device(device).type}")',
        )
        super().__init__("xla", enabled=enabled, dtype=dtype or torch.bfloat16, cache_enabled=cache_enabled)
