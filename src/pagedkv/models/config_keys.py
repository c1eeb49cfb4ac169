"""Which keys of a `config.json` are implemented, which are harmless, which must be neutral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMPLEMENTED = _names(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers "
    "num_attention_heads num_key_value_heads head_dim hidden_act max_position_embeddings "
    "rms_norm_eps tie_word_embeddings rope_theta rope_scaling rope_parameters "
    "bos_token_id eos_token_id layer_types use_sliding_window sliding_window"
)

# Bookkeeping, training, tokenizer and default sampling: none of it is part of the forward pass.
HARMLESS = _names(
    # where it came from and how it is stored
    "transformers_version torch_dtype dtype _name_or_path name_or_path transformers.js_config "
    "unsloth_version unsloth_fixed _commit_hash is_llama_config "
    # training only
    "initializer_range attention_dropout hidden_dropout attention_probs_dropout_prob "
    "hidden_dropout_prob finetuning_task task_specific_params problem_type id2label label2id "
    # how transformers runs it
    "use_cache output_attentions output_hidden_states return_dict torchscript tf_legacy_loss "
    "use_bfloat16 attn_implementation _attn_implementation _attn_implementation_autoset "
    "_flash_attn_2_enabled _flash_attn_2 chunk_size_feed_forward use_flash_attention "
    # read only together with an active sliding window, which is refused
    "max_window_layers "
    # tokenizer
    "pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix "
    # default sampling settings that old versions wrote here
    "max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens"
)


@dataclass(frozen=True, slots=True)
class Neutral:
    """`what` the field switches on, and the values (beside null) that leave it off."""

    what: str
    neutral: tuple[Any, ...] = ()


NEUTRAL: Mapping[str, Neutral] = MappingProxyType(
    {
        "partial_rotary_factor": Neutral("partial rotary embedding", (1.0,)),
        "rope_interleaved": Neutral("interleaved rotary embedding", (False,)),
        "use_mrope": Neutral("multimodal rotary embedding", (False,)),
        "rope_type": Neutral("a rope type outside rope_parameters", ("default",)),
        "attn_logit_softcapping": Neutral("soft-capping of attention scores"),
        "final_logit_softcapping": Neutral("soft-capping of logits"),
        "attention_sinks": Neutral("attention sinks", (False, 0)),
        "num_sink_tokens": Neutral("attention sinks", (0,)),
        "quantization_config": Neutral("running quantised weights"),
        "compression_config": Neutral("running compressed weights"),
        "pretraining_tp": Neutral("tensor-parallel slicing of the linear layers", (1,)),
        "num_experts": Neutral("mixture of experts", (0, 1)),
        "num_local_experts": Neutral("mixture of experts", (0, 1)),
        "num_experts_per_tok": Neutral("mixture of experts", (0,)),
        "moe_intermediate_size": Neutral("mixture of experts"),
        "auto_map": Neutral("running code that the model brings along", ({},)),
        "add_cross_attention": Neutral("cross attention", (False,)),
        "cross_attention_hidden_size": Neutral("cross attention"),
        "is_encoder_decoder": Neutral("an encoder-decoder model", (False,)),
        "is_decoder": Neutral("use as part of an encoder-decoder model", (False,)),
        "tie_encoder_decoder": Neutral("an encoder-decoder model", (False,)),
        "pruned_heads": Neutral("pruned attention heads", ({},)),
        "attention_bias": Neutral("a bias of the attention projections", (False,)),
        "mlp_bias": Neutral("a bias of the MLP", (False,)),
        "qkv_bias": Neutral("a bias of the query, key and value projections", (False,)),
        "use_qk_norm": Neutral("normalised queries and keys", (False,)),
    }
)

# Keys that one family implements or fixes by its definition.
NEUTRAL_FOR: Mapping[tuple[str, str], Neutral] = MappingProxyType(
    {
        ("llama", "attention_bias"): Neutral("", (False, True)),
        ("llama", "mlp_bias"): Neutral("", (False, True)),
        ("qwen3", "attention_bias"): Neutral("", (False, True)),
        ("qwen2", "attention_bias"): Neutral("Qwen2 without QKV bias", (True,)),
        ("qwen2", "qkv_bias"): Neutral("Qwen2 without QKV bias", (True,)),
        ("qwen3", "use_qk_norm"): Neutral("Qwen3 without QK-norm", (True,)),
    }
)
