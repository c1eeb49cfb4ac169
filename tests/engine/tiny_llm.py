"""A tiny random llama with a byte tokenizer as a local folder, and an engine over the toy model."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pagedkv.cache import BlockManager
from pagedkv.engine.core import EngineCore
from pagedkv.engine.llm_engine import LLMEngine
from pagedkv.engine.output import RequestOutput
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.config import SchedulerConfig
from pagedkv.scheduling.scheduler import Scheduler

EOS = 256
VOCAB = 257  # a token a byte, and the end
CHAT = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = chat_template
    return fast


def save_tiny_llm(folder: Path) -> LlamaForCausalLM:
    """Random weights, scaled so that attention matters; greedy text never ends by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.lm_head.weight.data[EOS] = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def toy_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    seed: int = 0,
    tokenizer: bool = True,
    executor: ToyExecutor | None = None,
    max_num_batched_tokens: int = 16,
) -> LLMEngine:
    """An LLMEngine whose model is the toy and whose clock counts the looks at it."""
    manager = BlockManager(num_blocks, block_size, max_seqs=8)
    config = SchedulerConfig(8, max_num_batched_tokens, max_model_len, (EOS,), VOCAB)
    executor = executor or ToyExecutor(num_blocks, block_size, vocab_size=VOCAB)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    core = EngineCore(Scheduler(manager, config), executor)
    return LLMEngine(core, byte_tokenizer() if tokenizer else None, seed=seed, clock=clock)


def run(engine: LLMEngine, limit: int = 2000) -> dict[str, RequestOutput]:
    """Steps to the end: the last output of each request."""
    last: dict[str, RequestOutput] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return last
        for output in engine.step():
            last[output.request_id] = output
    raise AssertionError(f"not finished after {limit} steps")
