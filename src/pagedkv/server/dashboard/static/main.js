// The page: what the server says goes to the map, the charts and the tables.

import { TimeChart } from "./charts.js";
import { Feed } from "./feed.js";
import { ago, clientName, count, duration, element, numbers, percent, plural, setText, short, swatch } from "./format.js";
import { COUNTS, NO_OWNER, PoolMap } from "./pool_map.js";
import { Decisions, Hits, sequenceKey, Sequences, Tenants, Waiting, Workers } from "./tables.js";

const KEPT = 600; // seconds of history
const LATE = 1.5; // seconds after which a picture is not of now
const THEME = "pagedkv-theme";
const THEMES = ["auto", "light", "dark"];
const TENANT_COLOURS = 8;
const STATE_WORDS = {
  free: "free", cached: "cached, nobody holds it", held: "held by one", shared: "held by several",
  draining: "draining: being copied to a lower tier",
};

const $ = (id) => document.getElementById(id);

// A browser may be told to keep nothing: then nothing is kept.
function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {}
}

function recall(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

class Page {
  constructor() {
    this.tenants = new Map(); // tenant -> colour, in the order in which they were first seen
    this.history = { times: [], columns: {} };
    this.pool = null;
    this.sequences = [];
    this.map = new PoolMap($("map"), () => this.inspect());
    this.sequenceTable = new Sequences($("sequences"), (key) => this.light(key));
    this.waitingTable = new Waiting($("waiting"));
    this.tenantTable = new Tenants($("tenants"));
    this.workerTable = new Workers($("workers"));
    this.hits = new Hits($("hits"));
    this.decisions = new Decisions($("decisions"), $("kinds"));
    this.charts = makeCharts($("charts"));
    this.feed = new Feed({
      show: (data, fresh) => this.show(data, fresh),
      fail: (reason) => this.fail(reason),
    });
    this.wire();
  }

  wire() {
    for (const input of document.querySelectorAll("input[name=mode]")) {
      input.addEventListener("change", () => {
        this.map.setMode(input.value);
        this.drawLegend();
      });
    }
    $("pause").addEventListener("click", () => {
      const paused = !this.feed.paused;
      this.feed.pause(paused);
      $("pause").setAttribute("aria-pressed", paused);
      if (paused) this.say("paused", "paused");
    });
    $("goto").addEventListener("change", () => {
      const block = Number($("goto").value);
      if (this.pool && block >= 1 && block <= this.pool.num_blocks) this.map.look(block);
    });
    this.setTheme(recall(THEME) ?? "auto");
    $("theme").addEventListener("click", () => {
      const now = document.documentElement.dataset.theme ?? "auto";
      this.setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.map.draw());
  }

  setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    remember(THEME, theme);
    setText($("theme"), `Theme: ${theme}`);
    this.map.draw();
  }

  say(state, text) {
    $("lamp").dataset.state = state;
    setText($("status"), text);
  }

  sayHow({ now, taken, server }) {
    if (this.feed.paused) return;
    if (now - taken > LATE) this.say("paused", `in a step; the blocks are of ${ago(now - taken)}`);
    else if (server.draining) this.say("paused", "draining: finishes what runs");
    else this.say("live", "live");
  }

  fail(reason) {
    const since = this.lastSeen ? ` What is shown is of ${this.lastSeen.toLocaleTimeString()}.` : "";
    setText($("banner"), `${reason} Trying again every two seconds.${since}`);
    $("banner").hidden = false;
    $("content").classList.add("stale");
    this.say("gone", "no answer");
  }

  show(data, fresh) {
    this.lastSeen = new Date();
    if (fresh) this.history = { times: [], columns: {} };
    $("banner").hidden = true;
    $("content").hidden = false;
    $("content").classList.remove("stale");
    setText($("model"), data.server.model);
    this.sequenceTable.setModel(data.server.model);
    this.sayHow(data);
    this.takePicture(data.picture);
    this.takeHistory(data.history);
    const { now, picture } = data;
    const colourOf = (tenant) => this.colourOf(tenant);
    this.map.show(this.pool, this.sequences, colourOf);
    this.drawLegend();
    this.light(this.sequenceTable.choice);
    this.inspect();
    this.drawTiles(data);
    for (const chart of this.charts) chart.show(this.history.times, this.history.columns, data.history.now);
    this.sequenceTable.show(this.sequences, colourOf);
    setText($("sequences-summary"), summary(this.sequences.length, "sequence"));
    this.waitingTable.show(picture.waiting.requests, colourOf, now);
    setText($("waiting-summary"), summary(picture.waiting.count, "request"));
    this.tenantTable.show(data.tenants, colourOf);
    $("cluster").hidden = data.workers.length === 0;
    this.workerTable.show(data.workers);
    this.hits.show(data.hits);
    this.decisions.show(picture.decisions, now);
  }

  takePicture({ pool, sequences }) {
    if (pool.states) {
      this.pool = {
        ...pool,
        states: numbers(pool.states, Uint8Array),
        counts: numbers(pool.counts, Uint16Array),
        filled: numbers(pool.filled, Uint16Array),
        owners: numbers(pool.owners, Uint16Array),
      };
    }
    this.sequences = sequences.map((row) => ({ ...row, ids: numbers(row.blocks, Int32Array) }));
    for (const { tenant } of this.sequences) this.colourOf(tenant);
  }

  takeHistory({ columns }) {
    const { times } = this.history;
    const first = columns.second[0] ?? Infinity;
    const keep = times.findLastIndex((time) => time < first) + 1;
    const from = Math.max(0, keep + columns.second.length - KEPT);
    this.history.times = times.slice(from, keep).concat(columns.second);
    for (const [key, values] of Object.entries(columns)) {
      this.history.columns[key] = (this.history.columns[key] ?? []).slice(from, keep).concat(values);
    }
  }

  colourOf(tenant) {
    if (!this.tenants.has(tenant)) {
      const place = this.tenants.size + 1;
      this.tenants.set(tenant, place > TENANT_COLOURS ? "tenant-more" : `tenant-${place}`);
    }
    return this.tenants.get(tenant);
  }

  drawTiles({ recent, picture }) {
    const { numbers: by, num_blocks: total, block_size: slots } = this.pool;
    const held = by.held + by.shared;
    setText($("pool-summary"), `${plural(total, "block")} of ${slots} slots`);
    const tiles = [
      ["Pool in use", percent(held, total), `${short(held)} held, ${short(by.cached)} cached`],
      ["Running", count(this.sequences.length), "sequences"],
      ["Waiting", count(picture.waiting.count), "requests"],
      ["Tokens", short(recent.tokens_per_second), "a second"],
      ["First token", duration(recent.ttft_p50), `P99 ${duration(recent.ttft_p99)}`],
      ["Between tokens", duration(recent.itl_p50), `P99 ${duration(recent.itl_p99)}`],
      ["Empty in held", percent(recent.waste, 1), "of the slots, in tails"],
      ["Preemptions", count(recent.preemptions), "in the last minute"],
    ];
    const list = $("tiles");
    if (!list.children.length) {
      list.append(...tiles.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", {}, element("span"), element("small")))));
    }
    tiles.forEach(([, value, small], i) => {
      const [text, note] = list.children[i].lastChild.children;
      setText(text, value);
      setText(note, small);
    });
  }

  drawLegend() {
    const by = this.pool?.numbers;
    if (!by) return;
    let entries;
    if (this.map.mode === "count") {
      entries = [["free", "free"], ["cached", "cached"], ...COUNTS.map((from, i) => {
        const to = (COUNTS[i + 1] ?? Infinity) - 1;
        return [`count-${i + 1}`, to === from ? plural(from, "holder") : to < Infinity ? `${from}–${to}` : `${from} and more`];
      })];
    } else if (this.map.mode === "tenant") {
      const here = new Set(this.sequences.map((row) => row.tenant));
      entries = [...here].filter((t) => this.colourOf(t) !== "tenant-more").map((t) => [this.colourOf(t), t ?? "no tenant"]);
      if (entries.length < here.size) entries.push(["tenant-more", "others"]);
      entries.push(["cached", "cached, or draining"], ["free", "free"]);
    } else {
      entries = Object.entries(by).map(([state, number]) => [state, `${state} ${count(number)}`]);
    }
    const legend = $("legend");
    while (legend.children.length > entries.length) legend.lastChild.remove();
    entries.forEach(([colour, text], i) => {
      const item = legend.children[i] ?? legend.appendChild(element("li", {}, swatch(colour), element("span")));
      item.firstChild.style.background = `var(--${colour})`;
      setText(item.lastChild, text);
    });
  }

  // The blocks of the chosen sequence stand out in the map.
  light(key) {
    const row = key === null ? null : this.sequences.find((s) => sequenceKey(s) === key);
    this.map.light(row ? row.ids : null);
    if (row) this.sequenceTable.show(this.sequences, (tenant) => this.colourOf(tenant));
  }

  inspect() {
    const block = this.map.block;
    if (!block || !this.pool) {
      if (!this.hint) this.hint = $("inspector").firstElementChild;
      if ($("inspector").firstElementChild !== this.hint) $("inspector").replaceChildren(this.hint);
      return;
    }
    this.hint ??= $("inspector").firstElementChild;
    const facts = this.facts(block - 1);
    const text = facts.flat().join("\n");
    if ($("inspector").dataset.text === text && $("inspector").firstElementChild !== this.hint) return;
    $("inspector").dataset.text = text;
    const list = element("dl", { class: "facts" }, element("dd", { class: "big" }, `Block ${count(block)}`));
    for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, value));
    $("inspector").replaceChildren(list);
  }

  // What is known of a block, as [name, text].
  facts(i) {
    const { states, counts, filled, owners, block_size: slots, numbers: by } = this.pool;
    const state = Object.keys(by)[states[i]];
    const facts = [["State", STATE_WORDS[state]]];
    if (state !== "free") facts.push(["Filled", `${filled[i]} of ${plural(slots, "slot")}`]);
    if (!counts[i]) return facts;
    facts.push(["Holders", counts[i] === 0xffff ? "65,535 or more" : count(counts[i])]);
    const holders = this.sequences.filter((row) => row.ids.includes(i + 1));
    const first = owners[i] === NO_OWNER ? null : this.sequences[owners[i]];
    if (first && !holders.includes(first)) holders.unshift(first);
    for (const row of holders.slice(0, 4)) {
      const place = row.ids.indexOf(i + 1);
      const samples = row.samples.length > 1 || row.samples[0] ? ` [${row.samples.join(", ")}]` : "";
      const tenant = row.tenant === null ? "" : `, tenant ${row.tenant}`;
      facts.push(["Sequence", `${clientName(row.request)}${samples}${tenant}`]);
      if (place >= 0) {
        const end = Math.min(row.tokens, (place + 1) * slots);
        facts.push(["Tokens", place * slots < end ? `${count(place * slots)} to ${count(end - 1)}` : "reserved, none yet"]);
      }
    }
    if (holders.length > 4) facts.push(["", `and ${plural(holders.length - 4, "sequence")} more`]);
    return facts;
  }
}

