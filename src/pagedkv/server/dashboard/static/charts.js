// Figures over the last minutes, as lines or as layers on each other.

import { ago, element, setText, swatch } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LONGEST = 300; // seconds that are shown, once there are so many
const SHORTEST = 60;
const LEFT = 52; // pixels
const BOTTOM = 20;
const TOP = 8;

function draw(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// A round number that is not less.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((k) => k * power).find((k) => k >= value * 0.999);
}

export class TimeChart {
  // series: { key, label, colour } from the bottom up. say: a value as text. note: what it shows.
  constructor(parent, { title, note, series, stacked = false, wide = false, say, whole = false }) {
    Object.assign(this, { series, stacked, say, title, whole });
    this.values = null;
    this.cursor = null; // seconds before the end
    this.span = SHORTEST;
    this.plot = draw("svg", { "aria-hidden": "true" });
    this.legend = element("ul", { class: "legend" });
    this.labels = series.map(({ label, colour }) => {
      const value = element("b");
      this.legend.append(element("li", {}, swatch(colour), `${label} `, value));
      return value;
    });
    this.when = element("p", { class: "muted" }, note);
    this.note = note;
    this.box = element("section", { class: `card chart${wide ? " wide" : ""}`, tabindex: "0", role: "group" });
    this.box.append(
      element("div", { class: "card-head" }, element("h2", {}, title), this.when),
      this.plot,
      this.legend,
    );
    parent.append(this.box);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.box.addEventListener("blur", () => this.move(null));
    this.box.addEventListener("keydown", (event) => this.press(event));
  }

  // times: seconds, ascending. columns: by the series' keys, as long; null where nothing is known.
  show(times, columns, now) {
    this.values = { times, columns, now };
    this.span = Math.min(LONGEST, Math.max(SHORTEST, now));
    this.draw();
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    this.move(Math.round((1 - Math.min(1, Math.max(0, share))) * this.span));
  }

  press(event) {
    const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[event.key];
    if (event.key === "Escape") this.move(null);
    if (step === undefined) return;
    event.preventDefault();
    this.move(Math.min(this.span, Math.max(0, (this.cursor ?? 0) + step)));
  }

  move(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (!this.values || !width) return;
    const { times, columns, now } = this.values;
    const layers = this.layers(times, columns, now - this.span);
    const highest = Math.max(0, ...layers.flatMap(({ upper }) => upper.filter((v) => v != null)));
    const top = this.whole ? Math.max(highest, 1) : roundUp(highest * 1.02);
    const x = (time) => LEFT + ((time - now + this.span) / this.span) * (width - LEFT);
    const y = (value) => TOP + (1 - value / top) * (height - BOTTOM - TOP);
    const parts = this.axes(width, height, top, x, y);
    for (const layer of layers) parts.push(...this.layer(layer, x, y));
    if (this.cursor !== null) {
      const at = x(now - this.cursor);
      parts.push(draw("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: height - BOTTOM }));
    }
    this.plot.replaceChildren(...parts);
    this.read(times, columns, now);
  }

  // What each series fills: times, and from where to where.
  layers(times, columns, from) {
    const first = Math.max(0, times.findIndex((time) => time >= from) - 1);
    const shown = times.slice(first);
    if (shown.length) shown[shown.length - 1] = Math.max(shown.at(-1), this.values.now);
    let lower = shown.map(() => 0);
    return this.series.map(({ key, colour }) => {
      const values = columns[key].slice(first);
      const upper = this.stacked ? values.map((v, i) => (v == null ? null : v + lower[i])) : values;
      const layer = { times: shown, lower, upper, colour };
      if (this.stacked) lower = upper.map((v, i) => v ?? lower[i]);
      return layer;
    });
  }

  axes(width, height, top, x, y) {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      parts.push(draw("line", { class: "axis", x1: LEFT, x2: width, y1: at, y2: at }));
      const place = { class: "tick", x: LEFT - 8, y: at + 4, "text-anchor": "end" };
      parts.push(draw("text", place, this.say(top * share)));
    }
    for (const [seconds, anchor, text] of [[this.span, "start", ago(this.span)], [0, "end", "now"]]) {
      const at = x(this.values.now - seconds);
      parts.push(draw("text", { class: "tick", x: at, y: height - 4, "text-anchor": anchor }, text));
    }
    return parts;
  }

  layer({ times, lower, upper, colour }, x, y) {
    const paths = [];
    let run = [];
    const close = () => {
      if (run.length) paths.push(this.path(run, times, lower, upper, x, y));
      run = [];
    };
    upper.forEach((value, i) => (value == null ? close() : run.push(i)));
    close();
    return paths.map((d) => {
      const made = draw("path", this.stacked ? { d } : { d, class: "line" });
      if (this.stacked) made.style.fill = `var(--${colour})`;
      else made.style.stroke = `var(--${colour})`;
      return made;
    });
  }

  path(run, times, lower, upper, x, y) {
    const at = run.map((i) => Math.max(LEFT, x(times[i])));
    if (run.length === 1) {
      // One point alone would not be seen.
      run = [run[0], run[0]];
      at.unshift(Math.max(LEFT, at[0] - 3));
    }
    const points = (values) => run.map((i, k) => `${at[k].toFixed(1)},${y(values[i]).toFixed(1)}`);
    if (!this.stacked) return `M${points(upper).join("L")}`;
    return `M${points(upper).join("L")}L${points(lower).reverse().join("L")}Z`;
  }

  // The values under the cursor, or the last ones, go into the legend.
  read(times, columns, now) {
    const at = this.cursor === null ? null : now - this.cursor;
    let place = times.length - 1;
    if (at !== null) while (place > 0 && times[place] > at) place--;
    const known = this.series.map(({ key }) => {
      if (at !== null) return columns[key][place];
      return columns[key].findLast((value) => value != null);
    });
    known.forEach((value, i) => setText(this.labels[i], value == null ? "–" : this.say(value)));
    setText(this.when, this.cursor === null ? this.note : `${Math.round(this.cursor)} s ago`);
    const said = this.series.map(({ label }, i) => `${label} ${this.labels[i].textContent}`);
    this.box.setAttribute("aria-label", `${this.title}: ${said.join(", ")}. Arrow keys go back in time.`);
  }
}
