// Drawing on the canvas: columns, blocks, arcs and outlines in the page's colours.

import { KINDS } from "./model.js";
import { compact, percent, short, whole } from "./words.js";

export class Painter {
  #colours = {};
  #inks = {}; // The colour of a text on a block, by the block's.
  #font = "sans-serif";

  constructor(context) {
    this.context = context;
    this.recolour();
  }

  recolour() {
    const style = getComputedStyle(document.documentElement);
    const names = ["track", "line", "edge", "ink", "muted", "move", "focus", "surface", "warn", ...KINDS.map((k) => k.key)];
    for (const name of names) this.#colours[name] = style.getPropertyValue(`--${name}`).trim();
    for (const { key } of KINDS) this.#inks[key] = luminance(this.#colours[key]) > 0.18 ? "#10131c" : "#ffffff";
    this.#font = style.getPropertyValue("--sans").trim() || "sans-serif";
  }

  clear(width, height, ratio) {
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }

  // The vertical axis: lines at these numbers of tokens, over the whole width.
  axis(marks, width) {
    const c = this.context;
    c.font = `400 10px ${this.#font}`;
    c.textAlign = "right";
    for (const { tokens, y } of marks) {
      c.fillStyle = this.#colours.edge;
      c.fillRect(46, Math.round(y), width - 46, 1);
      c.fillStyle = this.#colours.muted;
      c.fillText(compact(tokens), 40, y + 3.5);
    }
    const top = marks.at(-1);
    if (top) c.fillText("tokens", 40, top.y - 9);
  }

  column({ replica, x, w, bottom, h, named, open }, name) {
    const c = this.context;
    const top = bottom - h;
    const word = { STARTING: "opening", WAKING: "waking", ASLEEP: "asleep", DRAINING: "draining" }[replica.state];
    const hollow = word !== undefined && replica.state !== "DRAINING"; // It takes no requests.
    const draining = replica.state === "DRAINING";
    c.lineWidth = 1;
    if (hollow) {
      c.setLineDash([3, 3]);
      c.strokeStyle = this.#colours.muted;
      c.strokeRect(x + 0.5, top + 0.5, w - 1, h - 1);
      c.setLineDash([]);
    } else {
      c.fillStyle = this.#colours.track;
      c.fillRect(x, top, w, h);
    }
    if (draining) this.#hatch(x, top, w, h);
    c.fillStyle = draining ? this.#colours.warn : this.#colours.line;
    // The line is at the capacity; above a column that goes on there is none.
    if (!hollow && !open) c.fillRect(x - 1, top - 2, w + 2, 2);
    if (!named) {
      if (draining) c.fillRect(x, bottom + 11, w, 2);
      return;
    }
    c.textAlign = "center";
    c.font = `500 11px ${this.#font}`;
    c.fillStyle = this.#colours.muted;
    c.fillText(short(name, Math.max(4, Math.floor(w / 6.4))), x + w / 2, bottom + 22, w + 8);
    const used = w < 150 ? "" : ` of ${whole(replica.capacity)} tokens`;
    const state = word ?? percent(replica.used / replica.capacity) + used;
    c.font = `${draining ? 600 : 400} 10px ${this.#font}`;
    c.fillStyle = draining ? this.#colours.warn : this.#colours.muted;
    c.fillText(state, x + w / 2, top - 5, w + 10);
  }

