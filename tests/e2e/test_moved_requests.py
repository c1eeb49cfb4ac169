"""One worker prefills, another decodes, and to and fro: the tokens are those of one engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from mixed_requests import Sample, Wanted, expected, mixed, samples
from moving import Cluster, Worker
from tiny_llm import save_tiny_llm

from pagedkv import LLM, RequestOutput, SamplingParams, StructuredOutputs
from pagedkv.engine.open_moves import open_moves
from pagedkv.engine.output import OutputProcessor
from pagedkv.engine.requests import text_decoder
from pagedkv.engine.transports import LocalTransport, SharedMemoryTransport
from pagedkv.engine.wire import MoveNews, ToPeer
from pagedkv.scheduling.messages import Abort, Add, Delta
from pagedkv.transfer.messages import Commit, Grant, MoveId, unpack


class TextCluster(Cluster):
    """A front end that makes text, and ends samples at stop strings. Counts what moves."""

    def __init__(self, tokenizer, *workers: Worker) -> None:
        super().__init__(*workers)
        self.processor = OutputProcessor(text_decoder(tokenizer), self.stop)
        self.outputs: dict[str, RequestOutput] = {}
        self.found: dict[MoveId, int] = {}  # tokens that were there by name
        self.totals: dict[MoveId, int] = {}  # tokens with K/V when the request stood still

    def add(self, add: Add, worker: str) -> None:
        self.processor.add(add, add.request_id, None)
        super().add(add, worker)

    def ended(self, request: str) -> bool:
        output = self.outputs.get(request)
        return output is not None and all(sample.finished for sample in output.outputs)

    def show(self, request: str, delta: Delta) -> None:
        renamed = delta._replace(request_id=request)
        for output in self.processor.process([renamed], self.now):
            self.outputs[request] = output

    def stop(self, abort: Abort) -> None:
        assert abort.sample is not None
        self.aborts.append(abort)
        owner = self.fence.owner(abort.request_id)
        assert owner is not None
        self.abort(owner, abort)

    def hear(self, worker: Worker, news: MoveNews) -> None:
        if isinstance(news, ToPeer):
            message = unpack(news.frame)
            if isinstance(message, Grant):
                self.found.setdefault(message.move, message.have)
            elif isinstance(message, Commit):
                self.totals[message.move] = message.total
        super().hear(worker, news)


def make(model: Path, shared: dict, name: str, **settings) -> tuple[LLM, Worker]:
    llm = LLM(
        model,
        deterministic=True,
        attention_backend="native",
        max_num_batched_tokens=128,
        max_moves=16,
        **settings,
    )
    core = llm.engine.core
    transport = SharedMemoryTransport() if name == "shm" else LocalTransport(shared, name)
    return llm, Worker(name, core, open_moves(core, name, 1, transport))


def drive(cluster: TextCluster, llm: LLM, wanted: Wanted, modes: list[str]) -> list[list[Sample]]:
    """Sends the requests to worker `p` as they find room, and moves them in one of the modes."""
    rng, tokenizer = random.Random(3), llm.get_tokenizer()
    queue = [
        Add(str(i), tuple(tokenizer(text).input_ids), params, 0.0, params.seed or 0)
        for i, (text, params) in enumerate(wanted)
    ]
    queue.reverse()

    def each() -> None:
        for _ in range(3):
            if queue:
                add = queue.pop()
                cluster.add(add, "p")
                if "prefilled" in modes:
                    cluster.move(add.request_id, "d")
        if "live" in modes:
            for name in [name for name in cluster.adds if not cluster.ended(name)]:
                owner = cluster.fence.owner(name)
                if owner is not None and rng.random() < 0.5:
                    cluster.move(name, "d" if owner.worker == "p" else "p", "live")

    each()
    while queue:
        cluster.run(each=each)
    cluster.check_idle()
    return [samples(cluster.outputs[str(i)]) for i in range(len(wanted))]


def check_prefilled(model: Path, count: int, **settings) -> None:
    shared: dict = {}
    (llm, p), (_, d) = (make(model, shared, name, **settings) for name in "pd")
    wanted = mixed(count)
    alone = expected(llm, wanted)
    llm.engine.reset_prefix_cache()
    cluster = TextCluster(llm.get_tokenizer(), p, d)
    assert drive(cluster, llm, wanted, ["prefilled"]) == alone
    # Some had ended before they could move, and some by a stop string meanwhile.
    assert not {failure.request_id for failure in cluster.failed} & set(cluster.moved)
    assert len(cluster.moved) > count // 2
    moved = [MoveId(name, 1) for name in cluster.moved]
    # Every prompt was moved as a whole: what came, and what was there by its name.
    for move in moved:
        assert cluster.totals[move] == len(cluster.adds[move.request].prompt)
    came = sum(cluster.totals[move] - cluster.found[move] for move in moved)
    most = sum(total - cluster.found[move] for move, total in cluster.totals.items())
    counters = d.core.scheduler.counters
    source = dict(counters.moved_tokens)
    assert came <= source["sent"] <= most  # some of what came was of no use any more
    assert source["cached"] == sum(cluster.found.values()) > 0
    # What `d` has computed are the tokens behind the prompts, and of the prompts no block: the last
    # token where the samples of a group part; and the partly filled tail of one whose prompt
    # another has too, when that one went on in it first.
    groups = {name for name in cluster.moved if cluster.adds[name].params.n > 1}
    assert d.computed <= counters.generation_tokens + counters.recomputed_tokens
    again = {name: cluster.outputs[name].usage.recomputed_tokens for name in cluster.moved}
    assert all(again[name] - (name in groups) < d.manager.block_size for name in again)
    assert sum(again.values()) <= len(groups) + 0.02 * came
    assert counters.prefix_cache_queries == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llm(folder)
    return folder


def test_a_prefill_worker_and_a_decode_worker_are_one_engine(tiny: Path) -> None:
    check_prefilled(tiny, 200, num_blocks=400)


@pytest.mark.deep
def test_the_embedded_model_is_one_engine_as_well() -> None:
    check_prefilled(Path("smollm2-135m-instruct"), 200, num_blocks=400, max_model_len=256)


def test_live_moves_to_and_fro_change_no_token(tiny: Path) -> None:
    """Between block sizes, while requests decode."""
    shared: dict = {}
    (llm, p), (_, d) = (
        make(tiny, shared, name, block_size=size, num_blocks=6400 // size)
        for name, size in (("p", 16), ("d", 4))
    )
    wanted = [(text, replace(params, max_tokens=30)) for text, params in mixed(40)]
    alone = expected(llm, wanted)
    llm.engine.reset_prefix_cache()
    cluster = TextCluster(llm.get_tokenizer(), p, d)
    assert drive(cluster, llm, wanted, ["live"]) == alone
    assert len(cluster.moved) > 40


@pytest.mark.parametrize("mode", ["prefilled", "live"])
def test_what_an_output_must_be_like_holds_across_moves(tiny: Path, mode: str) -> None:
    """Grammars, penalties and biases are functions of the tokens: nothing of them is sent."""
    shared: dict = {}
    (llm, p), (_, d) = (make(tiny, shared, name, num_blocks=400) for name in "pd")
    base = SamplingParams(max_tokens=24, temperature=0.9, n=2)
    forms = [
        StructuredOutputs(regex=r"(ab|cd){4,9}-\d{3}"),
        StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}}),
        None,
    ]
    wanted = [
        (
            f"request {i}",
            replace(
                base,
                seed=i,
                structured_outputs=forms[i % 3],
                frequency_penalty=0.7 * (i % 2),
                presence_penalty=0.4 * (i % 4 == 3),
                logit_bias={65: 4.0} if i % 5 == 2 else None,
            ),
        )
        for i in range(18)
    ]
    alone = expected(llm, wanted)
    llm.engine.reset_prefix_cache()
    cluster = TextCluster(llm.get_tokenizer(), p, d)
    assert drive(cluster, llm, wanted, [mode]) == alone
    assert len(cluster.moved) >= 12