const summary = (number, noun) => (number > 100 ? `${plural(number, noun)}, the first 100` : number ? plural(number, noun) : "");

function makeCharts(parent) {
  const whole = (value) => short(value);
  const quantiles = (name) => [
    { key: `${name}_p50`, label: "median", colour: "held" },
    { key: `${name}_p99`, label: "P99", colour: "shared" },
  ];
  return [
    new TimeChart(parent, {
      title: "Memory", note: "blocks", stacked: true, wide: true, whole: true, say: whole,
      series: [
        { key: "filled", label: "tokens", colour: "held" },
        { key: "empty", label: "empty in tails", colour: "waste" },
        { key: "draining", label: "draining", colour: "draining" },
        { key: "cached", label: "cached", colour: "cached" },
        { key: "free", label: "free", colour: "free" },
      ],
    }),
    new TimeChart(parent, {
      title: "Queue", note: "requests", say: whole,
      series: [
        { key: "running", label: "running", colour: "held" },
        { key: "waiting", label: "waiting", colour: "shared" },
      ],
    }),
    new TimeChart(parent, { title: "Time to first token", note: "each second's", series: quantiles("ttft"), say: duration }),
    new TimeChart(parent, { title: "Time between tokens", note: "each second's", series: quantiles("itl"), say: duration }),
    new TimeChart(parent, {
      title: "Tokens", note: "a second", say: whole,
      series: [
        { key: "tokens", label: "computed", colour: "held" },
        { key: "output_tokens", label: "drawn", colour: "shared" },
      ],
    }),
  ];
}

new Page().feed.start();
