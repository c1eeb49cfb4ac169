// The block pool as a map: a cell a block, from 64 to 100,000 and more.
//
// Every cell is one pixel of a small image, which is drawn enlarged; lines between the cells, and
// what is empty in a block, are drawn over it where cells are large enough to see them.

import { channels, colour } from "./format.js";

const LARGEST = 40; // CSS pixels of a cell's side
const GAP_FROM = 5; // cells have gaps from this size on, and show how full they are
const STATES = ["free", "cached", "held", "shared", "draining"];
export const NO_OWNER = 0xffff;
export const COUNTS = [1, 2, 3, 5, 9]; // holders from which on a block has the next colour

export class PoolMap {
  // changed(block): another block is looked at; 0: none.
  constructor(frame, changed) {
    this.frame = frame;
    this.changed = changed;
    this.cells = frame.querySelector("#cells");
    this.marks = frame.querySelector("#marks");
    this.image = document.createElement("canvas");
    this.mode = "state";
    this.pool = null;
    this.sequences = [];
    this.tenantColour = () => "tenant-more";
    this.block = 0; // looked at
    this.lit = null; // blocks of a sequence that is looked at
    this.frames = 0;
    new ResizeObserver(() => this.layOut()).observe(frame);
    frame.addEventListener("pointermove", (event) => this.look(this.at(event)));
    frame.addEventListener("pointerdown", (event) => this.look(this.at(event)));
    frame.addEventListener("pointerleave", () => document.activeElement !== frame && this.look(0));
    frame.addEventListener("focus", () => this.look(this.block || 1));
    frame.addEventListener("blur", () => this.look(0));
    frame.addEventListener("keydown", (event) => this.press(event));
  }

  // pool: numbers and arrays. sequences: as the server lists them.
  show(pool, sequences, tenantColour) {
    const other = this.pool === null || this.pool.num_blocks !== pool.num_blocks;
    this.pool = pool;
    this.sequences = sequences;
    this.tenantColour = tenantColour;
    if (other) {
      if (this.block > pool.num_blocks) this.look(0);
      this.layOut();
    } else {
      this.draw();
    }
  }

  setMode(mode) {
    this.mode = mode;
    this.draw();
  }

  // Sets the block that is looked at; 0: none.
  look(block) {
    if (block === this.block || !this.pool) return;
    this.block = block;
    this.mark();
    this.changed(block);
  }

  // Dims all blocks but these; null: none.
  light(blocks) {
    this.lit = blocks;
    this.mark();
  }

  at(event) {
    const box = this.cells.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const row = Math.floor((event.clientY - box.top) / this.size);
    const block = row * this.columns + column + 1;
    const inside = column >= 0 && row >= 0 && column < this.columns && block <= this.pool?.num_blocks;
    return inside ? block : 0;
  }

