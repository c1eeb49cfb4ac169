"""Requests of many kinds, and all that is compared of their outputs."""

from __future__ import annotations

import random

from pagedkv import LLM, RequestOutput, SamplingParams

STEMS = [
    "You are a helpful assistant who answers in one line. ",
    "Translate the next sentence into French, word by word, please: ",
    "",
]
ENDINGS = ["what is a block table?", "the sky is blue", "how do bridges carry weight", "x"]
Wanted = list[tuple[str, SamplingParams]]
Sample = tuple[tuple[int, ...], str, str | None, int | str | None]


def mixed(count: int, least: int = 1, most: int = 14) -> Wanted:
    """Prompts and parameters: n > 1, seeds, stop strings and token ids, prefix hits.

    Of at most `least` to `most` tokens.
    """
    rng = random.Random(7)
    wanted = []
    for i in range(count):
        text = rng.choice(STEMS) + rng.choice(ENDINGS) + f" {rng.randrange(60)}."
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            temperature=rng.choice((0.0, 0.9)),
            top_k=rng.choice((0, 20)),
            seed=i,
            max_tokens=rng.randint(least, most),
            stop=rng.choice(((), (), ("e", "th"), (" ",))),
            stop_token_ids=rng.choice(([], [], list(range(40, 60)))),
            repetition_penalty=rng.choice((1.0, 1.2)),
        )
        wanted.append((text, params))
    return wanted


def samples(output: RequestOutput) -> list[Sample]:
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def expected(llm: LLM, wanted: Wanted) -> list[list[Sample]]:
    texts, params = zip(*wanted, strict=True)
    return [samples(output) for output in llm.generate(list(texts), list(params))]
