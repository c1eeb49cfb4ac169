"""Decoder definitions, their configuration, weights and tokenizers."""
