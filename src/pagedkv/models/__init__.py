"""Decoder definitions, their configuration, weights and tokenizers."""

from pagedkv.models.config import ModelConfig, RopeConfig
from pagedkv.models.decoder import Decoder
from pagedkv.models.embedded import EMBEDDED_MODEL
from pagedkv.models.loader import LoadedModel, load_model
from pagedkv.models.parts import DecoderWeights, LayerWeights
from pagedkv.models.tokenizer import load_tokenizer

__all__ = [
    "EMBEDDED_MODEL",
    "Decoder",
    "DecoderWeights",
    "LayerWeights",
    "LoadedModel",
    "ModelConfig",
    "RopeConfig",
    "load_model",
    "load_tokenizer",
]
