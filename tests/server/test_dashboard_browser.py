"""The dashboard as a browser shows it: headless Chromium, and nothing beyond 127.0.0.1."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import SCREENSHOTS, chromium, needs_chromium, open_page
from playwright.sync_api import Browser, Page, expect
from serving import GatedExecutor, http_server, settings, toy_core
from tiny_llm import VOCAB

from pagedkv.cache.survey import STATES, survey
from pagedkv.engine.core import EngineCore
from pagedkv.engine.toy import ToyExecutor
from pagedkv.scheduling.messages import Abort, Add
from pagedkv.scheduling.params import SamplingParams
from pagedkv.server.app import create_app
from pagedkv.server.settings import DEFAULT_TENANT

pytestmark = needs_chromium

HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>'


class Frozen(EngineCore):
    """Rests between two steps, as if it had nothing to do: what a page shows does not change."""

    thawed = False

    def has_unfinished(self) -> bool:
        return self.thawed and super().has_unfinished()


def frozen_core(num_blocks: int = 64) -> Frozen:
    """With blocks in every state but draining: of requests that have ended, run, and share."""
    made = toy_core(num_blocks, block_size=4, max_num_seqs=4)
    core = Frozen(made.scheduler, made.executor)

    def add(name: str, prompt: str, tenant: str | None, n: int = 1) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, n=n)
        core.send(Add(f"{name}#0", tuple(prompt.encode()), params, 0.0, 1, tenant=tenant))

    add("ended", "this one has ended", "acme")
    for _ in range(60):
        core.step(0.0)
    add("alone", "this one is alone in here", "acme")
    add("group", "all of these share it", HOSTILE, n=3)
    add(HOSTILE, "one that waits", None)
    add(HOSTILE + "b", "one more that waits", None)
    for _ in range(12):
        core.step(0.0)
    return core


@contextmanager
def frozen_server(
    num_blocks: int = 64, keys: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Frozen]]:
    core = frozen_core(num_blocks)
    try:
        with http_server(lambda: core, lambda engine: create_app(engine, settings(keys))) as url:
            yield url, core
    finally:
        core.thawed = True
        scheduler = core.scheduler
        for request in [*scheduler.roster.running, *scheduler.roster.waiting.requests()]:
            core.send(Abort(request.id))
        core.step(0.0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def middle(page: Page, block: int) -> tuple[float, float]:
    """Where a block's cell is, in the window."""
    columns = int(page.get_attribute("#map", "data-columns") or 0)
    size = page.evaluate("document.querySelector('#cells').getBoundingClientRect().width") / columns
    box = page.locator("#cells").bounding_box()
    assert box is not None
    row, column = divmod(block - 1, columns)
    return box["x"] + (column + 0.5) * size, box["y"] + (row + 0.5) * size


def colour_of(page: Page, block: int) -> list[int]:
    """Of the lower part of a block's cell, which has a colour if one slot has a token."""
    return page.evaluate(
        """block => {
            const cells = document.querySelector('#cells');
            const columns = Number(document.querySelector('#map').dataset.columns);
            const size = cells.width / columns;
            const x = ((block - 1) % columns) * size + size / 2;
            const y = Math.floor((block - 1) / columns) * size + size * 0.8;
            return [...cells.getContext('2d').getImageData(x, y, 1, 1).data];
        }""",
        block,
    )[:3]


def style_colour(page: Page, name: str) -> list[int]:
    text = page.evaluate(
        """name => {
            const probe = document.body.appendChild(document.createElement('p'));
            probe.style.color = `var(--${name})`;
            const found = getComputedStyle(probe).color;
            probe.remove();
            return found;
        }""",
        name,
    )
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def test_the_map_has_a_cell_for_every_block_in_the_colour_of_its_state(browser: Browser) -> None:
    with frozen_server() as (url, core), open_page(browser, url) as page:
        assert page.get_attribute("#map", "data-cells") == "64"
        seen = survey(core.scheduler.manager, core.scheduler.sequences)
        states = [STATES[number] for number in seen.states]
        assert set(states) == set(STATES) - {"draining"}
        shades = {state: style_colour(page, state) for state in set(states)}
        for block, state in enumerate(states, 1):
            if state == "free" or seen.filled[block - 1] >= 2:
                assert colour_of(page, block) == shades[state], (block, state)
        legend = page.locator("#legend").inner_text()
        assert re.search(rf"shared {states.count('shared')}\b", legend)
        assert re.search(rf"free {states.count('free')}\b", legend)