  press(event) {
    const step = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      PageUp: -10 * this.columns, PageDown: 10 * this.columns, Home: -Infinity, End: Infinity,
    }[event.key];
    if (event.key === "Escape") this.look(0);
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey || !this.pool) return;
    event.preventDefault();
    const last = this.pool.num_blocks;
    const next = (this.block || 1) + step;
    const inRange = next >= 1 && next <= last;
    if (inRange || Math.abs(step) !== this.columns) this.look(Math.min(last, Math.max(1, next)));
  }

  // The largest cells with which all blocks find room.
  layOut() {
    const width = this.frame.clientWidth;
    if (!this.pool || !width) return;
    const total = this.pool.num_blocks;
    const height = Math.max(240, Math.min(innerHeight * 0.5, width * 0.6, 900));
    const ratio = devicePixelRatio || 1;
    let pixels = Math.floor(LARGEST * ratio); // of the device, a cell's side
    const rows = () => Math.ceil(total / Math.max(1, Math.floor((width * ratio) / pixels)));
    while (pixels > 1 && (rows() * pixels) / ratio > height) pixels--;
    this.pixels = pixels;
    this.size = pixels / ratio;
    this.rows = rows();
    this.columns = Math.ceil(total / this.rows); // the last row is as long as the others, or nearly
    for (const canvas of [this.cells, this.marks]) {
      canvas.width = this.columns * pixels;
      canvas.height = this.rows * pixels;
      canvas.style.width = `${this.columns * this.size}px`;
      canvas.style.height = `${this.rows * this.size}px`;
    }
    this.image.width = this.columns;
    this.image.height = this.rows;
    this.draw();
  }

  draw() {
    if (!this.pool || !this.columns) return;
    const { num_blocks: total } = this.pool;
    const small = this.image.getContext("2d");
    const data = small.createImageData(this.columns, this.rows);
    const cells = new Uint32Array(data.data.buffer);
    const { palette, index } = this.colours();
    for (let i = 0; i < total; i++) cells[i] = palette[index(i)];
    small.putImageData(data, 0, 0);
    const large = this.cells.getContext("2d");
    large.clearRect(0, 0, this.cells.width, this.cells.height);
    large.imageSmoothingEnabled = false;
    large.drawImage(this.image, 0, 0, this.cells.width, this.cells.height);
    if (this.size >= GAP_FROM) {
      this.drawEmptySlots(large);
      this.drawGaps(large);
    }
    this.frames++;
    this.frame.dataset.cells = total;
    this.frame.dataset.columns = this.columns;
    this.frame.dataset.frames = this.frames;
    this.frame.dataset.mode = this.mode;
    this.mark();
  }

  // A palette of pixels, and which of them each block has.
  colours() {
    const pixel = (name) => {
      const [red, green, blue] = channels(name);
      return (255 << 24) | (blue << 16) | (green << 8) | red; // little-endian, as all of today
    };
    const { states, counts, owners } = this.pool;
    if (this.mode === "count") {
      const names = ["free", "cached", ...COUNTS.map((_, i) => `count-${i + 1}`)];
      const step = (n) => COUNTS.findLastIndex((from) => n >= from);
      return {
        palette: names.map(pixel),
        index: (i) => (counts[i] ? 2 + step(counts[i]) : states[i] === 0 ? 0 : 1),
      };
    }
    if (this.mode === "tenant") {
      const names = ["free", "cached", ...this.sequences.map((s) => this.tenantColour(s.tenant))];
      const known = new Map();
      const palette = names.map((name) => known.get(name) ?? known.set(name, pixel(name)).get(name));
      palette.push(pixel("tenant-more"));
      return {
        palette,
        index: (i) => {
          if (owners[i] < this.sequences.length) return 2 + owners[i];
          return counts[i] ? palette.length - 1 : states[i] === 0 ? 0 : 1;
        },
      };
    }
    return { palette: STATES.map(pixel), index: (i) => states[i] };
  }

  // The part of a block in which no slot has a token, from the top.
  drawEmptySlots(large) {
    const { states, filled, block_size: slots, num_blocks: total } = this.pool;
    large.globalAlpha = 0.72;
    large.fillStyle = colour("surface");
    for (let i = 0; i < total; i++) {
      if (states[i] === 0 || filled[i] >= slots) continue;
      const [x, y] = this.corner(i);
      large.fillRect(x, y, this.pixels, Math.round(this.pixels * (1 - filled[i] / slots)));
    }
    large.globalAlpha = 1;
  }

  drawGaps(large) {
    const gap = Math.max(1, Math.round(this.pixels / 14));
    large.fillStyle = colour("surface");
    for (let column = 1; column <= this.columns; column++) {
      large.fillRect(column * this.pixels - gap, 0, gap, this.cells.height);
    }
    for (let row = 1; row <= this.rows; row++) {
      large.fillRect(0, row * this.pixels - gap, this.cells.width, gap);
    }
  }

  corner(i) {
    return [(i % this.columns) * this.pixels, Math.floor(i / this.columns) * this.pixels];
  }

  // Over the map: a veil with holes where the blocks of a sequence are, and a frame for one block.
  mark() {
    const over = this.marks.getContext("2d");
    over.clearRect(0, 0, this.marks.width, this.marks.height);
    if (!this.columns) return;
    if (this.lit) {
      over.globalAlpha = 0.82;
      over.fillStyle = colour("surface");
      over.fillRect(0, 0, this.marks.width, this.marks.height);
      over.globalAlpha = 1;
      for (const block of this.lit) {
        over.clearRect(...this.corner(block - 1), this.pixels, this.pixels);
      }
    }
    if (this.block) {
      const [x, y] = this.corner(this.block - 1);
      const ratio = devicePixelRatio || 1;
      const side = Math.max(this.pixels, 5 * ratio);
      const from = (this.pixels - side) / 2;
      for (const [name, wide] of [["surface", 4 * ratio], ["ink", 2 * ratio]]) {
        over.strokeStyle = colour(name);
        over.lineWidth = wide;
        over.strokeRect(x + from, y + from, side, side);
      }
    }
    this.frame.dataset.block = this.block;
  }
}
