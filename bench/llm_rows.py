"""The models and the attention calls that `python -m bench llm` times.

>>> config, model = model_of("llama-1.2b", length=2048)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# By row: transformers' model and configuration, and its sizes.
_LLAMA = ("LlamaForCausalLM", "LlamaConfig")
_ONE_B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_EIGHT_B = {**_ONE_B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8}
_EXPERTS = {**_ONE_B, "intermediate_size": 2048, "num_hidden_layers": 8, "num_experts_per_tok": 2}
_ONE_EIGHTH_B = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
_THREE_TENTHS_B = {
    **_ONE_EIGHTH_B,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-1.2b": (*_LLAMA, _ONE_B),
    "llama-125m": (*_LLAMA, _ONE_EIGHTH_B),
    "llama-300m": (*_LLAMA, _THREE_TENTHS_B),
    "llama-8b-slice": (*_LLAMA, _EIGHT_B),
    "mistral-1b": ("MistralForCausalLM", "MistralConfig", {**_ONE_B, "sliding_window": 1024}),
    "qwen3-1b": ("Qwen3ForCausalLM", "Qwen3Config", {**_ONE_B, "head_dim": 64}),
    "gemma3-1b": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_ONE_B, "head_dim": 64, "sliding_window": 512}),
    "gpt-oss-like": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_EXPERTS, "head_dim": 64, "num_local_experts": 8},
    ),
    "mixtral-like": ("MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 8}),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
DEFAULT_SIZES = {"llama-1.2b": "4x2048,8x512,1x16384", "llama-8b-slice": "2x4096"}


def model_of(name: str, length: int, smaller: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """A row's configuration and its model with random weights; smaller: sizes to use instead."""
    import transformers

    model, config, sizes = MODELS[name]
    changed = {**sizes, **(smaller or {}), "max_position_embeddings": max(length, 4096), "use_cache": False}
    if "head_dim" in changed and smaller:
        changed["head_dim"] = 16
    made = getattr(transformers, config)(**changed)
    return made, getattr(transformers, model)(made)


# Attention alone, with a mask as transformers computes it: (q, k) -> which keys a query sees.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BOUND = "attention-is-causal"  # the causal row as PyTorch's own kernel takes it, without a mask
ATTENTION: dict[str, Rule] = {
    "attention": lambda q, k, ids: k <= q,
    BOUND: lambda q, k, ids: k <= q,
    "attention-window": lambda q, k, ids: (k <= q) & (k > q - 1024),
    "attention-chunk": lambda q, k, ids: (k <= q) & (k // 1024 == q // 1024),
    "attention-prefix": lambda q, k, ids: (k <= q) | (k < 256),
    "attention-document": lambda q, k, ids: (k <= q) & (ids[:, None, :, None] == ids[:, None, None, :]),
    "attention-padding": lambda q, k, ids: (k <= q) & (ids[:, None, None, :] > 0),
}


def masked_attention(
    name: str, batch: int, length: int, device: str, small: bool = False
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """The function and its tensors: 32 heads of 64 on 8 of keys and values, and ids of documents."""
    heads, groups, width = (4, 2, 16) if small else (32, 8, 64)
    rule = ATTENTION[name]

    def bound(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(length, device=device)
        mask = rule(positions[None, None, :, None], positions[None, None, None, :], ids)
        k, v = [
            t[:, :, None]
            .expand(batch, groups, heads // groups, length, width)
            .reshape(batch, heads, length, width)
            for t in (k, v)
        ]
        mask = mask.expand(batch, -1, length, length)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(batch, n, length, width) for n in (heads, groups, groups)]
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    documents = torch.arange(length, device=device).div(max(length // 8, 1), rounding_mode="floor")
    return bound if name == BOUND else attend, [*tensors, (documents + 1).repeat(batch, 1)]
