"""The models of the XLA bench and its tests: two small transformers, and the ten of PyTorch's bridge to XLA
(full or small).

>>> case = cases["resnet18"]
>>> model, inputs = case.make(small=True, phase="infer")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .torchvision_stub import prepare


@dataclass(frozen=True)
class Case:
    """A model by name. `batch`, `train_batch`: the batch sizes at which PyTorch's bridge was measured;
    `small`: (model, inputs) for tests."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    batch: int
    train_batch: int
    small_build: Callable[[], nn.Module]
    small_inputs: Callable[[], tuple[torch.Tensor, ...]]

    def make(self, small: bool, phase: str, batch: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The model in the mode of a phase ("infer", "train") with random weights, and a batch of inputs, on
        the CPU.
        """
        torch.manual_seed(0)
        model = self.small_build() if small else self.build()
        size = batch or (self.batch if phase == "infer" else self.train_batch)
        return model.train(phase == "train"), self.small_inputs() if small else self.inputs(size)


class Block(nn.Module):
    """A transformer layer; `first` normalises before attention and feed-forward (ViT), else after them
    (BERT).
    """

    def __init__(self, width: int, heads: int, inner: int, first: bool) -> None:
        super().__init__()
        self.heads, self.first = heads, first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def attend(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.first:
            x = x + self.attend(self.norm1(x), mask)
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x, mask))
        return self.norm2(x + self.feed(x))


class Bert(nn.Module):
    """BERT 2x128: embeddings, two layers of width 128, a pooled classifier."""

    def __init__(self, layers: int = 2, width: int = 128, vocabulary: int = 1000, longest: int = 128) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(longest, width),
            nn.Embedding(2, width),
        )
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width, 2, 4 * width, first=False) for _ in range(layers))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(where) + self.kinds(torch.zeros_like(ids)))
        blocked = (1.0 - mask[:, None, None, :]) * -1e9
        for layer in self.layers:
            x = layer(x, blocked)
        return self.head(torch.tanh(self.pool(x[:, 0])))


class ViT(nn.Module):
    """ViT 4x128: 8x8 patches of 64x64 images, a class token, four layers of width 128."""

    def __init__(
        self, layers: int = 4, width: int = 128, image: int = 64, patch: int = 8, classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(Block(width, 4, 4 * width, first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class FirstOutput(nn.Module):
    """A transformers model whose result is one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs)[0]


def _tokens(batch: int, length: int = 32, vocabulary: int = 1000) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, vocabulary, (batch, length)), torch.ones(batch, length)


def _images(batch: int, size: int = 224) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, size, size),)


def _torchvision(name: str, **options: Any) -> nn.Module:
    prepare()
    import torchvision  # noqa: PLC0415 - needs the stub, and is not a requirement of the package

    return getattr(torchvision.models, name)(weights=None, **options)


def _timm(name: str, **options: Any) -> nn.Module:
    prepare()
    import timm  # noqa: PLC0415

    return timm.create_model(name, pretrained=False, **options)


def _bert(**sizes: int) -> nn.Module:
    prepare()
    import transformers  # noqa: PLC0415

    config = transformers.BertConfig(
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, attn_implementation="eager", **sizes
    )
    return FirstOutput(transformers.BertModel(config, add_pooling_layer=False))


def _vision(
    name: str, batch: int, train_batch: int, size: int = 64, options: dict[str, Any] | None = None
) -> Case:
    small = {"num_classes": 10, **(options or {})}
    return Case(
        name,
        lambda: _torchvision(name),
        _images,
        batch,
        train_batch,
        lambda: _torchvision(name, **small),
        lambda: _images(2, size),
    )


_small_bert = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_small_vit = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}

# Batch sizes: TorchBench's defaults as PyTorch's bridge to XLA ran them in inference; in training it reduced
# four of them.
SEED = [
    _vision("resnet18", 16, 16),
    _vision("resnet50", 32, 16),
    _vision("resnext50_32x4d", 8, 8),
    _vision("alexnet", 128, 128, size=64),
    _vision("mobilenet_v2", 96, 16),
    _vision("mnasnet1_0", 32, 32),
    _vision("vgg16", 64, 8),
    _vision("squeezenet1_1", 32, 32),
    Case(
        "BERT_pytorch",
        _bert,
        lambda n: _tokens(n, 128, 30522)[:1],
        16,
        2,
        lambda: _bert(**_small_bert),
        lambda: _tokens(2, 16, 100)[:1],
    ),
    Case(
        "timm_vision_transformer",
        lambda: _timm("vit_small_patch16_224"),
        _images,
        8,
        8,
        lambda: _timm("vit_small_patch16_224", **_small_vit),
        lambda: _images(2, 32),
    ),
]
SMALL = [
    Case("bert_2x128", Bert, _tokens, 2, 2, Bert, lambda: _tokens(2)),
    Case("vit_4x128", ViT, lambda n: _images(n, 64), 2, 2, ViT, lambda: _images(2, 64)),
]
cases: dict[str, Case] = {case.name: case for case in [*SMALL, *SEED]}
