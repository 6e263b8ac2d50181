"""Sizes of the models of models.txt: for transformers a row a class (config, sizes, inputs), for timm
overrides.

>>> HUGGING_FACE["BertForMaskedLM"].config
'BertConfig'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Config = Any
Kwargs = dict[str, Any]
MakeInputs = Callable[[Config, int, int, torch.Generator, bool], Kwargs]


def _ids(config: Config, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(
        5, config.vocab_size, (batch, length), generator=generator
    )  # the ids below 5 are special tokens


def _encoder(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    return {"input_ids": _ids(config, batch, length, generator)}


def _tokens(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    ids = _ids(config, batch, length, generator)
    return {"input_ids": ids, **({"labels": _ids(config, batch, length, generator)} if train else {})}


def _answers(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    marks = torch.randint(0, length, (2, batch), generator=generator)
    labels = {"start_positions": marks[0], "end_positions": marks[1]} if train else {}
    return {"input_ids": _ids(config, batch, length, generator), **labels}


def _classes(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    labels = {"labels": torch.randint(0, config.num_labels, (batch,), generator=generator)} if train else {}
    return {"input_ids": _ids(config, batch, length, generator), **labels}


def _pairs(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    ids, targets = _ids(config, batch, length, generator), _ids(config, batch, length, generator)
    return {"input_ids": ids, **({"labels": targets} if train else {"decoder_input_ids": targets})}


def _image(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    size = getattr(config, "image_size", None) or 64
    labels = {"labels": torch.randint(0, config.num_labels, (batch,), generator=generator)} if train else {}
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=generator), **labels}


def _clip(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    size = config.vision_config.image_size
    return {
        "input_ids": _ids(config.text_config, batch, length, generator),
        "pixel_values": torch.randn(batch, 3, size, size, generator=generator),
        **({"return_loss": True} if train else {}),
    }


def _speech(config: Config, batch: int, length: int, generator: torch.Generator, train: bool) -> Kwargs:
    frames = 2 * config.max_source_positions
    targets = _ids(config, batch, length, generator)
    return {
        "input_features": torch.randn(batch, config.num_mel_bins, frames, generator=generator),
        **({"labels": targets} if train else {"decoder_input_ids": targets}),
    }


@dataclass(frozen=True)
class HuggingFace:
    """A transformers class: config class, config arguments of the whole and of the reduced model, sequence
    lengths, inputs.
    """

    config: str
    inputs: MakeInputs
    full: Kwargs = field(default_factory=dict)
    small: Kwargs = field(default_factory=dict)
    length: int = 128
    small_length: int = 16


_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
}
_ALBERT_FULL = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 300,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2}
_LLAMA_FULL = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_END = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

HUGGING_FACE: dict[str, HuggingFace] = {
    "AlbertForMaskedLM": HuggingFace("AlbertConfig", _tokens, _ALBERT_FULL, {**_BERT, "embedding_size": 32}),
    "AlbertForQuestionAnswering": HuggingFace(
        "AlbertConfig", _answers, _ALBERT_FULL, {**_BERT, "embedding_size": 32}
    ),
    "BartForConditionalGeneration": HuggingFace("BartConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "BertForMaskedLM": HuggingFace("BertConfig", _tokens, {}, _BERT),
    "BertForQuestionAnswering": HuggingFace("BertConfig", _answers, {}, _BERT),
    "BigBirdForMaskedLM": HuggingFace(
        "BigBirdConfig", _tokens, {"attention_type": "original_full"}, {**_BERT, **_END}
    ),
    "BlenderbotForCausalLM": HuggingFace("BlenderbotConfig", _tokens, {}, {**_BART, **_SPECIAL}),
    "BlenderbotForConditionalGeneration": HuggingFace("BlenderbotConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "BlenderbotSmallForCausalLM": HuggingFace("BlenderbotSmallConfig", _tokens, {}, {**_BART, **_SPECIAL}),
    "BlenderbotSmallForConditionalGeneration": HuggingFace(
        "BlenderbotSmallConfig", _pairs, {}, {**_BART, **_SPECIAL}
    ),
    "CamembertForMaskedLM": HuggingFace("CamembertConfig", _tokens, {}, _BERT),
    "DebertaForMaskedLM": HuggingFace("DebertaConfig", _tokens, {}, _BERT),
    "DebertaForQuestionAnswering": HuggingFace("DebertaConfig", _answers, {}, _BERT),
    "DebertaV2ForQuestionAnswering": HuggingFace(
        "DebertaV2Config",
        _answers,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        _BERT,
    ),
    "DistilBertForMaskedLM": HuggingFace(
        "DistilBertConfig",
        _tokens,
        {},
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 300},
    ),
    "DistilBertForQuestionAnswering": HuggingFace(
        "DistilBertConfig",
        _answers,
        {},
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 300},
    ),
    "GPT2LMHeadModel": HuggingFace("GPT2Config", _tokens, {}, _GPT2),
    "GPT2ForSequenceClassification": HuggingFace("GPT2Config", _classes, {"pad_token_id": 0}, _GPT2),
    "FNetForMaskedLM": HuggingFace("FNetConfig", _tokens, {}, _BERT),
    "LayoutLMForSequenceClassification": HuggingFace("LayoutLMConfig", _classes, {}, _BERT),
    "MBartForCausalLM": HuggingFace("MBartConfig", _tokens, {}, {**_BART, **_SPECIAL}),
    "MBartForConditionalGeneration": HuggingFace("MBartConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "MT5ForConditionalGeneration": HuggingFace("MT5Config", _pairs, {"decoder_start_token_id": 0}, _T5),
    "MegatronBertForCausalLM": HuggingFace("MegatronBertConfig", _tokens, {"is_decoder": True}, _BERT),
    "MegatronBertForQuestionAnswering": HuggingFace("MegatronBertConfig", _answers, {}, _BERT),
    "MobileBertForQuestionAnswering": HuggingFace(
        "MobileBertConfig",
        _answers,
        {},
        {
            **_BERT,
            "embedding_size": 32,
            "intra_bottleneck_size": 32,
            "true_hidden_size": 32,
            "num_feedforward_networks": 2,
        },
    ),
    "PLBartForConditionalGeneration": HuggingFace("PLBartConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "PegasusForConditionalGeneration": HuggingFace("PegasusConfig", _pairs, {}, {**_BART, **_SPECIAL}),
    "ReformerModelWithLMHead": HuggingFace(
        "ReformerConfig",
        _tokens,
        {"is_decoder": True, "axial_pos_shape": (16, 8), "axial_pos_embds_dim": (64, 192), "num_buckets": 8},
        {
            "hidden_size": 64,
            "attention_head_size": 16,
            "num_attention_heads": 4,
            "feed_forward_size": 128,
            "vocab_size": 300,
            "axial_pos_shape": (4, 4),
            "axial_pos_embds_dim": (16, 48),
            "attn_layers": ["local", "local"],
            "local_attn_chunk_length": 8,
            "max_position_embeddings": 16,
        },
    ),
    "RobertaForCausalLM": HuggingFace("RobertaConfig", _tokens, {"is_decoder": True}, _BERT),
    "T5ForConditionalGeneration": HuggingFace("T5Config", _pairs, {"decoder_start_token_id": 0}, _T5),
    "T5EncoderModel": HuggingFace("T5Config", _encoder, {}, _T5),
    "TrOCRForCausalLM": HuggingFace(
        "TrOCRConfig",
        _tokens,
        {},
        {
            "d_model": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 128,
            "vocab_size": 300,
        },
    ),
    "XGLMForCausalLM": HuggingFace(
        "XGLMConfig",
        _tokens,
        {"vocab_size": 50000, "num_layers": 12},
        {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128, "vocab_size": 300},
    ),
    "ConvBertForMaskedLM": HuggingFace("ConvBertConfig", _tokens, {}, {**_BERT, "embedding_size": 32}),
    "LlamaForCausalLM": HuggingFace("LlamaConfig", _tokens, _LLAMA_FULL, _LLAMA),
    "MistralForCausalLM": HuggingFace(
        "MistralConfig", _tokens, {**_LLAMA_FULL, "num_key_value_heads": 4}, _LLAMA
    ),
    "ViTForImageClassification": HuggingFace(
        "ViTConfig", _image, {}, {**_BERT, "image_size": 32, "patch_size": 8}
    ),
    "CLIPModel": HuggingFace(
        "CLIPConfig",
        _clip,
        {},
        {
            "text_config": {**_BERT, "max_position_embeddings": 32, **_END},
            "vision_config": {**_BERT, "image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
        64,
    ),
    "WhisperForConditionalGeneration": HuggingFace(
        "WhisperConfig",
        _speech,
        {
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "decoder_ffn_dim": 1536,
        },
        {
            **_BART,
            **_END,
            "decoder_start_token_id": 2,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "max_target_positions": 64,
        },
    ),
    "PhiForCausalLM": HuggingFace("PhiConfig", _tokens, {**_LLAMA_FULL}, {**_LLAMA, **_END}),
    "MixtralForCausalLM": HuggingFace(
        "MixtralConfig",
        _tokens,
        {**_LLAMA_FULL, "num_hidden_layers": 4, "num_local_experts": 4},
        {**_LLAMA, "num_local_experts": 4},
    ),
    "SwinForImageClassification": HuggingFace(
        "SwinConfig",
        _image,
        {},
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "SegformerForImageClassification": HuggingFace(
        "SegformerConfig",
        _image,
        {"image_size": 224},
        {
            "image_size": 64,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 48, 64],
            "decoder_hidden_size": 64,
        },
    ),
    "ModernBertForMaskedLM": HuggingFace(
        "ModernBertConfig", _tokens, {}, {**_BERT, **_END, "cls_token_id": 1, "sep_token_id": 2}
    ),
}

_VIT = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4}

# timm.create_model's arguments for a reduced model. Names that are not here keep their depth and take a
# smaller image.
TIMM_SMALL: dict[str, Kwargs] = {
    "resnet18": {"layers": (1, 1, 1, 1), "num_classes": 10},
    "resnet50": {"layers": (1, 1, 1, 1), "num_classes": 10},
    "convnext_tiny": {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64), "num_classes": 10},
    "convnext_base": {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64), "num_classes": 10},
    "swin_tiny_patch4_window7_224": {
        "img_size": 56,
        "depths": (2, 2),
        "embed_dim": 24,
        "num_heads": (2, 4),
        "num_classes": 10,
    },
    "swin_base_patch4_window7_224": {
        "img_size": 56,
        "depths": (2, 2),
        "embed_dim": 24,
        "num_heads": (2, 4),
        "num_classes": 10,
    },
    "vit_base_patch16_224": {**_VIT, "num_classes": 10},
    "convit_base": {"img_size": 64, "depth": 3, "embed_dim": 64, "num_heads": 4, "local_up_to_layer": 2},
    "mobilenetv3_large_100": {"num_classes": 10},
}

# Image sizes of reduced models that cannot take the usual 64 pixels.
TIMM_IMAGE: dict[str, int] = {"adv_inception_v3": 96, "pnasnet5large": 96, "hrnet_w18": 64}
