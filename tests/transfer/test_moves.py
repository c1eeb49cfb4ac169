"""Moves over a link that loses nothing."""

from __future__ import annotations

import pytest
from moving_world import World, hello, undisturbed

PROMPT = list(range(10, 24))
MODES = ("prefilled", "live")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3), (3, 4), (1, 8), (8, 1)])
def test_a_request_goes_on_at_the_other_worker(mode: str, sizes: tuple[int, int]) -> None:
    world = World([hello("P", 40, sizes[0]), hello("D", 40, sizes[1])])
    world.submit("r", "P", PROMPT, 20)
    world.tick()
    world.move("r", "D", mode)
    world.run()
    assert world.raised == ["r"] and not world.resumed and not world.failed
    world.check_end()
    assert world.delivered["r"] == undisturbed(PROMPT, 20)
