"""A stack of equal layers as one loop: the layer is compiled once, however many there are.

>>> hidden = scan_layers(model.decoder_layers, hidden)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.func import functional_call

from ..errors import require
from .scan import _SCAN_COMPUTATION_CACHE, scan

_ONE_LAYER_CACHE = _SCAN_COMPUTATION_CACHE  # a pure layer is kept as the loop over it


def scan_layers(
    layers: Iterable[torch.nn.Module], input_data: Any, partition_fn: Any = None, is_layer_pure: bool = False
) -> Any:
    """What `for layer in layers: x = layer(x)` gives, with gradients for all parameters.

    layers: modules of the same structure, whose result has the structure of the argument (a tensor, or
    nested containers of tensors); a tuple is handed to a layer as its arguments. partition_fn: as for `scan`.
    is_layer_pure: the layers read nothing that changes, so that later calls use the trace again. DM674 for
    layers that differ; DM669 for layers that change their buffers.
    """
    layers = list(layers)
    if not layers:
        return input_data
    names = [dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in layers]
    for number, tensors in enumerate(names):
        why = _difference(names[0], tensors)
        what = f"scan_layers got layers that differ: layer {number} has {why}"
        require(not why, "DM674", what, cure="call them one by one")
    stacked = {name: torch.stack([tensors[name] for tensors in names]) for name in names[0]}
    if not stacked:
        for layer in layers:
            input_data = layer(*input_data) if isinstance(input_data, tuple) else layer(input_data)
        return input_data

    training = tuple([part.training for part in layers[0].modules()])
    step = functools.partial(_step, layers[0], training)
    return scan(step, input_data, stacked, partition_fn, is_layer_pure)[0]


def _difference(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """How the parameters and buffers of a layer differ from those of the first one, "" where they do not."""
    if first.keys() != other.keys():
        return f"mismatched keys: {sorted(first.keys() ^ other.keys())}"
    kinds = [[(name, tuple(t.shape), t.dtype) for name, t in of.items()] for of in (first, other)]
    unlike = [f"{b} instead of {a}" for a, b in zip(*kinds) if a != b]
    return f"another kind of tensor (Shape mismatch or dtype): {', '.join(unlike)}" if unlike else ""


def _step(
    layer: torch.nn.Module, training: tuple[bool, ...], carry: Any, tensors: dict[str, torch.Tensor]
) -> tuple[Any, None]:
    """`training` tells the traces of a pure layer's modes apart."""
    return functional_call(layer, tensors, carry if isinstance(carry, tuple) else (carry,)), None
