"""`create_block_mask` as code that a trace can follow: eager's own runs inside a mode, or through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask


def create_mask(
    mod_fn: Callable[..., Any], B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None
) -> torch.Tensor:
    """The mask function at all places."""
    sizes = 1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN
    places = [torch.arange(n, device=device) for n in sizes]
    for varying in (3, 2, 1, 0):
        mod_fn = torch.vmap(mod_fn, in_dims=tuple([0 if i == varying else None for i in range(4)]))
    return mod_fn(*places)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """The mask's blocks by rows and by columns, those that it shows whole apart."""
    rows, columns = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    mask = create_mask(mask_mod, B, H, Q_LEN, KV_LEN, device)
    if mask.dtype != torch.bool:
        raise AssertionError(f"mask.dtype must be torch.bool, got {mask.dtype}")
    mask = torch.nn.functional.pad(mask, (0, -KV_LEN % columns, 0, -Q_LEN % rows))
    by_block = mask.view(
        mask.shape[0], mask.shape[1], -(-Q_LEN // rows), rows, -(-KV_LEN // columns), columns
    )
    shown = by_block.sum((3, 5))
    whole = shown == rows * columns if separate_full_blocks else shown < 0
    part = (shown > 0) & ~whole
    full: tuple[Any, ...] = (None, None, None, None)
    if separate_full_blocks:
        full = (*ordered(whole), *ordered(whole.transpose(-2, -1)))
    return BlockMask(
        seq_lengths=(Q_LEN, KV_LEN),
        kv_num_blocks=ordered(part)[0],
        kv_indices=ordered(part)[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=ordered(part.transpose(-2, -1))[0],
        q_indices=ordered(part.transpose(-2, -1))[1],
        full_q_num_blocks=full[2],
        full_q_indices=full[3],
        BLOCK_SIZE=(rows, columns),
        mask_mod=mask_mod,
    )


def ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are there, and the numbers of these, before those of the others."""
    there = blocks.to(torch.int32)
    order = torch.argsort(there, dim=-1, descending=True, stable=True)
    return there.sum(-1).to(torch.int32), order.to(torch.int32)
