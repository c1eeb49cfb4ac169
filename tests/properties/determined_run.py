"""Prints one line a step and a delta of a fixed busy run: to be compared between processes."""

from __future__ import annotations

import random

from harness import Run

from pagedkv.scheduling.messages import Add
from pagedkv.scheduling.params import BeamSearchParams

STEP_FIELDS = ("seqs", "tokens", "slots", "copies", "changed_rows", "changed_tables")


def main() -> None:
    rng = random.Random(8)
    run = Run(64, 2, budget=12, eos=(7, 8, 9), max_model_len=60)
    for i in range(70):
        name, prompt = f"r{i}", [rng.randint(1, 9) for _ in range(rng.randint(1, 30))]
        tenant = rng.choice([None, "x", "y", "z"])
        if rng.random() < 0.2:
            beam = BeamSearchParams(rng.randint(1, 3), rng.randint(1, 8))
            add = Add(name, tuple(prompt), beam.sampling, run.sent, 0, tenant=tenant, beam=beam)
            run.core.send(add)
            run.sent += 1
        else:
            run.add(
                name,
                prompt,
                i,
                tenant,
                n=rng.choice([1, 1, 3]),
                temperature=1.0,
                max_tokens=rng.randint(1, 12),
                stop_token_ids=(11, 12, 13),
                logprobs=2,
            )
        if rng.random() < 0.2:
            run.abort(f"r{rng.randint(0, i)}", rng.choice([None, 0, 1]))
        if rng.random() < 0.1:
            run.manager.evict(9)
            run.preempt(f"r{rng.randint(0, i)}")
        run.step()
    run.finish()
    assert run.scheduler.stats.num_preemptions and run.manager.pool.eviction.ghosts
    for step in run.steps:
        print([getattr(step, field).tolist() for field in STEP_FIELDS])
    for delta in run.deltas:
        scores = [s and (s.ids.tolist(), s.values.tolist()) for s in delta.logprobs]
        print(delta.request_id, delta.sample, delta.token_ids, delta.finish_reason, scores)
    print(run.manager.snapshot().hex())


if __name__ == "__main__":
    main()
