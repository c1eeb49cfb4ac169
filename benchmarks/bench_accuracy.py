"""What speed costs in accuracy: every kernel path of this machine in bfloat16, beside transformers.

Run: python benchmarks/bench_accuracy.py [--prompts 64] [--backend native]

The embedded model. Printed is, for each path, the rms error of the centred logits over the prompts
against two references computed by transformers in float32: with the float32 weights, and with the
weights rounded to bfloat16, where only the arithmetic differs; then the perplexity of the text, and
how far it is from float32's. Paths in float32 follow, with the largest error of a logit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accuracy import (
    NUM_PROMPTS,
    Logits,
    each_logits,
    make_prompts,
    paged,
    perplexity,
    rms_error,
    text_tokens,
    transformers,
    transformers_model,
)
from pagedkv.attention.isa import ISA_VARIABLE, available_isas
from pagedkv.attention.native import import_native
from pagedkv.models import EMBEDDED_MODEL, load_model


@contextmanager
def forced(isa: str) -> Iterator[None]:
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = isa
    try:
        yield
    finally:
        del os.environ[ISA_VARIABLE]
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def our_paths(dtype: torch.dtype, backend: str) -> Iterator[tuple[str, Logits]]:
    """Each path that computes the model here, fastest first; the isa stays forced meanwhile."""
    for isa in reversed(available_isas(import_native())):
        with forced(isa):
            yield f"native {isa}", paged(load_model(EMBEDDED_MODEL, dtype).decoder, backend)
    decoder = load_model(EMBEDDED_MODEL, dtype, kernels="torch").decoder
    yield "torch", paged(decoder, backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="a divisor of 64")
    parser.add_argument("--backend", default="native", help="attention")
    options = parser.parse_args()
    exact = load_model(EMBEDDED_MODEL)
    rounded = load_model(EMBEDDED_MODEL, torch.bfloat16)
    tokens = text_tokens(exact.tokenizer)
    prompts = make_prompts(tokens, options.prompts)
    print(f"{len(prompts)} prompts of {sum(map(len, prompts))} tokens, text of {len(tokens)}")

    reference = transformers(transformers_model(exact.path, torch.float32))
    of_rounded = transformers(transformers_model(rounded.path, torch.bfloat16).float())
    want = list(each_logits(reference, prompts))
    want_rounded = list(each_logits(of_rounded, prompts))
    want_perplexity = perplexity(reference, tokens)
    print(f"\n{'bfloat16':20}{'rms error':>12}{'of rounded':>12}{'perplexity':>12}{'off':>10}")
    print(f"{'float32':20}{'':24}{want_perplexity:12.4f}")

    def show(name: str, model: Logits) -> None:
        error = rms_error(each_logits(model, prompts), want)
        arithmetic = rms_error(each_logits(model, prompts), want_rounded)
        ours = perplexity(model, tokens)
        print(
            f"{name:20}{error:12.5f}{arithmetic:12.5f}{ours:12.4f}"
            f"{ours / want_perplexity - 1:+10.3%}",
            flush=True,
        )

    show("transformers", transformers(transformers_model(rounded.path, torch.bfloat16)))
    for name, model in our_paths(torch.bfloat16, options.backend):
        show(name, model)

    print(f"\n{'float32':20}{'rms error':>12}{'largest':>12}")
    for name, model in our_paths(torch.float32, options.backend):
        error = rms_error(each_logits(model, prompts), want)
        pairs = zip(each_logits(model, prompts), want, strict=True)
        largest = max(float((got - exact).abs().max()) for got, exact in pairs)
        print(f"{name:20}{error:12.2e}{largest:12.2e}", flush=True)


if __name__ == "__main__":
    main()
