"""Models with caches that they write in place, for tests of packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

import dynamotor


class Cached(torch.nn.Module):
    """Attention over a cache of 16 positions that calls fill; counts its calls, and writes an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(1, 2, 16, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.zeros(3, 2).t())

    def forward(self, x: torch.Tensor, at: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x).view(1, -1, 2, 4).transpose(1, 2)
        self.keys.index_copy_(2, at, y)
        self.calls.add_(1)
        self.turned[:, 1] += self.calls
        total[:, 0] += self.calls
        mask = torch.arange(16) <= at[:, None]
        found = functional.scaled_dot_product_attention(y, self.keys, self.keys, mask)
        return found.transpose(1, 2).reshape(1, -1, 8), self.keys[:, :, 2] + 1, self.turned


def examples(n: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of `Cached` for n positions."""
    return torch.randn(1, n, 8), torch.arange(start, start + n), torch.rand(3, 2)


def compared(loaded: Any, model: torch.nn.Module, sizes: Sequence[tuple[int, int]]) -> None:
    """Compare two calls for each of these sizes with the model's: results, the written argument, the state."""
    for n, start in sizes:
        x, at, total = examples(n, start)
        for _ in range(2):
            other = total.clone()
            with torch.no_grad():
                torch.testing.assert_close([*loaded(x, at, total)], [*model(x, at, other)])
            torch.testing.assert_close(total, other, rtol=0, atol=0)
            for name, value in loaded.state.items():
                torch.testing.assert_close(value, model.get_buffer(name))


class Block(torch.nn.Module):
    """A layer of a Llama: grouped attention over a cache, and a gated feed-forward part."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        size = width // 4
        self.q, self.k, self.v = (torch.nn.Linear(width, n * size, bias=False) for n in (4, 2, 2))
        self.out = torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.before, self.between = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.register_buffer("keys", torch.zeros(1, 2, length, size), persistent=False)
        self.register_buffer("values", torch.zeros(1, 2, length, size), persistent=False)

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, rotation: tuple[torch.Tensor, ...], mask: torch.Tensor
    ) -> torch.Tensor:
        h, (cos, sin) = self.before(x), rotation

        def heads(linear: torch.nn.Module) -> torch.Tensor:
            return linear(h).view(1, h.shape[1], -1, self.keys.shape[-1]).transpose(1, 2)

        def turned(t: torch.Tensor) -> torch.Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        self.keys.index_copy_(2, at, turned(heads(self.k)))
        self.values[:, :, at] = heads(self.v)
        y = functional.scaled_dot_product_attention(
            turned(heads(self.q)), self.keys, self.values, mask, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(1, h.shape[1], -1))
        h = self.between(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(torch.nn.Module):
    """Logits of the last token, of tokens at these positions behind those in the caches."""

    def __init__(self, layers: int = 2, width: int = 32, length: int = 64, vocabulary: int = 97) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width, length) for _ in range(layers))
        self.norm, self.head = torch.nn.RMSNorm(width), torch.nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length).float(), 1000 ** -torch.linspace(0, 1, width // 8))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.length = length

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(tokens), torch.arange(self.length) <= at[:, None]
        for block in self.blocks:
            x = block(x, at, (self.cos[at], self.sin[at]), mask)
        return self.head(self.norm(x[:, -1]))


def decoded(
    prefill: Callable[..., torch.Tensor],
    decode: Callable[..., torch.Tensor],
    prompt: list[int],
    steps: int,
) -> list[int]:
    """The likeliest tokens behind a prompt, one after the other."""
    with torch.no_grad():
        logits = prefill(torch.tensor([prompt]), torch.arange(len(prompt)))
        found = [int(logits.argmax(-1))]
        for at in range(len(prompt), len(prompt) + steps):
            found.append(int(decode(torch.tensor([found[-1:]]), torch.tensor([at])).argmax(-1)))
    return found


PROMPTS = ([5, 3, 96, 41, 7], [1, 2], [9, 30, 17, 64, 80, 22, 2, 11, 3])


def programs_of(model: torch.nn.Module) -> dict[str, Any]:
    """A Llama's two methods."""
    dim = torch.export.Dim("n", max=32)
    tokens = torch.tensor([PROMPTS[0]])
    shapes = {"tokens": {1: dim}, "at": {0: dim}}
    return {
        "prefill": dynamotor.export(model, (tokens, torch.arange(5)), dynamic_shapes=shapes),
        "decode": dynamotor.export(model, (tokens[:, :1], torch.arange(5, 6))),
    }