  #hatch(x, y, w, h) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(x, y, w, h);
    c.clip();
    c.beginPath();
    for (let at = -h; at < w; at += 8) {
      c.moveTo(x + at, y + h);
      c.lineTo(x + at + h, y);
    }
    c.strokeStyle = this.#colours.warn;
    c.globalAlpha = 0.28;
    c.stroke();
    c.restore();
  }

  // A block that has left, or a column if `kind` is null; `share` of its fading is over.
  gone({ x, y, w, h, kind }, share) {
    const c = this.context;
    c.globalAlpha = Math.max(0, 1 - share) * 0.7;
    c.fillStyle = kind === null ? this.#colours.track : this.#colours[KINDS[kind].key];
    c.fillRect(x, y, w, h);
    c.globalAlpha = 1;
  }

  blocks(places, kind) {
    this.context.fillStyle = this.context.strokeStyle = this.#colours[KINDS[kind].key];
    for (const place of places) this.#block(place);
  }

  flying(place, kind) {
    const c = this.context;
    const seen = { ...place, h: Math.max(4, place.h) };
    c.save();
    c.shadowColor = "rgb(0 0 0 / 35%)";
    c.shadowBlur = 10;
    c.shadowOffsetY = 4;
    c.fillStyle = this.#colours[KINDS[kind].key];
    this.#block(seen);
    c.restore();
    c.strokeStyle = this.#colours.move;
    c.lineWidth = 2;
    c.strokeRect(seen.x - 1, seen.y - 1, seen.w + 2, seen.h + 2);
  }

  #block({ x, y, w, h, waits }) {
    const c = this.context;
    if (waits) {
      c.lineWidth = 1;
      c.strokeStyle = this.#colours.muted;
      c.strokeRect(x + 0.5, y + 0.5, Math.max(0.5, w - 1), h - 1);
      return;
    }
    const seam = h > 3 ? 1 : h > 1.2 ? 0.4 : 0;
    if (w < 16 || h < 7) {
      c.fillRect(x, y + seam, w, Math.max(0.6, h - seam));
      return;
    }
    c.beginPath();
    c.roundRect(x, y + seam, w, h - seam, 2.5);
    c.fill();
  }

  // True if a block has room for its request's name.
  fits({ w, h, waits }) {
    return !waits && w >= 54 && h >= 14;
  }

  label({ x, y, w, h }, kind, { label, tokens }) {
    const c = this.context;
    c.font = `500 11px ${this.#font}`;
    c.fillStyle = this.#inks[KINDS[kind].key];
    const middle = y + h / 2 + 4.5;
    const count = compact(tokens);
    const counted = w >= 110;
    c.textAlign = "left";
    c.fillText(short(label, Math.floor((w - (counted ? 52 : 12)) / 6.6)), x + 6, middle);
    c.textAlign = "right";
    if (counted) c.fillText(count, x + w - 6, middle);
  }

  stripes({ x, y, w, h }) {
    const c = this.context;
    c.fillStyle = this.#colours.surface;
    c.globalAlpha = 0.45;
    for (let at = 2; at < h; at += 5) c.fillRect(x, y + at, w, Math.min(2, h - at));
    c.globalAlpha = 1;
  }

  // The arc of a move, dotted for the tokens path; it fades in the second half of its `age`, 0 to 1.
  arc({ from, to, tokens }, age) {
    const c = this.context;
    c.lineWidth = 1.75;
    c.strokeStyle = this.#colours.move;
    const [x1, x2] = [from.x + from.w / 2, to.x + to.w / 2];
    const clear = (column) => column.bottom - column.h - (column.named ? 18 : 4);
    const [y1, y2] = [clear(from), clear(to)];
    const peak = Math.max(-4, Math.min(y1, y2) - Math.min(28, 10 + Math.abs(x2 - x1) * 0.06));
    c.globalAlpha = age < 0.5 ? 0.9 : 1.8 * (1 - age);
    c.setLineDash(tokens ? [2, 4] : []);
    c.beginPath();
    c.moveTo(x1, y1);
    c.bezierCurveTo(x1, peak, x2, peak, x2, y2);
    c.stroke();
    c.setLineDash([]);
    c.beginPath();
    c.moveTo(x2 - 4, y2 - 5);
    c.lineTo(x2, y2);
    c.lineTo(x2 + 4, y2 - 5);
    c.stroke();
    c.globalAlpha = 1;
  }

  outline(place, colour, width) {
    const c = this.context;
    c.strokeStyle = this.#colours[colour];
    c.lineWidth = width;
    c.strokeRect(place.x - 1.5, place.y - 1, place.w + 3, Math.max(3, place.h) + 1.5);
  }
}

// The relative luminance of a colour like #2c3a7c, by WCAG.
function luminance(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  const [red, green, blue] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
