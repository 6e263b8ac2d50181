"""Small configurations of transformers' families beyond those of model_configs.py: a row a class, with random
weights. families.txt lists what `python -m bench families` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .model_configs import (
    _BART,
    _BERT,
    _END,
    _GPT2,
    _LLAMA,
    _SPECIAL,
    _T5,
    Config,
    HuggingFace,
    Kwargs,
    _classes,
    _clip,
    _image,
    _pairs,
    _tokens,
)


def _wave(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    labels = {"labels": torch.randint(1, config.vocab_size, (batch, 4), generator=generator)} if train else {}
    return {"input_values": torch.randn(batch, 1600, generator=generator), **labels}


def _spectrogram(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    labels = {"labels": torch.randint(0, config.num_labels, (batch,), generator=generator)} if train else {}
    shape = (batch, config.max_length, config.num_mel_bins)
    return {"input_values": torch.randn(shape, generator=generator), **labels}


_VISION = {**_BERT, "image_size": 32, "patch_size": 8}
_STAGES = {
    "image_size": 32,
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
}
_WAVE = {
    **_BERT,
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}
_EXPERTS = {**_LLAMA, **_END, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HEADS = {**_LLAMA, **_END, "head_dim": 16}
_FUNNEL = {"vocab_size": 300, "block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
_XLM = {"vocab_size": 300, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "pad_index": 0, "eos_index": 1, **_END}

# A model's class is its family's name and its purpose; its configuration's class the name and "Config".
_Row = tuple[str, str, Callable[..., Kwargs], dict[str, Any]]
_ROWS: tuple[_Row, ...] = (
    (
        "Canine",
        "ForSequenceClassification",
        _classes,
        {**_BERT, "num_hash_buckets": 64, "downsampling_rate": 4, "local_transformer_stride": 8},
    ),
    ("DeiT Beit Dinov2", "ForImageClassification", _image, _VISION),
    (
        "ConvNext",
        "ForImageClassification",
        _image,
        {"image_size": 32, "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    ),
    ("ResNet", "ForImageClassification", _image, _STAGES),
    ("RegNet", "ForImageClassification", _image, {**_STAGES, "layer_type": "y", "groups_width": 8}),
    (
        "PoolFormer",
        "ForImageClassification",
        _image,
        {"image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    ),
    (
        "MobileViT",
        "ForImageClassification",
        _image,
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 4,
        },
    ),
    (
        "EfficientNet",
        "ForImageClassification",
        _image,
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    ),
    (
        "LED",
        "ForConditionalGeneration",
        _pairs,
        {
            **_BART,
            **_SPECIAL,
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    ("LongT5", "ForConditionalGeneration", _pairs, {**_T5, "local_radius": 4, "decoder_start_token_id": 0}),
    (
        "SwitchTransformers",
        "ForConditionalGeneration",
        _pairs,
        {**_T5, "num_experts": 4, "decoder_start_token_id": 0, "router_jitter_noise": 0.0},
    ),
    ("UMT5", "ForConditionalGeneration", _pairs, {**_T5, "decoder_start_token_id": 0}),
    (
        "ProphetNet",
        "ForConditionalGeneration",
        _pairs,
        {
            **_SPECIAL,
            "hidden_size": 64,
            "vocab_size": 300,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
        },
    ),
    ("M2M100", "ForConditionalGeneration", _pairs, {**_BART, **_SPECIAL}),
    ("Marian", "MTModel", _pairs, {**_BART, **_SPECIAL}),
    (
        "AST",
        "ForAudioClassification",
        _spectrogram,
        {
            **_BERT,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
    ),
    (
        "GPTNeo",
        "ForCausalLM",
        _tokens,
        {
            **_END,
            "vocab_size": 300,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 8,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    ("GPTNeoX Falcon Persimmon Rwkv BioGpt", "ForCausalLM", _tokens, {**_BERT, **_END}),
    ("GPTJ CodeGen", "ForCausalLM", _tokens, {**_GPT2, "rotary_dim": 8}),
    ("OPT", "ForCausalLM", _tokens, {**_BERT, **_END, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    (
        "Bloom",
        "ForCausalLM",
        _tokens,
        {**_END, "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    ("Qwen2", "ForCausalLM", _tokens, _LLAMA),
    ("Qwen3 Gemma", "ForCausalLM", _tokens, _HEADS),
    ("Gemma2", "ForCausalLM", _tokens, {**_HEADS, "sliding_window": 8}),
    ("Phi3 Olmo Olmo2 StableLm Starcoder2 Cohere Granite", "ForCausalLM", _tokens, {**_LLAMA, **_END}),
    ("Mpt", "ForCausalLM", _tokens, {**_END, "vocab_size": 300, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    ("Mamba", "ForCausalLM", _tokens, {**_BERT, **_END, "state_size": 8}),
    (
        "Mamba2",
        "ForCausalLM",
        _tokens,
        {**_BERT, **_END, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    ),
    ("Qwen2Moe", "ForCausalLM", _tokens, {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    ("Olmoe", "ForCausalLM", _tokens, _EXPERTS),
    ("Electra", "ForMaskedLM", _tokens, {**_BERT, "embedding_size": 32}),
    ("RobertaPreLayerNorm XLMRoberta Ernie IBert MPNet", "ForMaskedLM", _tokens, _BERT),
    ("Funnel", "ForMaskedLM", _tokens, _FUNNEL),
    ("Longformer", "ForMaskedLM", _tokens, {**_BERT, **_END, "attention_window": 8, "sep_token_id": 2}),
    ("Nystromformer", "ForMaskedLM", _tokens, {**_BERT, "num_landmarks": 4, "segment_means_seq_len": 16}),
    ("RemBert", "ForMaskedLM", _tokens, {**_BERT, "input_embedding_size": 32, "output_embedding_size": 32}),
    ("RoFormer SqueezeBert", "ForMaskedLM", _tokens, {**_BERT, "embedding_size": 64}),
    ("Esm", "ForMaskedLM", _tokens, {**_BERT, **_END, "mask_token_id": 3, "max_position_embeddings": 64}),
    (
        "XLNet",
        "LMHeadModel",
        _tokens,
        {"vocab_size": 300, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
    ),
    ("XLM Flaubert", "WithLMHeadModel", _tokens, _XLM),
    ("Wav2Vec2 Hubert", "ForCTC", _wave, _WAVE),
)
FAMILIES: dict[str, HuggingFace] = {
    f"{family}{kind}": HuggingFace(f"{family}Config", inputs, {}, settings)
    for families, kind, inputs, settings in _ROWS
    for family in families.split()
}
FAMILIES |= {
    "Gemma3ForCausalLM": HuggingFace("Gemma3TextConfig", _tokens, {}, {**_HEADS, "sliding_window": 8}),
    "SiglipModel": HuggingFace(
        "SiglipConfig",
        _clip,
        {},
        {"text_config": {**_BERT, **_END, "max_position_embeddings": 32}, "vision_config": _VISION},
        64,
    ),
}
