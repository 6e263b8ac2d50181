"""Pictures of the layout of tensors over devices.

>>> visualize_tensor_sharding(x); visualize_sharding("{devices=[2,2]<=[4]}")
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from ... import device as _devices
from ...errors import require
from .marks import layout_of, words


def construct_v1_sharding_str(t: torch.Tensor | str) -> str:
    """A tensor's layout in XLA's older words, which list the devices; newer words are turned into them:
    "{devices=[2,2]<=[4]}" is "{devices=[2,2]0,1,2,3}". DM649 for words that are none."""
    if isinstance(t, torch.Tensor):
        return words(layout_of(t), t.dim())
    found = re.fullmatch(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}", t)
    if found is None:
        known = t.startswith(("{replicated", "{maximal", "{devices=["))
        require(known, "DM649", f"{t!r} is no sharding", cure='"{devices=[2,2]<=[4]}" is one')
        return t
    parts, source, order, rest = found.groups()
    sizes = [int(n) for n in source.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    ids = ids.transpose([int(n) for n in order.split(",")]) if order else ids
    return f"{{devices=[{parts}]{','.join(map(str, ids.flat))}{rest}}}"


def _cells(sharding: str) -> list[list[str]]:
    """The devices of each part, over the first two dimensions."""
    found = re.match(r"\{devices=\[([\d,]+)\]([\d,]+)(.*)\}", construct_v1_sharding_str(sharding))
    if found is None:
        return [[str(list(range(_devices.device_count())))]]
    sizes = [int(n) for n in found[1].split(",")]
    repeated = "last_tile_dim_replicate" in found[3]
    divided = sizes[:-1] if repeated else sizes
    rows, columns = (1, *divided) if len(divided) == 1 else divided[:2]
    ids = np.array([int(n) for n in found[2].split(",")]).reshape(rows, columns, -1).tolist()
    return [[str(part if repeated or len(part) > 1 else part[0]) for part in row] for row in ids]


def visualize_sharding(
    sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80
) -> Any:
    """Print which device has which part of a tensor of this layout, in XLA's words: "{devices=[2,2]<=[4]}",
    "{devices=[4,1]0,2,1,3}", "{replicated}". The table (of `rich`, which must be installed) is returned.

    use_color: no lines between the parts on a console with colours. max_width: of the console. scale,
    min_width: accepted.
    """
    from rich import align, box, console, padding, table  # no requirement of dynamotor-xla

    screen = console.Console(width=max_width)
    lines = not use_color or screen.color_system is None
    look: dict[str, Any] = {"show_header": False, "padding": 0, "pad_edge": False}
    picture = table.Table(show_lines=lines, highlight=lines, box=box.SQUARE if lines else None, **look)
    kind = _devices.local_devices()[0].platform.upper()
    for row in _cells(sharding):
        centred = [align.Align(f"{kind} {cell}", "center", vertical="middle") for cell in row]
        picture.add_row(*[padding.Padding(cell, (1, 1, 1, 1)) for cell in centred])
    screen.print(picture, end="\n\n")
    return picture


def visualize_tensor_sharding(t: torch.Tensor, **options: Any) -> Any:
    """`visualize_sharding` of a tensor's layout."""
    return visualize_sharding(construct_v1_sharding_str(t) or "{replicated}", **options)
