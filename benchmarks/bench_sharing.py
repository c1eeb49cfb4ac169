"""How many blocks does sharing save, step by step, for parallel sampling and for beam search?

The embedded model continues a short prompt and a longer one (text, nothing cached) with n samples
and with beam widths of 2..8, in blocks of 16 tokens. For each step (step 0 computes the prompt, for
all samples at once):

    unshared  the sum over the request's samples of ceil(length / block size)
    saved     unshared - blocks held while the step runs (a block in common is held once)
    saving    saved / unshared

This is the measure of section 6.3 of the PagedAttention paper: blocks saved by sharing over blocks
without sharing. The mean of a run is what all its steps save over what all would take unshared.

"prompt only" is the mean if the full blocks of the prompt were the only ones in common, in every
step. Samples part with their first token: for them the two agree, all of the gain is the prompt's,
and it shrinks as the outputs grow. Beams keep descending from common parents and share outputs too.

The figures are counts of blocks: they do not depend on the machine's speed. Nothing is asserted.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv import LLM, BeamSearchParams, SamplingParams
from pagedkv.engine.output import RequestOutput
from pagedkv.scheduling.messages import StepStats

MODEL = "smollm2-135m-instruct"
BLOCK = 16
OUTPUT = 64
SHOWN = (0, 1, 2, 4, 8, 16, 32, 48, 63)  # steps printed
COUNTS = range(2, 9)

# Kwon et al., "Efficient memory management for large language model serving with PagedAttention",
# SOSP 2023, section 6.3: OPT-13B, ranges over 2..6 sequences.
PUBLISHED = {
    "sampling": "6.1-9.8 % (Alpaca), 16.2-30.5 % (ShareGPT)",
    "beams": "37.6-55.2 % (Alpaca), 44.3-66.3 % (ShareGPT)",
}
PROMPTS = {
    "short prompt": (
        "Name three uses of a lemon in the kitchen, and for each of them the part that is used."
    ),
    "long prompt": (
        "A serving system keeps the keys and values of every token that a request has seen, and "
        "each new token reads all of them. Kept in one contiguous region for each request, they "
        "waste most of the memory: the region is sized for the longest answer, and most answers "
        "are short. Kept in blocks of a few tokens, they grow on demand, any free block serves any "
        "request, and requests that begin alike can read the same blocks. What is written next is "
        "never shared: a block that somebody else still reads is copied before it is written. "
        "Explain to a colleague who knows operating systems well, but has never seen a language "
        "model, which ideas of virtual memory this borrows, which it leaves out, and where the "
        "comparison misleads. Give an example of each."
    ),
}


def savings(llm: LLM, prompt: str, params: SamplingParams | BeamSearchParams) -> list[StepStats]:
    """The figures of each step of a request that finds nothing cached."""
    llm.engine.reset_prefix_cache()
    steps: list[StepStats] = []

    def keep(_: Sequence[RequestOutput], stats: StepStats | None) -> None:
        if stats is not None:
            steps.append(stats)

    llm.run(llm.prepare(prompt, params), on_step=keep)
    return steps


def mean(saved: Sequence[int], unshared: Sequence[int]) -> float:
    return 100 * sum(saved) / sum(unshared)


def show(llm: LLM, kind: str, prompt: str) -> None:
    length = len(llm.get_tokenizer()(prompt)["input_ids"])
    print(f"  {kind}, by step{'':9}" + "".join(f"{step:7d}" for step in SHOWN), end="")
    print("    mean  prompt only")
    for count in COUNTS:
        params: SamplingParams | BeamSearchParams
        if kind == "sampling":
            params = SamplingParams(n=count, max_tokens=OUTPUT, seed=1, ignore_eos=True)
        else:
            params = BeamSearchParams(beam_width=count, max_tokens=OUTPUT, ignore_eos=True)
        steps = savings(llm, prompt, params)
        unshared = [stats.blocks_unshared for stats in steps]
        saved = [stats.blocks_unshared - stats.blocks_peak for stats in steps]
        prompt_only = [(count - 1) * (length // BLOCK)] * len(steps)
        shown = (100 * saved[i] / unshared[i] if i < len(steps) else None for i in SHOWN)
        cells = "".join(f"{'' if value is None else format(value, '.1f'):>7}" for value in shown)
        print(f"    {count} {'samples' if kind == 'sampling' else 'beams':<22}{cells}", end="")
        print(f"  {mean(saved, unshared):5.1f} %    {mean(prompt_only, unshared):5.1f} %")
    print(f"    published, mean: {PUBLISHED[kind]}")


def main() -> None:
    llm = LLM(MODEL, num_blocks=512, block_size=BLOCK)
    print(f"blocks saved / blocks unshared in %, {MODEL}, blocks of {BLOCK}, {OUTPUT} tokens each")
    print("published: Kwon et al., SOSP 2023, section 6.3; OPT-13B, 2..6 sequences, other prompts")
    for name, prompt in PROMPTS.items():
        length = len(llm.get_tokenizer()(prompt)["input_ids"])
        print(f"{name}, {length} tokens")
        for kind in PUBLISHED:
            show(llm, kind, prompt)


if __name__ == "__main__":
    main()