def test_pointing_at_a_block_says_who_holds_it(browser: Browser) -> None:
    with frozen_server() as (url, core), open_page(browser, url) as page:
        manager = core.scheduler.manager
        alone = core.scheduler.roster.running[0].branches[0].seq
        block = int(manager.block_table(alone)[2])
        page.mouse.move(*middle(page, block))
        shown = page.locator("#inspector")
        expect(shown).to_contain_text(f"Block {block}")
        expect(shown).to_contain_text("alone, tenant acme")
        expect(shown).to_contain_text("8 to 11")
        expect(shown).to_contain_text("4 of 4 slots")
        states = survey(manager, core.scheduler.sequences).states.tolist()
        for state in ("free", "cached", "shared"):
            other = states.index(STATES.index(state)) + 1
            page.mouse.move(*middle(page, other))
            expect(shown).to_contain_text(f"Block {other}")
            words = {"free": "free", "cached": "nobody holds it", "shared": "held by several"}
            expect(shown).to_contain_text(words[state])
        page.mouse.move(5, 5)
        expect(shown).to_contain_text("Point at one")


def test_the_keyboard_does_all_that_the_pointer_does(browser: Browser) -> None:
    with frozen_server() as (url, core), open_page(browser, url) as page:
        block = int(core.scheduler.manager.block_table(core.scheduler.sequences[0])[1])
        names = []
        for _ in range(40):  # by Tab alone, until the map has the focus
            page.keyboard.press("Tab")
            names.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
            if names[-1] == "map":
                break
        assert names[-1] == "map" and {"pause", "theme", "mode"} <= set(names)
        outline = page.evaluate("getComputedStyle(document.querySelector('#map')).outlineStyle")
        assert outline != "none"
        shown = page.locator("#inspector")
        page.keyboard.press("Home")
        for _ in range(block - 1):
            page.keyboard.press("ArrowRight")
        expect(shown).to_contain_text(f"Block {block}")
        expect(shown).to_contain_text("4 to 7")
        columns = int(page.get_attribute("#map", "data-columns") or 0)
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        assert page.get_attribute("#map", "data-block") == str(1 + columns)
        page.keyboard.press("End")
        assert page.get_attribute("#map", "data-block") == "64"
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#map", "data-block") == "64"
        page.keyboard.press("Escape")
        expect(shown).to_contain_text("Point at one")
        page.fill("#goto", "7")
        page.keyboard.press("Enter")
        expect(shown).to_contain_text("Block 7")


def test_colours_by_tenant_and_by_holders(browser: Browser) -> None:
    with frozen_server() as (url, core), open_page(browser, url) as page:
        manager = core.scheduler.manager
        alone, group = core.scheduler.roster.running
        mine = int(manager.block_table(alone.branches[0].seq)[0])
        ours = int(manager.block_table(group.branches[0].seq)[0])
        page.focus("input[name=mode]:checked")
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#map", "data-mode") == "tenant"
        assert colour_of(page, mine) == style_colour(page, "tenant-1")
        assert colour_of(page, ours) == style_colour(page, "tenant-2")
        legend = page.locator("#legend")
        expect(legend).to_contain_text("acme")
        expect(legend).to_contain_text(HOSTILE)
        page.keyboard.press("ArrowRight")
        assert page.get_attribute("#map", "data-mode") == "count"
        assert colour_of(page, mine) == style_colour(page, "count-1")
        assert colour_of(page, ours) == style_colour(page, "count-3")
        expect(legend).to_contain_text("3–4")


