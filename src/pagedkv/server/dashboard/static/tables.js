// Tables whose rows stay the same elements while their figures change: focus and selection stay.

import { ago, clientName, count, duration, element, percent, plural, ranges, setText, short, shortName, swatch } from "./format.js";

const MOST_ROWS = 100;
const MOST_RANGES = 14;
const TIERS = ["held", "cached", "draining"]; // colours, from the device down
const TIER_WORDS = { device: "in the pool", host: "in host memory", disk: "on disk", computed: "computed" };

class Table {
  // columns: [heading, class]; the first cell of a row is what `head` makes.
  constructor(parent, columns, empty) {
    this.rows = new Map();
    this.empty = element("div", { class: "empty" });
    this.empty.append(...[empty].flat());
    const heads = columns.map(([text, kind]) => element("th", { scope: "col", class: kind }, text));
    this.kinds = columns.map(([, kind]) => kind);
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.body);
    parent.replaceChildren(this.table, this.empty);
  }

  // entries: [{ key, cells }], each cell a text or a function that is given the <td>.
  show(entries) {
    const keys = new Set(entries.map(({ key }) => key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    entries.forEach(({ key, cells }, place) => {
      let row = this.rows.get(key);
      if (!row) {
        row = element("tr", {}, ...this.kinds.map((kind) => element("td", { class: kind })));
        this.rows.set(key, row);
      }
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
      cells.forEach((cell, i) => {
        if (typeof cell === "function") cell(row.children[i]);
        else setText(row.children[i], cell);
      });
    });
    this.table.hidden = entries.length === 0;
    this.empty.hidden = entries.length > 0;
  }
}

function tag(state) {
  return (cell) => {
    const shown = cell.firstChild ?? cell.appendChild(element("span", { class: "tag" }));
    shown.dataset.state = state;
    setText(shown, state);
  };
}

function meter(share) {
  return (cell) => {
    const shown = cell.firstChild ?? cell.appendChild(element("span", { class: "meter" }, element("i")));
    shown.firstChild.style.width = `${(100 * Math.min(1, share)).toFixed(1)}%`;
  };
}

function tenantCell(tenant, colourOf) {
  return (cell) => {
    const name = tenant ?? "–";
    if (cell.title === name && cell.dataset.colour === colourOf(tenant)) return;
    cell.title = name;
    cell.dataset.colour = colourOf(tenant);
    cell.replaceChildren(swatch(colourOf(tenant)), shortName(name));
  };
}

export const sequenceKey = (row) => `${row.request} ${row.samples.join(",")}`;

export class Sequences {
  // chosen(key): another sequence was chosen, or none (null).
  constructor(parent, chosen) {
    this.chosen = chosen;
    this.choice = null;
    this.table = new Table(
      parent,
      [["Request", "name"], ["Tenant", "name"], ["State", ""], ["Tokens", "number"],
        ["Cached", "number"], ["Preempted", "number"], ["Blocks", "number"], ["Block table", "blocks"]],
      ["No request is running. Send one, and its blocks appear here:", element("code")],
    );
  }

  // The model whose name the example has.
  setModel(model) {
    const body = JSON.stringify({ model, prompt: "A block table is", max_tokens: 200 });
    const call = `curl ${location.origin}/v1/completions -H 'Content-Type: application/json'`;
    setText(this.table.empty.querySelector("code"), `${call} -d '${body}'`);
  }

  show(sequences, colourOf) {
    if (this.choice !== null && !sequences.some((row) => sequenceKey(row) === this.choice)) this.choose(null);
    this.table.show(sequences.slice(0, MOST_ROWS).map((row) => {
      const left = row.num_blocks - row.ids.length;
      return {
        key: sequenceKey(row),
        cells: [
          (cell) => this.name(cell, row),
          tenantCell(row.tenant, colourOf),
          tag(row.state),
          `${count(row.tokens)} of ${count(row.prompt_tokens + row.output_tokens)}`,
          count(row.cached_tokens),
          row.preemptions ? `${row.preemptions}×` : "–",
          count(row.num_blocks),
          ranges(row.ids, MOST_RANGES) + (left ? ` (${count(left)} more)` : ""),
        ],
      };
    }));
  }

  name(cell, row) {
    const key = sequenceKey(row);
    let button = cell.firstChild;
    if (!button) {
      button = cell.appendChild(element("button", { type: "button" }));
      button.addEventListener("click", () => this.choose(this.choice === key ? null : key));
    }
    const samples = row.samples.length === 1 && row.samples[0] === 0 ? "" : ` [${row.samples.join(", ")}]`;
    setText(button, shortName(clientName(row.request)) + samples);
    button.title = `${clientName(row.request)}${samples}: show its blocks in the map`;
    button.setAttribute("aria-pressed", this.choice === key);
  }

  choose(key) {
    this.choice = key;
    this.chosen(key);
  }
}

export class Waiting {
  constructor(parent) {
    this.table = new Table(
      parent,
      [["Request", "name"], ["Tenant", "name"], ["State", ""], ["Prompt", "number"],
        ["Output", "number"], ["Here for", "number"]],
      "Nobody waits.",
    );
  }

  show(requests, colourOf, now) {
    this.table.show(requests.slice(0, MOST_ROWS).map((row) => ({
      key: row.request,
      cells: [
        (cell) => { cell.title = clientName(row.request); setText(cell, shortName(cell.title)); },
        tenantCell(row.tenant, colourOf),
        tag(row.state),
        count(row.prompt_tokens),
        count(row.output_tokens),
        duration(Math.max(0, now - row.arrival)),
      ],
    })));
  }
}

export class Tenants {
  constructor(parent) {
    this.table = new Table(
      parent,
      [["Tenant", "name"], ["Weight", "number"], ["Run / wait", "number"], ["Blocks", "number"],
        ["Prompt", "number"], ["Output", "number"], ["Last minute", "number"], ["Over weight", ""]],
      "No tenant has had a request yet.",
    );
  }

  show(tenants, colourOf) {
    const most = Math.max(1e-9, ...tenants.map((t) => t.recent / t.weight));
    this.table.show(tenants.slice(0, MOST_ROWS).map((row) => ({
      key: row.tenant ?? "",
      cells: [
        tenantCell(row.tenant, colourOf),
        `${row.weight}`,
        `${count(row.running)} / ${count(row.waiting)}`,
        count(row.blocks),
        short(row.prompt_tokens),
        short(row.output_tokens),
        short(row.recent),
        meter(row.recent / row.weight / most),
      ],
    })));
  }
}

// Of a cluster; an engine alone has none.
export class Workers {
  constructor(parent) {
    this.table = new Table(
      parent,
      [["Worker", "name"], ["Role", ""], ["State", ""], ["Requests", "number"], ["Run / wait", "number"],
        ["Blocks held", "number"], ["Restarts", "number"], ["Role changes", "number"]],
      "",
    );
  }

  show(workers) {
    this.table.show(workers.map((row) => ({
      key: row.name,
      cells: [
        row.name,
        row.role === "both" ? "prefill, decode" : row.role,
        tag(row.state),
        count(row.requests),
        `${count(row.running)} / ${count(row.waiting)}`,
        `${count(row.blocks_held)} of ${count(row.blocks)}`,
        count(row.restarts),
        count(row.flips),
      ],
    })));
  }
}

// Where the tokens of prompts were found when their requests first started.
export class Hits {
  constructor(parent) {
    this.bar = element("div", { class: "bar", "aria-hidden": "true" });
    this.legend = element("ul", { class: "legend" });
    this.text = element("p", { class: "muted" });
    this.parts = new Map(); // by tier: [part of the bar, value in the legend]
    parent.append(element("h3", {}, "Prompt tokens found"), this.bar, this.legend, this.text);
  }

  // found: tokens by tier, from the device down.
  show({ queried, found }) {
    const rest = queried - Object.values(found).reduce((sum, tokens) => sum + tokens, 0);
    const entries = [...Object.entries(found), ["computed", rest]];
    entries.forEach(([tier, tokens], i) => {
      const colour = tier === "computed" ? "free" : TIERS[i];
      const [part, value] = this.parts.get(tier) ?? this.add(tier, colour);
      part.style.width = queried ? `${(100 * tokens) / queried}%` : "0";
      setText(value, percent(tokens, queried));
    });
    setText(this.text, queried ? `of ${plural(queried, "prompt token")}` : "No prompt has been looked up yet.");
  }

  add(tier, colour = "tenant-more") {
    const part = element("i");
    part.style.background = `var(--${colour})`;
    const value = element("b");
    const entry = element("li", {}, swatch(colour), `${TIER_WORDS[tier] ?? tier} `, value);
    const last = this.parts.get("computed"); // stays behind the tiers
    this.bar.insertBefore(part, last?.[0] ?? null);
    this.legend.insertBefore(entry, last?.[1].parentElement ?? null);
    this.parts.set(tier, [part, value]);
    return this.parts.get(tier);
  }
}

// What was decided, newest first.
export class Decisions {
  constructor(list, kinds) {
    Object.assign(this, { list, kinds, last: "", entries: [] });
    kinds.addEventListener("change", () => this.draw());
  }

  show(entries, now) {
    this.entries = [...entries].reverse();
    this.now = now;
    for (const kind of new Set(entries.map((entry) => entry.kind))) {
      if (![...this.kinds.options].some((option) => option.value === kind)) {
        this.kinds.append(element("option", { value: kind }, kind.replaceAll("_", " ")));
      }
    }
    this.draw();
  }

  draw() {
    const shown = this.entries.filter((e) => !this.kinds.value || e.kind === this.kinds.value);
    const items = shown.map((entry) => {
      const when = element("time", {}, ago(Math.max(0, this.now - entry.now)));
      const text = element("p", {}, element("b", {}, clientName(entry.request)), entry.request ? " " : "", entry.words);
      return element("li", { "data-kind": entry.kind }, when, text);
    });
    if (!items.length) items.push(element("li", { class: "empty" }, "Nothing has been decided yet."));
    this.list.replaceChildren(...items);
  }
}
