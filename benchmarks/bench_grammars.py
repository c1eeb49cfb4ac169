"""What the worst forms of an output cost: how long a check, a compilation and a mask take.

    python benchmarks/bench_grammars.py [MODEL]

Each form is nearly as large as a request may make it. A compilation holds up the step that needs
it, a mask every step of its sample.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from pagedkv import SamplingParams, StructuredOutputs
from pagedkv.engine.grammar import Grammars, check_grammar, model_grammars
from pagedkv.errors import GrammarError, RequestError
from pagedkv.models.config import ModelConfig
from pagedkv.models.loader import find_model
from pagedkv.models.tokenizer import load_tokenizer
from pagedkv.scheduling.step import Sample
from pagedkv.scheduling.structured import MAX_GRAMMAR_BYTES

STEPS = 64


def forms() -> Iterator[tuple[str, StructuredOutputs]]:
    def schema(value: object) -> StructuredOutputs:
        return StructuredOutputs(json=json.dumps(value, separators=(",", ":")))

    nested = '{"items":' * 100 + '{"$ref":"#/$defs/a%d"}' + "}" * 100
    chain = {f"a{i}": json.loads(nested % (i + 1)) for i in range(30)} | {"a30": {}}
    yield "nested arrays", schema({"$defs": chain, "$ref": "#/$defs/a0"})
    yield "many properties", schema({"properties": {f"k{i}": {} for i in range(2600)}})
    yield "many required", schema({"type": "object", "required": [f"k{i}" for i in range(3400)]})
    yield "a long enumeration", schema({"enum": list(range(5500))})
    yield "a long constant", schema({"const": "x" * 32_000})
    yield "a large divisor", schema({"type": "integer", "multipleOf": 104_729})
    yield "a pattern of loops", schema({"type": "string", "pattern": "(a|b)*" * 5000})
    yield "optional letters", StructuredOutputs(regex="a?" * 16_000)
    yield "a long text", StructuredOutputs(regex="a" * 32_000)
    yield "counted twice", StructuredOutputs(regex="(a{1,1000}b?){1,1000}")
    yield "alternatives", StructuredOutputs(regex="|".join(f"w{i}[a-z]*x" for i in range(2300)))
    yield "choices", StructuredOutputs(choice=[f"{i:031d}" for i in range(1024)])
    rules = "\n".join(f"r{i}:r{i + 1}|r{i + 1}" for i in range(1700))
    yield "ambiguous rules", StructuredOutputs(grammar=f'start:r0\n{rules}\nr1700:"a"')
    doubled = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40))
    yield "doubled terminals", StructuredOutputs(grammar=f'start: R0\n{doubled}\nR40: "a"')
    yield "left and right", StructuredOutputs(grammar='start: start start | "a" | ')


def walk(grammars: Grammars, params: SamplingParams) -> Iterator[float]:
    """Seconds of each step of a sample that draws at random."""
    rng, output = np.random.default_rng(0), np.zeros(0, np.int32)
    for _ in range(STEPS):
        grammars.begin()
        start = time.perf_counter()
        constraint = grammars.constraint(Sample(0, params, 0, 0, output=output))
        yield time.perf_counter() - start
        token = int(rng.choice(np.flatnonzero(constraint.allowed)))
        if grammars.advance(constraint, token):
            return
        output = np.append(output, np.int32(token))


def main(model: str) -> None:
    folder = find_model(model, torch.float32)
    config, tokenizer = ModelConfig.from_folder(folder), load_tokenizer(folder)
    grammars = model_grammars(tokenizer, config.vocab_size, config.eos_token_ids)
    assert grammars is not None, "the model has no tokenizer"
    plain = SamplingParams(max_tokens=None, structured_outputs=StructuredOutputs(regex="a"))
    start = time.perf_counter()
    list(walk(grammars, plain))
    print(f"the tokenizer, once: {time.perf_counter() - start:.2f} s")
    print(f"{'ms':20} {'check':>8} {'first':>8} {'step':>8} {'worst':>8}")
    for name, form in forms():
        start = time.perf_counter()
        why = ""
        try:
            check_grammar(form)
        except RequestError as error:
            why = str(error)
        check = time.perf_counter() - start
        steps = []
        if not why:
            try:
                for seconds in walk(grammars, SamplingParams(structured_outputs=form)):
                    steps.append(seconds)
            except GrammarError as error:
                why = str(error)
        shown = [check, steps[0] if steps else None]
        shown += [float(np.median(steps[1:])), max(steps[1:])] if steps[1:] else [None, None]
        numbers = " ".join(f"{'' if s is None else f'{s * 1e3:.1f}':>8}" for s in shown)
        print(f"{name:20} {numbers} {why[:60]}")
    print(f"a form has at most {MAX_GRAMMAR_BYTES} bytes")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["smollm2-135m-instruct"]))
