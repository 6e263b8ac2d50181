"""Pictures of the layout of tensors over devices.

>>> visualize_tensor_sharding(x); visualize_sharding("{devices=[2,2]<=[4]}")
"""

from __future__ import annotations

import math
import re

import numpy as np

from ...errors import require
from .xla_sharding import visualize_sharding, visualize_tensor_sharding  # noqa: F401


def construct_v1_sharding_str(sharding: str) -> str:
    """XLA's older words for a sharding, which list the devices: "{devices=[2,2]<=[4]}" is
    "{devices=[2,2]0,1,2,3}". DM649 for words that are none."""
    found = re.fullmatch(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}", sharding)
    if found is None:
        known = sharding.startswith(("{replicated", "{maximal", "{devices=["))
        require(known, "DM649", f"{sharding!r} is no sharding", cure='"{devices=[2,2]<=[4]}" is one')
        return sharding
    parts, source, order, rest = found.groups()
    sizes = [int(n) for n in source.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    ids = ids.transpose([int(n) for n in order.split(",")]) if order else ids
    return f"{{devices=[{parts}]{','.join(map(str, ids.flat))}{rest}}}"
