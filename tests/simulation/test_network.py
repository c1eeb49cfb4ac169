"""When messages between workers arrive, and what happens when on a common clock."""

from __future__ import annotations

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.network import LinkModel, Network

LINK = LinkModel(bytes_per_second=100.0, latency=0.5, per_piece=0.1)


def test_a_message_takes_its_bytes_its_pieces_and_the_latency():
    assert Network(LINK).send("a", "b", 200, now=1.0, pieces=2) == pytest.approx(3.7)


def test_messages_wait_for_both_ends():
    network = Network(LINK)
    assert network.send("a", "b", 90, 0.0) == pytest.approx(1.5)
    assert network.send("a", "c", 90, 0.0) == pytest.approx(2.5)  # the way out of a is taken
    assert network.send("d", "b", 90, 0.0) == pytest.approx(2.5)  # the way in to b
    assert network.send("b", "d", 90, 0.0) == pytest.approx(1.5)  # the other way is free
    assert network.num_bytes == 360
    assert network.busy_seconds == pytest.approx(4.0)
    assert network.waited_seconds == pytest.approx(2.0)


def test_messages_between_two_workers_stay_in_order():
    network = Network(LINK)
    times = [network.send("a", "b", size, 0.1 * i) for i, size in enumerate((50, 0, 10, 1))]
    assert times == sorted(times)


def test_what_no_link_can_be():
    for bad in ({"bytes_per_second": 0.0}, {"latency": -1.0}, {"per_piece": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            LinkModel(**({"bytes_per_second": 1.0} | bad))


def test_an_agenda_keeps_the_order_of_time_and_of_notes():
    agenda, done = Agenda(), []
    agenda.at(2.0, lambda now: done.append(("late", now)))
    agenda.at(1.0, lambda now: agenda.at(now, lambda again: done.append(("last", again))))
    agenda.at(1.0, lambda now: done.append(("first", now)))
    agenda.run(until=1.5)
    assert done == [("first", 1.0), ("last", 1.0)]
    assert agenda.now == 1.0
    agenda.run()
    assert done[2:] == [("late", 2.0)]
    for passed in (1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="give a time to come"):
            agenda.at(passed, lambda now: None)
