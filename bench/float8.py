"""Linear layers trained in float8 by torchao's recipes; torchao is no requirement of the project:

    pip install --no-deps torchao

>>> model = convert(model, "tensorwise")
"""

from __future__ import annotations

import dataclasses
import importlib

from torch import nn

NONE = "none"
RECIPES = (NONE, "tensorwise", "rowwise", "rowwise_with_gw_hp")


def missing() -> str:
    """A line that says what to install; empty if nothing is missing."""
    try:
        importlib.import_module("torchao")
    except ImportError:
        return "float8 recipes are torchao's: pip install --no-deps torchao"
    return ""


def find_scales(model: nn.Module) -> None:
    """The scales of all weights that are gathered in float8, by one reduction; called behind the optimizer."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def convert(model: nn.Module, recipe: str, emulate: bool = False, gather: bool = False) -> nn.Module:
    """The model with float8 layers for its linear layers, but for the head. emulate: products in float32 of the
    rounded operands, for devices without float8 products. gather: FSDP2 gathers weights in float8."""
    if recipe == NONE:
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    known = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(known, emulate=emulate, enable_fsdp_float8_all_gather=gather)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: "lm_head" not in name
    )
