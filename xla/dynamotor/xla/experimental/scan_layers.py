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
from .scan import scan


def scan_layers(
    layers: Iterable[torch.nn.Module], input_data: Any, partition_fn: Any = None, is_layer_pure: bool = False
) -> Any:
    """What `for layer in layers: x = layer(x)` gives, with gradients for all parameters.

    layers: modules of the same structure, whose result has the structure of the argument (a tensor, or
    nested containers of tensors). partition_fn: as for `scan`. is_layer_pure: the layers read nothing that
    changes, so that later calls use the trace again. DM674 for layers that differ; DM669 for layers that
    change their buffers.
    """
    layers = list(layers)
    if not layers:
        return input_data
    names = [dict(layer.named_parameters()) | dict(layer.named_buffers()) for layer in layers]
    for number, tensors in enumerate(names):
        kinds = [[(k, v.shape, v.dtype) for k, v in of.items()] for of in (tensors, names[0])]
        require(
            kinds[0] == kinds[1],
            "DM674",
            "scan_layers got layers that differ",
            why=f"layer {number} has other parameters or buffers than the first",
            cure="call them one by one",
        )
    stacked = {name: torch.stack([tensors[name] for tensors in names]) for name in names[0]}
    if not stacked:
        for layer in layers:
            input_data = layer(input_data)
        return input_data

    training = tuple([part.training for part in layers[0].modules()])
    step = functools.partial(_step, layers[0], training)
    return scan(step, input_data, stacked, partition_fn, is_layer_pure)[0]


def _step(
    layer: torch.nn.Module, training: tuple[bool, ...], carry: Any, tensors: dict[str, torch.Tensor]
) -> tuple[Any, None]:
    """`training` tells the traces of a pure layer's modes apart."""
    return functional_call(layer, tensors, (carry,)), None