def test_a_chosen_sequence_stands_out_in_the_map(browser: Browser) -> None:
    with frozen_server() as (url, _), open_page(browser, url) as page:
        button = page.get_by_role("button", name="alone")
        button.focus()
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "true")
        veil = """document.querySelector('#marks').getContext('2d')
            .getImageData(0, 0, document.querySelector('#marks').width, 1).data.some(v => v)"""
        assert page.evaluate(veil)
        frames = page.get_attribute("#map", "data-frames") or ""
        expect(page.locator("#map")).not_to_have_attribute("data-frames", frames)
        assert page.evaluate("document.activeElement.textContent") == "alone"  # stays where it was
        page.keyboard.press("Enter")
        assert not page.evaluate(veil)


def test_tables_say_what_runs_and_waits(browser: Browser) -> None:
    with frozen_server() as (url, core), open_page(browser, url) as page:
        rows = page.locator("#sequences tbody tr")
        expect(rows).to_have_count(4)
        table = core.scheduler.manager.block_table(core.scheduler.sequences[0]).tolist()
        expect(rows.first).to_contain_text(f"{table[0]}")
        expect(rows.nth(2)).to_contain_text("group [1]")
        expect(page.locator("#waiting tbody tr")).to_have_count(2)
        expect(page.locator("#decisions")).to_contain_text("ended: length after 30 tokens")
        page.select_option("#kinds", "admit")
        expect(page.locator("#decisions")).not_to_contain_text("ended:")
        expect(page.locator("#decisions")).to_contain_text("admitted in step")


