"""Which configurations are understood, and that every other is refused by name."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from pagedkv.errors import ModelError
from pagedkv.models import ModelConfig

# As published, shortened to what is in the files of these models.
LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MISTRAL_7B_V03: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
TINYLLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
    "use_cache": True,
    "vocab_size": 32000,
}


def test_llama_32() -> None:
    config = ModelConfig.from_dict(LLAMA_32_1B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 64)
    assert config.rope.kind == "llama3" and config.rope.theta == 500000.0
    assert config.rope.factor == 32.0 and config.rope.original_max_position_embeddings == 8192
    assert config.tie_word_embeddings and not config.qkv_bias and not config.qk_norm
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_mistral_7b_v03() -> None:
    config = ModelConfig.from_dict(MISTRAL_7B_V03)
    assert config.head_dim == 128 and config.rope.theta == 1000000.0


def test_qwen25() -> None:
    config = ModelConfig.from_dict(QWEN25_05B, {"eos_token_id": [151645, 151643]})
    assert config.qkv_bias and not config.output_bias and config.head_dim == 64
    assert config.eos_token_ids == (151645, 151643)


def test_qwen3() -> None:
    config = ModelConfig.from_dict(QWEN3_06B)
    assert config.qk_norm and config.head_dim == 128 and config.hidden_size == 1024


def test_smollm2_and_tinyllama() -> None:
    assert ModelConfig.from_dict(SMOLLM2_135M).rope.theta == 100000
    assert ModelConfig.from_dict(TINYLLAMA).num_kv_heads == 4


def test_what_transformers_writes_now() -> None:
    """transformers 5 writes every default, and `rope_parameters` for `rope_theta`."""
    for config in (
        LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}),
        MistralConfig(sliding_window=None),
        Qwen2Config(),
        Qwen3Config(),
    ):
        parsed = ModelConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
        assert parsed.model_type == config.model_type
    assert ModelConfig.from_dict(LlamaConfig().to_dict()).rope.theta == 10000.0
    linear = ModelConfig.from_dict(
        {
            **TINYLLAMA,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
        }
    )
    assert (linear.rope.kind, linear.rope.theta, linear.rope.factor) == ("linear", 7.0, 2.0)


def test_old_rope_scaling_names_its_type_type() -> None:
    config = ModelConfig.from_dict({**TINYLLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)


def test_absent_fields_mean_what_transformers_assumes() -> None:
    llama = {k: v for k, v in TINYLLAMA.items() if k != "num_key_value_heads"}
    assert ModelConfig.from_dict(llama).num_kv_heads == 32
    qwen3 = {k: v for k, v in QWEN3_06B.items() if k != "head_dim"}
    assert ModelConfig.from_dict(qwen3).head_dim == 128
    mistral = {k: v for k, v in MISTRAL_7B_V03.items() if k != "sliding_window"}
    with pytest.raises(ModelError, match="sliding_window=4096"):
        ModelConfig.from_dict(mistral)


def test_a_window_that_hides_nothing_is_no_window() -> None:
    config = ModelConfig.from_dict({**MISTRAL_7B_V03, "sliding_window": 32768})
    assert config.max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (TINYLLAMA, {"model_type": "gemma2"}, "model_type='gemma2'"),
        (TINYLLAMA, {"model_type": None}, "model_type=None"),
        (TINYLLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        (TINYLLAMA, {"architectures": ["MistralForCausalLM"]}, "architectures"),
        (MISTRAL_7B_V03, {"sliding_window": 4096}, "sliding_window=4096"),
        (QWEN25_05B, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window=4096"),
        (
            QWEN3_06B,
            {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
            "layer_types",
        ),
        (QWEN3_06B, {"layer_types": ["full_attention"] * 27}, "layer_types"),
        (TINYLLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (TINYLLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        (TINYLLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        (TINYLLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        (TINYLLAMA, {"rope_scaling": {"type": "linear"}}, "factor=None"),
        (TINYLLAMA, {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "beta_fast"),
        (TINYLLAMA, {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
        (TINYLLAMA, {"rope_scaling": "linear"}, "rope_scaling='linear'"),
        (TINYLLAMA, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=500000.0"),
        (
            TINYLLAMA,
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "factor=4.0",
        ),
        (
            LLAMA_32_1B,
            {"rope_scaling": {**LLAMA_32_1B["rope_scaling"], "low_freq_factor": 4.0}},
            "low_freq_factor=4.0",
        ),
        (TINYLLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            TINYLLAMA,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25",
        ),
        (SMOLLM2_135M, {"rope_interleaved": True}, "rope_interleaved=True"),
        (TINYLLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (TINYLLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (TINYLLAMA, {"attention_sinks": True}, "attention_sinks=True"),
        (TINYLLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (TINYLLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (TINYLLAMA, {"num_experts": 8}, "num_experts=8"),
        (MISTRAL_7B_V03, {"num_local_experts": 8}, "num_local_experts=8"),
        (TINYLLAMA, {"pretraining_tp": 2}, "pretraining_tp=2"),
        (TINYLLAMA, {"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map"),
        (MISTRAL_7B_V03, {"attention_bias": True}, "attention_bias=True"),
        (QWEN25_05B, {"attention_bias": False}, "attention_bias=False"),
        (QWEN25_05B, {"mlp_bias": True}, "mlp_bias=True"),
        (TINYLLAMA, {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        (TINYLLAMA, {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        (TINYLLAMA, {"num_attention_heads": 30}, "num_key_value_heads=4"),
        (TINYLLAMA, {"hidden_size": 2050}, "hidden_size=2050"),
        (TINYLLAMA, {"head_dim": 63}, "head_dim=63"),
        (TINYLLAMA, {"vocab_size": 0}, "vocab_size=0"),
        (TINYLLAMA, {"num_hidden_layers": True}, "num_hidden_layers=True"),
        (TINYLLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5'"),
        (TINYLLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        (TINYLLAMA, {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        (TINYLLAMA, {"max_position_embeddings": None}, "max_position_embeddings=None"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(base, change, named: str) -> None:
    ModelConfig.from_dict(base)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict({**base, **change})
    assert named in str(caught.value)


def test_a_field_that_is_unset_or_off_is_accepted() -> None:
    off = {
        "attn_logit_softcapping": None,
        "partial_rotary_factor": 1.0,
        "num_experts": None,
        "some_new_feature": None,
    }
    assert ModelConfig.from_dict({**TINYLLAMA, **off}) == ModelConfig.from_dict(TINYLLAMA)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"])
def test_an_unreadable_config_names_the_file(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_without_config_names_the_file(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("odd", [True, -1, 0.5, "x", [], ["x"], {}, {"x": 1}, float("nan")])
def test_odd_values_are_accepted_or_refused_never_a_crash(odd) -> None:
    """No value of a wrong type may end in an error that is not ours."""
    for base in (LLAMA_32_1B, MISTRAL_7B_V03, QWEN25_05B, QWEN3_06B):
        bases = [{**base, key: odd} for key in (*base, "rope_parameters", "unknown")]
        bases += [{**base, "rope_scaling": {"rope_type": odd}}]
        bases += [
            {**base, "rope_scaling": {**LLAMA_32_1B["rope_scaling"], key: odd}}
            for key in LLAMA_32_1B["rope_scaling"]
        ]
        for raw in bases:
            with contextlib.suppress(ModelError):
                ModelConfig.from_dict(raw)


def test_an_end_token_outside_the_vocabulary_ends_nothing() -> None:
    """It cannot be drawn; `min_tokens` would forbid it and reach past the logits."""
    config = ModelConfig.from_dict(TINYLLAMA, {"eos_token_id": [2, 32000]})
    assert config.eos_token_ids == (2,)


def test_json_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="not valid JSON"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 2**63),
        ("num_hidden_layers", 10**400),
        ("rms_norm_eps", 10**400),
        ("rope_theta", 10**400),
    ],
)
def test_numbers_that_no_machine_holds_are_refused(key: str, value: int) -> None:
    with pytest.raises(ModelError, match=rf"{key}={value}"):
        ModelConfig.from_dict(LLAMA_32_1B | {key: value})


def test_layer_types_are_counted_before_they_are_compared() -> None:
    """A list of that many would take all the memory there is."""
    raw = LLAMA_32_1B | {"num_hidden_layers": 10**12, "layer_types": ["full_attention"]}
    with pytest.raises(ModelError, match="layer_types"):
        ModelConfig.from_dict(raw)


def test_an_unknown_field_says_how_to_go_on() -> None:
    with pytest.raises(ModelError, match=r"wibble=3.*remove it from config\.json"):
        ModelConfig.from_dict(LLAMA_32_1B | {"wibble": 3})
