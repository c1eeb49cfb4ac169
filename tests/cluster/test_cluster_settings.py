"""What cannot be is one line that says what to do; what can be has its figures."""

from __future__ import annotations

import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from serving import toy_core

from pagedkv.cluster.pictures import join_pictures
from pagedkv.cluster.runtime import start_ray
from pagedkv.cluster.totals import total_facts, total_status
from pagedkv.engine.core_loop import core_facts
from pagedkv.engine.picture import NO_OWNER, take_picture
from pagedkv.engine.status import ClusterStatus, WorkerLoad, core_status
from pagedkv.errors import ConfigError, MissingExtraError
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.layers import load_settings
from pagedkv.server.metrics.status import StatusCollector

METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill_workers": "1"}, "need each other"),
        ({"decode_workers": "2"}, "need each other"),
        ({"workers": "1", "prefill_workers": "1", "decode_workers": "1"}, "the other two"),
        ({"ray_address": "auto"}, "set workers"),
        ({"workers": "1", "ray_address": "ray://h:10001"}, "host:port or auto"),
        ({"workers": "1", "ray_address": "local"}, "ray_address='local' is not that of a cluster"),
        ({"workers": "1", "ray_address": ""}, "ray_address='' is not that of a cluster"),
        ({"workers": "1", "ray_address": "127.0.0.1"}, "host:port or auto"),
        ({"workers": "1", "ray_address": "h:0"}, "host:port or auto"),
        ({"workers": "1", "kv_events_endpoint": "tcp://127.0.0.1:5557"}, "a single engine"),
        ({"workers": "2", "enable_prefix_caching": "false"}, "leave it on, or workers out"),
        ({"workers": "-1"}, "--workers"),
        ({"flip_roles_after": "0"}, "--flip-roles-after"),
        ({"workers": "1", "engine_process": "false"}, "a process of its own"),
        ({"worker_threads": "4"}, "PAGEDKV_NUM_THREADS"),
        ({"workers": "1", "worker_threads": "0"}, "--worker-threads"),
    ],
)
def test_settings_that_cannot_be_together_are_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, {}, flags)


def test_workers_have_names_and_roles() -> None:
    def roles(**flags: str) -> dict[str, str]:
        return dict(load_settings(None, {}, flags).settings.cluster.roles())

    assert roles() == {}
    assert roles(workers="2") == {"worker-0": "both", "worker-1": "both"}
    assert roles(prefill_workers="1", decode_workers="1") == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r'pip install "pagedkv\[cluster\]"'):
        start_ray(None, 1)


def test_workers_that_differ_are_refused_by_name() -> None:
    facts = core_facts(toy_core())
    total = total_facts({"a": facts, "b": replace(facts, num_blocks=32, sequence_blocks=8)})
    assert (total.num_blocks, total.sequence_blocks) == (32, 8)
    with pytest.raises(ConfigError, match="'c' differs from worker 'a': block_size is 8, not 4"):
        total_facts({"a": facts, "c": replace(facts, block_size=8)})
    with pytest.raises(ConfigError, match="'b' differs from worker 'a': max_model_len is 7, not"):
        other = replace(facts, config=replace(facts.config, max_model_len=7))
        total_facts({"a": facts, "b": other})


def test_figures_add_up_and_no_counter_falls() -> None:
    cores = [toy_core(num_blocks=16), toy_core(num_blocks=32)]
    for i, core in enumerate(cores):
        core.send(Add("x", (1, 2, 3), SamplingParams(max_tokens=9), 0.0, i, tenant="t"))
        core.step(0.0)
    one, other = map(core_status, cores)
    total = total_status([one, other], [], False, ClusterStatus(()))
    assert (total.num_blocks, total.num_running, total.blocks_held) == (48, 2, 2)
    assert [(t.tenant, t.running) for t in total.tenants] == [("t", 2)]
    assert total.counters.prompt_tokens == 6 and total.counters.steps == 2
    later = total_status([other], [one.counters], False, ClusterStatus(()))
    assert later.counters == total.counters and later.num_blocks == 32
    joined = join_pictures({"a": take_picture(cores[0]), "b": take_picture(cores[1])})
    assert [sequence["worker"] for sequence in joined["sequences"]] == ["a", "b"]
    owners = np.frombuffer(joined["pool"]["owners"], "<u2")
    for i, sequence in enumerate(joined["sequences"]):
        (block,) = np.frombuffer(sequence["blocks"], "<i4")
        assert owners[block - 1] == i and (block > 16) == bool(i)
    assert (owners == NO_OWNER).sum() == 46
    for core in cores:
        core.send(Abort("x"))
        core.step(1.0)


def test_the_reference_names_the_metrics_of_workers() -> None:
    load = WorkerLoad("worker-0", "both", "ready", 1, 0, 2, 1, 1, 64, 8)
    status = total_status([core_status(toy_core())], [], False, ClusterStatus((load,), 3, 1, 2))
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status, 4))
    text = generate_latest(registry).decode()
    of_workers = r"^pagedkv:(worker_\w+|router_\w+|requests_(?:moved_total|resumed_total|unplaced))"
    section = METRICS.read_text().partition("## Workers")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)`", section, re.M))
    assert set(re.findall(of_workers, text, re.M)) == documented
    assert 'pagedkv:worker_restarts_total{worker="worker-0"} 1.0' in text


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"{address}.*ray start --head"):
            start_ray(address, 2)