def test_hostile_names_are_text(browser: Browser) -> None:
    with frozen_server() as (url, _), open_page(browser, url) as page:
        expect(page.locator("#decisions")).to_contain_text(HOSTILE)
        for table in ("#waiting", "#tenants"):  # a long name without its middle, and whole as title
            expect(page.locator(table)).to_contain_text(HOSTILE[:15])
            titles = page.locator(f"{table} td[title]").evaluate_all("all => all.map(e => e.title)")
            assert HOSTILE in titles
        assert page.locator("img, body script, iframe").count() == 0
        assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_to_complain_of(browser: Browser, scheme: str) -> None:
    """The rules of WCAG that can be checked by a program, contrast among them."""
    with frozen_server() as (url, _), open_page(browser, url, scheme=scheme) as page:
        page.get_by_role("button", name="alone").click()
        page.focus("#map")
        found = Axe().run(page)
        assert not found.response["violations"], found.generate_report()
        assert len(found.response["passes"]) > 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Browser, scheme: str) -> None:
    def brightness(name: str) -> float:
        parts = [v / 255 for v in style_colour(page, name)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted([brightness(one), brightness(other)])
        return (high + 0.05) / (low + 0.05)

    with frozen_server() as (url, core), open_page(browser, url, scheme=scheme) as page:
        assert (brightness("ground") < 0.2) == (scheme == "dark")
        # WCAG 2.2: 4.5 for text, 3 for what is not.
        for text in ("ink", "muted", "accent", "bad"):
            assert contrast(text, "surface") >= 4.5, text
        assert contrast("on-accent", "accent") >= 4.5
        for state in ("held", "shared", "draining"):
            assert contrast(state, "free") >= 2.2, state
        page.screenshot(path=SCREENSHOTS / f"dashboard-{scheme}.png", full_page=True)
        other = {"light": "dark", "dark": "light"}[scheme]
        while page.locator("#theme").inner_text() != f"Theme: {other}":
            page.click("#theme")
        assert (brightness("ground") < 0.2) == (other == "dark")
        free = survey(core.scheduler.manager, []).states.tolist().index(0) + 1
        assert colour_of(page, free) == style_colour(page, "free")


@pytest.mark.parametrize("width", [360, 768, 1440, 3840])
def test_no_width_is_too_small_or_too_large(browser: Browser, width: int) -> None:
    with frozen_server(1000) as (url, _), open_page(browser, url, width=width) as page:
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
        assert page.get_attribute("#map", "data-cells") == "1000"
        page.screenshot(path=SCREENSHOTS / f"dashboard-{width}.png", full_page=True)


def test_a_hundred_thousand_blocks(browser: Browser) -> None:
    """As many pixels at least as blocks, drawn once a picture; the last block can be found."""
    with frozen_server(100_000) as (url, _), open_page(browser, url) as page:
        assert page.get_attribute("#map", "data-cells") == "100000"
        area = page.evaluate("(c => c.width * c.height)(document.querySelector('#cells'))")
        assert area >= 100_000
        assert int(page.get_attribute("#map", "data-frames") or 0) <= 20
        page.mouse.move(*middle(page, 100_000))
        expect(page.locator("#inspector")).to_contain_text("Block 100,000")
        page.screenshot(path=SCREENSHOTS / "dashboard-100000-blocks.png", full_page=True)


def test_an_engine_that_has_nothing_to_do(browser: Browser) -> None:
    with http_server() as url, open_page(browser, url) as page:
        expect(page.locator("#sequences")).to_contain_text("No request is running")
        expect(page.locator("#sequences")).to_contain_text('"model":"toy"')
        expect(page.locator("#waiting")).to_contain_text("Nobody waits")
        expect(page.locator("#decisions")).to_contain_text("Nothing has been decided yet")
        page.screenshot(path=SCREENSHOTS / "dashboard-empty.png", full_page=True)


def test_it_is_live_and_can_be_paused(browser: Browser) -> None:
    with http_server() as url, open_page(browser, url) as page:
        page.evaluate(
            """async () => {
                const body = JSON.stringify({ model: 'toy', prompt: 'hello there', max_tokens: 9 });
                const headers = { 'Content-Type': 'application/json' };
                await fetch('/v1/completions', { method: 'POST', headers, body });
            }"""
        )
        expect(page.locator("#decisions")).to_contain_text("9 tokens")
        expect(page.locator("#legend")).to_contain_text(re.compile("cached [1-9]"))
        page.click("#pause")
        expect(page.locator("#status")).to_have_text("paused")
        page.click("#pause")
        expect(page.locator("#status")).to_have_text("live")


def test_a_long_step_is_said_to_be_one(browser: Browser) -> None:
    executor = GatedExecutor(ToyExecutor(64, 4, vocab_size=VOCAB))
    body = {"model": "toy", "prompt": "hello there", "max_tokens": 3}
    with (
        http_server(lambda: toy_core(executor=executor)) as url,
        open_page(browser, url) as page,
    ):
        post = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body))
        post.start()
        expect(page.locator("#status")).to_contain_text("in a step")
        expect(page.locator("#banner")).to_be_hidden()
        executor.allow(None)
        post.join(60)
        expect(page.locator("#status")).to_have_text("live")


def test_a_server_that_is_gone_is_said_to_be_gone(browser: Browser) -> None:
    with frozen_server() as (url, _):
        context = open_page(browser, url, quiet=False)
        page = context.__enter__()
        expect(page.locator("#banner")).to_be_hidden()
    try:
        expect(page.locator("#banner")).to_contain_text("does not answer")
        expect(page.locator("#status")).to_have_text("no answer")
        assert page.get_attribute("#map", "data-cells") == "64"  # the last there was
        page.screenshot(path=SCREENSHOTS / "dashboard-gone.png", full_page=True)
    finally:
        context.__exit__(None, None, None)


def test_with_a_key_the_browser_asks_for_it(browser: Browser) -> None:
    keys = {"operators-key": DEFAULT_TENANT}
    with (
        frozen_server(keys=keys) as (url, _),
        open_page(browser, url, password="operators-key") as page,
    ):
        assert page.get_attribute("#map", "data-cells") == "64"
        assert "operators-key" not in page.content() + page.url
