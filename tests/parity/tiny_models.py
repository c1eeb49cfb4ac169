"""Tiny random models of every family, scaled so that attention decides the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
MAX_POSITIONS = 160
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama-linear-rope": {"model_type": "llama", "rope_parameters": LINEAR_ROPE},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-attention-bias": {"model_type": "llama", "attention_bias": True},
    "llama-mlp-bias": {"model_type": "llama", "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-head-dim": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied-mqa": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    "qwen3-bias-tied": {
        "model_type": "qwen3",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
}


def make_tiny(name: str) -> PreTrainedModel:
    """A float32 model with random weights, biases and norms; the same for the same name."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        **TINY[name],
    }
    config_class, model_class = FAMILIES[settings.pop("model_type")]
    model = model_class(config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(sorted(TINY).index(name))
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in key:
            parameter.data = 1 + 0.2 * noise
        elif key.endswith("bias"):
            parameter.data = 0.5 * noise
        elif "_proj" in key and "self_attn" in key:
            parameter.data = 0.2 * noise  # scores of several units: attention picks, not averages
        elif "embed" in key or "lm_head" in key:
            parameter.data = 0.25 * noise
        else:
            parameter.data = 0.1 * noise
    return model


def save_tiny(name: str, folder: Path) -> PreTrainedModel:
    """Make the model and save it as a Hugging Face folder without a tokenizer."""
    model = make_tiny(name)
    model.save_pretrained(folder)
    return model
