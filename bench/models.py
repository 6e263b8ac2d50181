"""The models that tests, demo and bench run: timm and transformers classes with random weights, whole or at
reduced size.

>>> case = load("BertForMaskedLM", small=True)
>>> args, kwargs = case.make_inputs()
>>> case.loss(case.model(*args, **kwargs)).backward()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dynamotor.base.errors import UsageError

from . import torchvision_stub
from .family_configs import FAMILIES
from .model_configs import HUGGING_FACE, TIMM_IMAGE, TIMM_SMALL, HuggingFace
from .numerics import output_tensors

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

CLASSES = HUGGING_FACE | FAMILIES

TWELVE = (
    "resnet18",
    "resnet50",
    "mobilenetv3_large_100",
    "convnext_tiny",
    "swin_tiny_patch4_window7_224",
    "vit_base_patch16_224",
    "BertForMaskedLM",
    "DistilBertForMaskedLM",
    "GPT2LMHeadModel",
    "AlbertForMaskedLM",
    "T5ForConditionalGeneration",
    "LlamaForCausalLM",
)


@dataclass
class ModelCase:
    """A model with the means to feed it.

    `make_inputs(seed=0, train=False)` gives fresh `(args, kwargs)`; with `train` they hold labels if the
    model computes a loss. `loss(output)` is a scalar that every output which matters takes part in.
    """

    name: str
    model: torch.nn.Module
    make_inputs: Callable[..., Inputs]
    loss: Callable[[Any], torch.Tensor]
    source: str  # "timm" or "hf"


def names(path: str | Path | None = None) -> list[str]:
    """The model names of a list file (lines `timm NAME` or `hf NAME`; `#` starts a comment); default: the
    list of the package.
    """
    text = Path(path or Path(__file__).with_name("models.txt")).read_text()
    lines = (line.split("#")[0].split() for line in text.splitlines())
    return [words[-1] for words in lines if words]


def load(
    name: str, *, small: bool = False, batch: int | None = None, seed: int = 0, dropout: bool = True
) -> ModelCase:
    """Build a model with random weights drawn from `seed`.

    `small` reduces depth, width and image size for tests. `batch` overrides the default batch (4; 2 when
    small). Without `dropout` every drop probability is 0. Raises UsageError for an unknown name and when timm
    or transformers is missing.
    """
    torchvision_stub.prepare()
    batch = batch or (2 if small else 4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        case = _load_hf(name, small, batch, dropout) if name in CLASSES else _load_timm(name, small, batch)
        _wake_zero_weights(case.model)
    if not dropout:
        _silence_dropout(case.model)
    return case


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UsageError(
            "DM120",
            f"{name} is not installed",
            why=str(e),
            cure=f"pip install {name} (it is needed for the model list only, not for the compiler)",
        ) from e


def _weighted_mean(output: Any) -> torch.Tensor:
    """The model's own loss, or the outputs' mean under weights that differ from element to element (a plain
    mean of squares hardly sees what stands before a normalisation)."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    terms = []
    for tensor in output_tensors(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = (
                torch.arange(tensor.numel(), device=tensor.device)
                .remainder(97)
                .sub(48)
                .div(48)
                .view(tensor.shape)
            )
            terms.append((tensor.float() * weights).mean())
    return torch.stack(terms).sum()


def _wake_zero_weights(model: torch.nn.Module) -> None:
    """Heads that start at zero would hide every gradient behind them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)


def _load_timm(name: str, small: bool, batch: int) -> ModelCase:
    timm = _library("timm")
    if not timm.is_model(name):
        raise UsageError(
            "DM121",
            f"unknown model {name!r}",
            why="neither timm nor the table of transformers classes has it",
            cure="see bench/models.txt for the list",
        )
    options = dict(TIMM_SMALL.get(name, {})) if small else {}
    model = timm.create_model(name, pretrained=False, **options)
    size = TIMM_IMAGE.get(name) if small else None
    if size is None:
        size = (
            model.default_cfg["input_size"][-1]
            if not small or model.default_cfg.get("fixed_input_size")
            else 64
        )
    size = options.get("img_size", size)

    def make_inputs(seed: int = 0, train: bool = False) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(batch, 3, size, size, generator=generator),), {}

    return ModelCase(name, model, make_inputs, _weighted_mean, "timm")


def _load_hf(name: str, small: bool, batch: int, dropout: bool) -> ModelCase:
    transformers = _library("transformers")
    row: HuggingFace = CLASSES[name]
    options = {**row.full, **(row.small if small else {})}
    config = _hf_config(transformers, row, options, dropout)
    model = getattr(transformers, name)(config)
    length = row.small_length if small else row.length

    def make_inputs(seed: int = 0, train: bool = False) -> Inputs:
        return (), row.inputs(config, batch, length, torch.Generator().manual_seed(seed), train)

    return ModelCase(name, model, make_inputs, _weighted_mean, "hf")


def _hf_config(transformers: ModuleType, row: HuggingFace, options: dict[str, Any], dropout: bool) -> Any:
    parts = {key: value for key, value in options.items() if isinstance(value, dict)}
    config = getattr(transformers, row.config)(**options)
    for part in [
        config,
        *(getattr(config, key) for key in parts if hasattr(getattr(config, key), "to_dict")),
    ]:
        for key, value in list(vars(part).items()):
            layerdrop = (
                "layerdrop" in key
            )  # draws from Python's random on the host: not a property of the graph
            if isinstance(value, float) and ("drop" in key and not dropout or layerdrop):
                setattr(part, key, 0.0)
    return config


def _silence_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and (key == "p" and "Drop" in type(module).__name__ or "drop" in key):
                setattr(module, key, 0.0)
