"""Mixed precision: `autocast(device)`, a `GradScaler` that need not wait for the device, and optimizers for
it in `syncfree`.

>>> with autocast(xm.xla_device()):
...     loss = loss_fn(model(data), target)
>>> scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
"""

from . import syncfree
from .autocast_mode import autocast
from .grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "syncfree"]
