"""When messages between workers arrive, and what happens when on a common clock."""

from __future__ import annotations

from functools import partial

import pytest

from pagedkv.errors import ConfigError
from pagedkv.simulation.agenda import Agenda
from pagedkv.simulation.network import LinkModel, Network

LINK = LinkModel(bytes_per_second=100.0, latency=0.5, per_piece=0.1)


class Links:
    """A network, and when its messages have come."""

    def __init__(self) -> None:
        self.agenda, self.came = Agenda(), {}
        self.network = Network(LINK, self.agenda)

    def send(self, at: float, source: str, target: str, size: int, pieces: int = 1) -> None:
        name = f"{source}{target}{size}"

        def send(now: float) -> None:
            self.network.send(source, target, size, pieces, partial(self.came.setdefault, name))

        self.agenda.at(at, send)


def test_a_message_takes_its_bytes_its_pieces_and_the_latency():
    links = Links()
    links.send(1.0, "a", "b", 200, pieces=2)
    links.agenda.run()
    assert links.came["ab200"] == pytest.approx(3.7)


def test_messages_wait_for_the_way_out_and_then_for_the_way_in():
    links = Links()
    links.send(0.0, "a", "b", 90)
    links.send(0.0, "a", "c", 90)  # the way out of a is taken
    links.send(0.0, "d", "b", 90)  # the way in to b
    links.send(0.0, "b", "d", 90)  # the other way is free
    links.agenda.run()
    assert links.came == pytest.approx({"ab90": 1.5, "ac90": 2.5, "db90": 2.5, "bd90": 1.5})
    assert links.network.num_bytes == 360
    assert links.network.busy_seconds == pytest.approx(4.0)
    assert links.network.waited_seconds == pytest.approx(2.0)


def test_what_waits_for_a_way_in_holds_up_nobody_else():
    links = Links()
    links.send(0.0, "a", "b", 990)  # ten seconds
    links.send(0.1, "c", "b", 90)
    links.send(0.2, "c", "d", 90)  # once the other has left c, not once it is at b
    links.send(0.3, "e", "d", 90)  # and before that: c is not there yet
    links.agenda.run()
    assert links.came["cb90"] == pytest.approx(11.5)
    assert links.came["ed90"] == pytest.approx(1.8)
    assert links.came["cd90"] == pytest.approx(2.8)


def test_messages_between_two_workers_stay_in_order():
    links = Links()
    for i, size in enumerate((50, 0, 10, 1)):
        links.send(0.1 * i, "a", "b", size)
    links.agenda.run()
    assert list(links.came) == ["ab50", "ab0", "ab10", "ab1"]


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
