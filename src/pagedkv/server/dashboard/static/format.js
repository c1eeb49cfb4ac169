// Numbers, times and block ids as text; colours from the style sheet.

const integer = new Intl.NumberFormat("en");

export const count = (value) => (value == null ? "–" : integer.format(Math.round(value)));

export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export const percent = (part, whole) => {
  if (!whole) return "–";
  const value = (100 * part) / whole;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
};

// Seconds, with the unit that fits.
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${+(seconds * 1e6).toPrecision(2)} µs`;
  if (seconds < 1) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 90) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export const ago = (seconds) => (seconds < 1 ? "now" : `${duration(Math.floor(seconds))} ago`);

// The number that large values are short with: 12.3 k, 4 M.
export function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
  }
  return `${+value.toPrecision(3)}`;
}

// The name that the client knows: the core's has numbers behind it.
export const clientName = (request) => request.replace(/(#\d+)+(@\d+)?$/, "");

// A long name without its middle: what tells names apart is mostly at their ends.
export const shortName = (name) => (name.length > 26 ? `${name.slice(0, 15)}…${name.slice(-10)}` : name);

// Block ids as ranges: [4, 5, 6, 9] is "4–6, 9".
export function ranges(ids, most) {
  const parts = [];
  for (let i = 0; i < ids.length && parts.length < most; ) {
    let end = i;
    while (end + 1 < ids.length && ids[end + 1] === ids[end] + 1) end++;
    parts.push(end > i ? `${ids[i]}–${ids[end]}` : `${ids[i]}`);
    i = end + 1;
    if (parts.length === most && i < ids.length) parts.push("…");
  }
  return parts.join(", ");
}

// Little-endian numbers from base64.
export function numbers(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

// What a colour of the style sheet is in the present theme.
export function colour(name) {
  const probe = document.getElementById("probe");
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.style.color = "";
  return found;
}

// The same as [r, g, b].
export const channels = (name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);

// An element with attributes, and text or children in it. Text is never read as markup.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function swatch(name) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${name})`;
  return made;
}

// Sets a text if it is another one: so that nothing is announced, or selected, anew for nothing.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
