"""Small configurations of transformers' families beyond those of model_configs.py: a row a class, with random
weights. families.txt lists what `python -m bench families` runs.
"""

from __future__ import annotations

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

FAMILIES: dict[str, HuggingFace] = {
    "ElectraForMaskedLM": HuggingFace("ElectraConfig", _tokens, {}, {**_BERT, "embedding_size": 32}),
    "RobertaPreLayerNormForMaskedLM": HuggingFace("RobertaPreLayerNormConfig", _tokens, {}, _BERT),
    "XLMRobertaForMaskedLM": HuggingFace("XLMRobertaConfig", _tokens, {}, _BERT),
    "XLNetLMHeadModel": HuggingFace(
        "XLNetConfig",
        _tokens,
        {},
        {"vocab_size": 300, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
    ),
    "GPTNeoForCausalLM": HuggingFace(
        "GPTNeoConfig",
        _tokens,
        {},
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
    "GPTNeoXForCausalLM": HuggingFace("GPTNeoXConfig", _tokens, {}, {**_BERT, **_END}),
    "GPTJForCausalLM": HuggingFace("GPTJConfig", _tokens, {}, {**_GPT2, "rotary_dim": 8}),
    "OPTForCausalLM": HuggingFace(
        "OPTConfig", _tokens, {}, {**_BERT, **_END, "ffn_dim": 128, "word_embed_proj_dim": 64}
    ),
    "BloomForCausalLM": HuggingFace(
        "BloomConfig", _tokens, {}, {**_END, "vocab_size": 300, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    ),
    "FalconForCausalLM": HuggingFace("FalconConfig", _tokens, {}, {**_BERT, **_END}),
    "CodeGenForCausalLM": HuggingFace("CodeGenConfig", _tokens, {}, {**_GPT2, "rotary_dim": 8}),
    "Qwen2ForCausalLM": HuggingFace("Qwen2Config", _tokens, {}, _LLAMA),
    "Qwen3ForCausalLM": HuggingFace("Qwen3Config", _tokens, {}, _HEADS),
    "GemmaForCausalLM": HuggingFace("GemmaConfig", _tokens, {}, _HEADS),
    "Gemma2ForCausalLM": HuggingFace("Gemma2Config", _tokens, {}, {**_HEADS, "sliding_window": 8}),
    "Gemma3ForCausalLM": HuggingFace("Gemma3TextConfig", _tokens, {}, {**_HEADS, "sliding_window": 8}),
    "Phi3ForCausalLM": HuggingFace("Phi3Config", _tokens, {}, {**_LLAMA, **_END}),
    "OlmoForCausalLM": HuggingFace("OlmoConfig", _tokens, {}, {**_LLAMA, **_END}),
    "Olmo2ForCausalLM": HuggingFace("Olmo2Config", _tokens, {}, {**_LLAMA, **_END}),
    "StableLmForCausalLM": HuggingFace("StableLmConfig", _tokens, {}, {**_LLAMA, **_END}),
    "Starcoder2ForCausalLM": HuggingFace("Starcoder2Config", _tokens, {}, {**_LLAMA, **_END}),
    "CohereForCausalLM": HuggingFace("CohereConfig", _tokens, {}, {**_LLAMA, **_END}),
    "GraniteForCausalLM": HuggingFace("GraniteConfig", _tokens, {}, {**_LLAMA, **_END}),
    "MptForCausalLM": HuggingFace(
        "MptConfig", _tokens, {}, {**_END, "vocab_size": 300, "d_model": 64, "n_layers": 2, "n_heads": 4}
    ),
    "PersimmonForCausalLM": HuggingFace("PersimmonConfig", _tokens, {}, {**_BERT, **_END}),
    "MambaForCausalLM": HuggingFace("MambaConfig", _tokens, {}, {**_BERT, **_END, "state_size": 8}),
    "Mamba2ForCausalLM": HuggingFace(
        "Mamba2Config",
        _tokens,
        {},
        {**_BERT, **_END, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    ),
    "RwkvForCausalLM": HuggingFace("RwkvConfig", _tokens, {}, {**_BERT, **_END}),
    "BioGptForCausalLM": HuggingFace("BioGptConfig", _tokens, {}, {**_BERT, **_END}),
    "ErnieForMaskedLM": HuggingFace("ErnieConfig", _tokens, {}, _BERT),
    "FunnelForMaskedLM": HuggingFace("FunnelConfig", _tokens, {}, _FUNNEL),
    "LongformerForMaskedLM": HuggingFace(
        "LongformerConfig", _tokens, {}, {**_BERT, **_END, "attention_window": 8, "sep_token_id": 2}
    ),
    "LEDForConditionalGeneration": HuggingFace(
        "LEDConfig",
        _pairs,
        {},
        {
            **_BART,
            **_SPECIAL,
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    "NystromformerForMaskedLM": HuggingFace(
        "NystromformerConfig", _tokens, {}, {**_BERT, "num_landmarks": 4, "segment_means_seq_len": 16}
    ),
    "RemBertForMaskedLM": HuggingFace(
        "RemBertConfig", _tokens, {}, {**_BERT, "input_embedding_size": 32, "output_embedding_size": 32}
    ),
    "RoFormerForMaskedLM": HuggingFace("RoFormerConfig", _tokens, {}, {**_BERT, "embedding_size": 64}),
    "SqueezeBertForMaskedLM": HuggingFace("SqueezeBertConfig", _tokens, {}, {**_BERT, "embedding_size": 64}),
    "IBertForMaskedLM": HuggingFace("IBertConfig", _tokens, {}, _BERT),
    "EsmForMaskedLM": HuggingFace(
        "EsmConfig", _tokens, {}, {**_BERT, **_END, "mask_token_id": 3, "max_position_embeddings": 64}
    ),
    "XLMWithLMHeadModel": HuggingFace("XLMConfig", _tokens, {}, _XLM),
    "FlaubertWithLMHeadModel": HuggingFace("FlaubertConfig", _tokens, {}, _XLM),
    "MPNetForMaskedLM": HuggingFace("MPNetConfig", _tokens, {}, _BERT),
    "LongT5ForConditionalGeneration": HuggingFace(
        "LongT5Config", _pairs, {}, {**_T5, "local_radius": 4, "decoder_start_token_id": 0}
    ),
    "SwitchTransformersForConditionalGeneration": HuggingFace(
        "SwitchTransformersConfig",
        _pairs,
        {},
        {**_T5, "num_experts": 4, "decoder_start_token_id": 0, "router_jitter_noise": 0.0},
    ),
    "UMT5ForConditionalGeneration": HuggingFace(
        "UMT5Config", _pairs, {}, {**_T5, "decoder_start_token_id": 0}
    ),
    "ProphetNetForConditionalGeneration": HuggingFace(
        "ProphetNetConfig",
        _pairs,
        {},
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
    "M2M100ForConditionalGeneration": HuggingFace("M2M100Config", _pairs, {}, {**_BART, **_SPECIAL}),
    "MarianMTModel": HuggingFace("MarianConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "Qwen2MoeForCausalLM": HuggingFace(
        "Qwen2MoeConfig", _tokens, {}, {**_EXPERTS, "shared_expert_intermediate_size": 64}
    ),
    "OlmoeForCausalLM": HuggingFace("OlmoeConfig", _tokens, {}, _EXPERTS),
    "DeiTForImageClassification": HuggingFace("DeiTConfig", _image, {}, _VISION),
    "BeitForImageClassification": HuggingFace("BeitConfig", _image, {}, _VISION),
    "Dinov2ForImageClassification": HuggingFace("Dinov2Config", _image, {}, _VISION),
    "ConvNextForImageClassification": HuggingFace(
        "ConvNextConfig",
        _image,
        {},
        {
            "image_size": 32,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_stages": 2,
        },
    ),
    "ResNetForImageClassification": HuggingFace("ResNetConfig", _image, {}, _STAGES),
    "RegNetForImageClassification": HuggingFace(
        "RegNetConfig", _image, {}, {**_STAGES, "layer_type": "y", "groups_width": 8}
    ),
    "PoolFormerForImageClassification": HuggingFace(
        "PoolFormerConfig",
        _image,
        {},
        {"image_size": 64, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    ),
    "MobileViTForImageClassification": HuggingFace(
        "MobileViTConfig",
        _image,
        {},
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 4,
        },
    ),
    "EfficientNetForImageClassification": HuggingFace(
        "EfficientNetConfig",
        _image,
        {},
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    ),
    "Wav2Vec2ForCTC": HuggingFace("Wav2Vec2Config", _wave, {}, _WAVE),
    "HubertForCTC": HuggingFace("HubertConfig", _wave, {}, _WAVE),
    "ASTForAudioClassification": HuggingFace(
        "ASTConfig",
        _spectrogram,
        {},
        {
            **_BERT,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
    ),
    "SiglipModel": HuggingFace(
        "SiglipConfig",
        _clip,
        {},
        {"text_config": {**_BERT, **_END, "max_position_embeddings": 32}, "vision_config": _VISION},
        64,
    ),
    "CanineForSequenceClassification": HuggingFace(
        "CanineConfig",
        _classes,
        {},
        {**_BERT, "num_hash_buckets": 64, "downsampling_rate": 4, "local_transformer_stride": 8},
    ),
}
